// Seconds and memory of a training laid out in cohorts: `hetrl.cost.training` and `.memory`, summed up by classes.
//
// Each formula's source stands at its function in `hetrl.cost`; here they are put together from `TrainingTables` for
// cohorts instead of single replicas. `tests/search/test_search_value.py` holds both against each other.
#pragma once

#include "pipeline_value.h"
#include "reduction_value.h"

// Bytes of one rank of a stage.
struct Held {
    double state;        // weights, gradients and optimiser
    double activations;  // in the passes
    double embedding;    // at the end of a backward pass
    double update;       // in the update, in their place

    double active() const { return std::max({activations, embedding, update}); }
};

inline Held held_bytes(const Training& training, Int i, double layers) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int in_flight = choice[PIPELINE] - i, last = i == choice[PIPELINE] - 1;
    const double shards = training.shards(), parameters = stage_parameters(training, i, layers);
    const double state = numbers.state_bytes[0] + numbers.state_bytes[1] / shards;
    const double tokens = double(numbers.micro_batches[choice[MICRO_BATCH]]) * numbers.max_tokens;
    const double kept = numbers.kept[task][choice[TENSOR]][choice[RECOMPUTE]] * tokens * layers;
    const double working = numbers.working[task][choice[TENSOR]][choice[MICRO_BATCH]][choice[RECOMPUTE]][last];
    const double embedding = i == 0 ? numbers.embedding[task][choice[TENSOR]] : 0.0;
    return {state * parameters, double(in_flight) * kept + working, double(in_flight - 1) * kept + embedding,
            parameters * numbers.update_bytes / shards};
}

// Set for each stage the most layers that its smallest device holds, and the seconds of its slowest one.
inline void limit_stages(const Training& training, const Cohorts& cohorts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const double tokens = double(numbers.micro_batches[choice[MICRO_BATCH]]) * numbers.mean_tokens;
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const Int last = i == choice[PIPELINE] - 1;
        double usable = INFINITE, layer = 0.0, beside = 0.0;
        for (Int q = 0; q < found; ++q) {
            const Int kind = cohorts.kind[q][i];
            const auto both = numbers.both[task][kind][choice[TENSOR]][choice[RECOMPUTE]][last];
            layer = std::max(layer, both[1] + both[3] * tokens);
            beside = std::max(beside, both[0] + both[2] * tokens);
            usable = std::min(usable, tables.usable_gb[kind]);
        }
        cohorts.layer[i] = layer;
        cohorts.beside[i] = beside;
        const Held none = held_bytes(training, i, 0.0), one = held_bytes(training, i, 1.0);
        const double state = one.state - none.state, left = usable * 1e9 - none.state;  // a layer's, and all layers'
        cohorts.capacity[i] =
            std::floor(std::min({(left - none.activations) / (state + one.activations - none.activations),
                                 (left - none.embedding) / (state + one.embedding - none.embedding),
                                 (left - none.update) / (state + one.update - none.update)}));
    }
}

// Move layers over the boundaries of stages as the genes say, as far as stages have them and have room.
inline void move_layers(const Training& training, const Cohorts& cohorts) {
    const Ints& layers = cohorts.layers;
    for (Int i = 0; i + 1 < training.choice[PIPELINE]; ++i) {
        const Int there = Int(cohorts.capacity[i + 1]) - layers[i + 1], back = Int(cohorts.capacity[i]) - layers[i];
        const Int moved =
            clamp(training.choice[MOVED + i], -std::min(layers[i + 1] - 1, back), std::min(layers[i] - 1, there));
        layers[i] -= moved;
        layers[i + 1] += moved;
    }
}

inline void hold_memory(const Training& training, const Cohorts& cohorts, const Parts& parts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const double shards = training.shards();
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const double layers = double(cohorts.layers[i]);
        const Held held = held_bytes(training, i, layers);
        const double peak = (held.state + held.active()) / 1e9;
        double resident = held.state / 1e9, host = 0.0;
        if (choice[IDLE] == OFFLOAD) {  // gradients are dropped
            resident = 0.0;
            host =
                stage_parameters(training, i, layers) * (numbers.weight_bytes + numbers.state_bytes[1] / shards) / 1e9;
        }
        for (Int q = 0; q < found; ++q) {
            const Int kind = cohorts.kind[q][i];
            hold(task, kind, resident, peak, host, parts);
            parts.runs[task][kind] += cohorts.replicas[q];
            const double seconds = 2 * host * 1e9 * tables.host_byte[kind];
            parts.switch_seconds[task] = std::max(parts.switch_seconds[task], seconds);
        }
    }
}

