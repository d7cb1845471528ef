// The numbers of the integer program's options (`hetrl.search.ilp.space`), and which rows are worth keeping.
#pragma once

#include <vector>

#include "ilp_states.h"
#include "value.h"

// Set the seconds of a version's way to rollouts on each class alone: of another group, and of the same one.
//
// Rollouts of the same group are taken to use all its nodes of the class.
inline void note_transfers(const View& x, const Tables& tables, const Parts& parts, const Floats& out) {
    const Int generation = tables.generation, kinds = tables.classes, owner = x.group[generation];
    const Int trained = x.group[tables.trainer];
    const Genes other = x.devices[1], options = x.classes[generation];
    const Ints runs = parts.runs[generation];
    const std::vector<std::int32_t> other_before(other.begin(), other.end()),
        options_before(options.begin(), options.end());
    const std::vector<Int> runs_before(runs.begin(), runs.end());
    for (Int kind = 0; kind < kinds; ++kind) {
        if (tables.serving.options[generation][kind] == 0) {
            continue;
        }
        fill(options, std::int32_t(0));
        fill(runs, Int(0));
        fill(other, std::int32_t(0));
        options[kind] = 1;
        runs[kind] = 1;
        other[kind] = tables.devices[kind] == tables.per_node[kind] ? 1 : std::int32_t(tables.per_node[kind]);
        x.group[generation] = 1;
        out[at(APART, kind, kinds)] = out[at(TOGETHER, kind, kinds)] = sync_seconds(0, x, tables, parts).transfer();
        if (const Int devices = x.devices[trained][kind]) {
            x.group[generation] = std::int32_t(trained);
            runs[kind] = std::max(replicas_of(generation, kind, 1, devices, tables), Int(1));
            out[at(TOGETHER, kind, kinds)] = sync_seconds(0, x, tables, parts).transfer();
        }
    }
    x.group[generation] = std::int32_t(owner);
    std::copy(other_before.begin(), other_before.end(), other.begin());
    std::copy(options_before.begin(), options_before.end(), options.begin());
    std::copy(runs_before.begin(), runs_before.end(), runs.begin());
}

// Add the pause of a version, with the renewal of contexts; in mode async note what `hetrl.search.ilp.options` makes
// the chain of.
//
// ALONE lies under CHAIN, WHOLE under INFERENCES, SHARED under TRAINING and the pause under TRANSFER until then.
inline void note_generation(const View& x, const Tables& tables, const Parts& parts, const Floats& out) {
    const double pause = sync_seconds(0, x, tables, parts).pause + parts.rollouts[RENEWAL];
    for (Int kind = 0; kind < tables.classes; ++kind) {
        out[at(RUNS, kind, tables.classes)] = parts.runs[tables.generation][kind] > 0 ? 1.0 : 0.0;
    }
    out[GENERATION] += pause;
    if (tables.staleness > 0) {
        out[GENERATION] += parts.rollouts[REFILL];
        out[INFERENCES] = parts.rollouts[WHOLE];
        out[TRAINING] = parts.rollouts[SHARED];
        out[CHAIN] = parts.rollouts[ALONE];
        out[TRANSFER] = pause;
    }
}

// Set an option's numbers from the task's parts; infinite seconds where the devices do not carry the task.
inline void note_option(Int task, const View& x, const Tables& tables, const Parts& parts, const Floats& out) {
    const Int training = task == tables.trainer ? TRAINING : CRITIC;
    const Int phase = tables.is_training[task] ? training : tables.is_inference[task] ? INFERENCES : GENERATION;
    fill(out, 0.0);
    out[phase] = parts.seconds[task] + parts.switch_seconds[task] - parts.scoring[task];
    if (tables.takes.size() > 1 && task == tables.takes[1]) {
        out[VALUES] = out[INFERENCES];
    }
    out[INFERENCES] += parts.scoring[task];  // with mode async's exception this is a bound still, of a batch's way
    for (Int kind = 0; kind < tables.classes; ++kind) {
        const double resident = parts.resident_gb[task][kind], host = parts.host_gb[task][kind];
        const double peak = parts.peak_gb[task][kind];
        out[at(RESIDENT_GB, kind, tables.classes)] = resident;
        out[at(ACTIVE_GB, kind, tables.classes)] = peak - resident;
        out[at(HOST_GB, kind, tables.classes)] = host;
        if (peak > tables.usable_gb[kind] || host * double(tables.per_node[kind]) > tables.node_gb[kind]) {
            out[phase] = INFINITE;
        }
    }
    if (std::isfinite(out[phase]) && task == tables.trainer) {
        note_transfers(x, tables, parts, out);
    }
    if (std::isfinite(out[phase]) && task == tables.generation) {
        note_generation(x, tables, parts, out);
    }
}

// See `hetrl.search.core.functions.value_options`.
Int value_options(Int task, const Genes& vector, const Genes2& genes, const Ints& place, const Tables& tables,
                  const Room& room, const Parts& parts, const Numbers& out) {
    const View x = view(vector, tables);
    for (Int& n = place[0]; n < genes.size(); ++n) {
        const std::int32_t* row = genes[n].begin();
        std::copy_n(row, tables.classes, x.classes[task].begin());
        std::copy_n(row + tables.classes, CHOICES, x.choice[task].begin());
        const Int missing = value_task(task, vector, tables, room, parts);
        if (missing != VALUED && !tables.is_training[task]) {
            return missing;
        }
        note_option(task, x, tables, parts, out[n]);
    }
    return VALUED;
}

// Rows that are kept, and which ones they are.
struct Kept {
    Kept(Int most, Int width, const Ints& places) : places(places), memory(most * width), width(width) {}

    // Keep a row unless one that was kept from `begin` on is nowhere larger.
    void offer(Int index, const Floats& row, Int begin) {
        const Numbers rows{memory.data(), {places.size(), width}};
        if (!is_dominated(row, rows, begin, count)) {
            copy(row, rows[count]);
            places[count] = index;
            ++count;
        }
    }

    const Ints& places;
    std::vector<double> memory;
    Int width;
    Int count = 0;
};

// See `hetrl.search.core.functions.undominated`.
Int undominated(const Numbers& rows, const Ints& order, const Ints& places) {
    Kept kept(order.size(), rows.sizes[1], places);
    for (const Int n : order) {
        kept.offer(n, rows[n], 0);
    }
    return kept.count;
}

// See `hetrl.search.core.functions.choose_states`.
Int choose_states(const Floats& rest_least, const Fixed& fixed, const Numbers& pool, const Numbers& noticed,
                  const Ints& order, const Ints& starts, const Ints& places) {
    Local<double> nowhere(rest_least.size(), INFINITE);
    Kept kept(order.size(), noticed.sizes[1], places);
    for (Int members = 1; members + 1 < starts.size(); ++members) {
        const Int begin = kept.count;
        for (Int index = starts[members]; index < starts[members + 1]; ++index) {
            const Int state = order[index];
            if (bound(pool[state], members, nowhere.all(), rest_least, fixed) <= fixed.limit) {
                kept.offer(state, noticed[state], begin);
            }
        }
    }
    return kept.count;
}