// Share the samples out by the time of a full micro-batch on each cohort, alone on its links.
inline void share_by_pipelines(const Training& training, const Cohorts& cohorts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int unit = unit_of(training), size = choice[MICRO_BATCH], stages = choice[PIPELINE];
    const double part = double(numbers.samples) / double(numbers.minibatches * replicas);
    const Int place = numbers.place[Int(std::ceil(part))];
    const double together = 1 / numbers.per_sample[size][place];  // samples of a micro-batch
    const double tokens =
        micro_batch_tokens(2 * together * numbers.mean_tokens, 2, stages, numbers.fullest[size][place]);
    for (Int q = 0; q < found; ++q) {
        set_stages(training, q, STEP, tokens, cohorts);
        for (Int i = 0; i + 1 < stages; ++i) {
            set_hop(training, q, i, 0, STEP, tokens, 0, 1.0, cohorts);
        }
        // with no fewer micro-batches than stages, the time is nearly linear in their number (`following_seconds`)
        const double few = stages_seconds(stages, stages, cohorts);
        const double many = stages_seconds(stages, 2 * stages, cohorts);
        cohorts.slope[q] = (many - few) / double(stages) * double(unit) / (together * double(numbers.minibatches));
        cohorts.start[q] = few - (many - few);
    }
    share_samples(found, numbers.samples / unit, unit, cohorts);
}

// Add what the hops between sites send in an iteration: forward and back, and forward where the batch is scored.
inline void add_activations(const Training& training, const Cohorts& cohorts, const Parts& parts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int unit = unit_of(training);
    for (Int q = 0; q < found; ++q) {
        const double samples = double(cohorts.samples[q] * cohorts.replicas[q] + cohorts.extra[q] * unit);
        const double once = samples * numbers.mean_tokens * numbers.hop_bytes[task];
        const double both_ways = double(numbers.steps) / double(numbers.minibatches) * once;
        for (Int i = 0; i + 1 < choice[PIPELINE]; ++i) {
            const Int a = tables.site[cohorts.kind[q][i]], b = tables.site[cohorts.kind[q][i + 1]];
            if (a != b) {
                add_bytes(task, a * tables.sites + b, both_ways, numbers.scored[task] ? once : 0.0, parts);
                add_bytes(task, b * tables.sites + a, both_ways, 0.0, parts);
            }
        }
    }
}

// Take note of where the first replica holds which weights of the model it trains: they are sent from there.
inline void note_first_replica(const Training& training, const Cohorts& cohorts, const Parts& parts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const double ranks = double(Int(1) << choice[TENSOR]);
    const Int m = std::find(tables.trained.begin(), tables.trained.end(), task) - tables.trained.begin();
    const Ints kinds = parts.stage_kind[m], nodes = parts.stage_node[m];
    const Floats node_bytes = parts.node_bytes[m], site_bytes = parts.site_bytes[m], version = parts.version[m];
    fill(kinds, Int(-1));
    fill(node_bytes, 0.0);
    fill(site_bytes, 0.0);
    fill(version, 0.0);
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const Int kind = cohorts.kind[0][i];
        kinds[i] = kind;
        nodes[i] = cohorts.offset[0][i] / training.units_per_node(kind);
        double share = stage_parameters(training, i, double(cohorts.layers[i])) * tables.training.weight_bytes;
        if (i > 0 && i == choice[PIPELINE] - 1) {  // the copy of a tied embedding is not sent
            share -= tables.training.tied_bytes[task] / ranks;
        }
        version[0] += share * ranks;
        version[1] = std::max(version[1], share * tables.host_byte[kind]);
        Int same_node = i, same_site = i;
        for (Int j = i - 1; j >= 0; --j) {
            const Int before = kinds[j];
            same_node = before == kind && nodes[j] == nodes[i] ? j : same_node;
            same_site = tables.site[before] == tables.site[kind] ? j : same_site;
        }
        node_bytes[same_node] += share * ranks;
        site_bytes[same_site] += share * ranks;
    }
}

// The seconds of a training, and of these, what it scores the batch for.
struct TrainingSeconds {
    double all;
    double scoring;
};

// Return the seconds of a laid-out training beside `other`, which uses its directions too (itself: alone). `fresh`: the
// bytes of its reduction are added to its parts.
inline TrainingSeconds training_seconds(const Training& training, const Cohorts& cohorts, const Parts& parts, Int other,
                                        bool fresh) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int unit = unit_of(training);
    double slowest[] = {0.0, 0.0};  // of each pass
    double begins = 0.0;            // the last backward pass of the first stage, at the replica where it begins last
    Int most = 0;                   // samples of a replica
    for (Int q = 0; q < found; ++q) {
        for (Int more = 0; more < 2; ++more) {  // replicas with a unit more come first
            most = std::max(most, cohorts.samples[q] + (cohorts.extra[q] > 0) * unit);
            const Int first = more ? 0 : cohorts.extra[q], end = more ? cohorts.extra[q] : cohorts.replicas[q];
            for (const Pass pass : {STEP, SCORE}) {
                if (first >= end || (pass == SCORE && !numbers.scored[task])) {
                    continue;
                }
                const Int samples = cohorts.samples[q] + more * unit;
                const double seconds = slowest_instance(training, q, first, end, pass, samples, cohorts, parts, other);
                slowest[pass] = std::max(slowest[pass], seconds);
                begins = pass == STEP ? std::max(begins, seconds - cohorts.back[0]) : begins;
            }
        }
    }
    const double backward = slowest[STEP] - begins;
    for (const Pass pass : {STEP, SCORE}) {
        const double tokens = at_once(training, pass, most) * numbers.mean_tokens;
        slowest[pass] *= uneven(longest_tokens(at_once(training, pass, numbers.samples), tables), tokens);
    }
    const Reduction reduction = reduction_of(training, cohorts, parts, other, fresh);
    const double buckets = bucket_count(stage_parameters(training, 0, double(cohorts.layers[0])), replicas);
    const double left = exposed_seconds(reduction.reduce, backward, buckets) + reduction.gather;
    double update = 0.0;
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const double parameters = stage_parameters(training, i, double(cohorts.layers[i]));
        for (Int q = 0; q < found; ++q) {
            const auto step = numbers.update[cohorts.kind[q][i]];
            update = std::max(update, step[0] + step[1] * parameters / training.shards());
        }
    }
    return {double(numbers.steps) * (slowest[STEP] + left + update) + slowest[SCORE], slowest[SCORE]};
}

// Return a training with what is laid out of it.
inline Training laid_out(Int task, const Genes& choice, const Tables& tables, Int found, const Cohorts& cohorts) {
    return {task, choice, tables, found, sum(cohorts.replicas, found)};
}

// Fill a training's parts, alone on its links; return its number of cohorts, 0 where it does not fit.
inline Int value_training(Int task, const Genes& devices, const Genes& order, const Genes& choice, const Tables& tables,
                          const Cohorts& cohorts, const Parts& parts) {
    clear_task(task, parts);
    const Int found = lay_out(task, devices, order, choice, tables, cohorts);
    if (found == 0) {
        return 0;
    }
    const Training training = laid_out(task, choice, tables, found, cohorts);
    count_hops(training, cohorts);
    limit_stages(training, cohorts);
    const Int stages = choice[PIPELINE];
    if (split_layers(head(cohorts.layer, stages), head(cohorts.beside, stages), head(cohorts.capacity, stages),
                     tables.layers[task], cohorts.layers) == 0) {
        return 0;
    }
    move_layers(training, cohorts);
    hold_memory(training, cohorts, parts);
    share_by_pipelines(training, cohorts);
    add_activations(training, cohorts, parts);
    note_first_replica(training, cohorts, parts);
    const TrainingSeconds seconds = training_seconds(training, cohorts, parts, task, true);
    parts.seconds[task] = seconds.all;
    parts.scoring[task] = seconds.scoring;
    return found;
}
