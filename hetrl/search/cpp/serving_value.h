// Seconds and memory of generation and of the inferences: replicas per class, the work shared out by their rates.
//
// A class runs equal replicas of its option, as many as fit whole nodes and the remainder; `ServingTables.seconds` has
// the time of one of them for every number of units of work. Replicas that get no work are left out of the plan.
#pragma once

#include "encoding.h"
#include "parts.h"

constexpr Int STEPS = 24;

// Return how many replicas of an option fit on so many devices of a class.
inline Int replicas_of(Int task, Int kind, Int option, Int devices, const Tables& tables) {
    const Int size = tables.per_node[kind], nodes = tables.serving.nodes[task][kind][option];
    if (nodes > 1) {
        return devices / size / nodes;
    }
    return units_on(devices, size, ranks_of(task, kind, option, tables));
}

// Return how many units a replica does by `end`, where it is known to be from `low` to `high`.
inline Int units_by(double end, const Floats& ends, Int low, Int high) {
    while (low < high) {
        const Int middle = (low + high + 1) / 2;
        if (ends[middle] <= end) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Set the units of a replica of each class to what it does by `end`, where that is from `least` to `most`; return the
// sum over all replicas.
inline Int units_done(double end, const Ints& least, const Ints& most, const Tables& tables, const Shares& shares) {
    Int total = 0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (shares.replicas[kind]) {
            shares.units[kind] = units_by(end, tables.serving.ends[shares.row[kind]], least[kind], most[kind]);
            total += shares.units[kind] * shares.replicas[kind];
        }
    }
    return total;
}

// Set the units of a replica of each class to what it does by the earliest end by which all units can be done; return
// how many units too much that is. The end is found by interpolation and bisection in turn, until only one step of one
// class lies between too early and late: interpolation is fast where times are nearly linear in units, but may creep
// up to a step.
inline Int find_end(Int units, const Tables& tables, const Shares& shares) {
    const Ints &least = shares.least, &most = shares.most;
    double low = 0.0, high = INFINITE;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        least[kind] = 0;
        most[kind] = units;
        if (const Int replicas = shares.replicas[kind]) {
            const Int alone = (units + replicas - 1) / replicas;
            high = std::min(high, tables.serving.ends[shares.row[kind]][alone]);
        }
    }
    Int early = 0, done = units_done(high, least, most, tables, shares);
    copy(shares.units, most);
    for (Int step = 0; step < STEPS; ++step) {
        Int between = 0;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            between += shares.replicas[kind] ? most[kind] - least[kind] : 0;
        }
        if (between <= 1) {
            break;
        }
        const double part = step % 2 ? 0.5 : double(units - early) / double(done - early);
        const double middle = low + part * (high - low);
        const Int found = units_done(middle, least, most, tables, shares);
        if (found >= units) {
            high = middle;
            done = found;
            copy(shares.units, most);
        } else {
            low = middle;
            early = found;
            copy(shares.units, least);
        }
    }
    copy(most, shares.units);
    return done - units;
}

// Share all units out so that the last replica ends early: take back what is too much where it ends last.
inline void share_units(Int task, const Tables& tables, const Shares& shares) {
    const auto& ends = tables.serving.ends;
    Int surplus = find_end(tables.serving.units[task], tables, shares);
    while (surplus > 0) {
        Int latest = -1;
        double last = 0.0;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            const Int most = shares.units[kind] + (shares.extra[kind] ? 1 : 0);
            if (shares.replicas[kind] && most > 0 && ends[shares.row[kind]][most] >= last) {
                latest = kind;
                last = ends[shares.row[kind]][most];
            }
        }
        if (shares.extra[latest] == 0) {
            shares.extra[latest] = shares.replicas[latest];
            --shares.units[latest];
        }
        const Int taken = std::min(surplus, shares.extra[latest]);
        shares.extra[latest] -= taken;
        surplus -= taken;
    }
}

// Take note of what a replica takes to generate: the slowest one counts, and the longest refills.
inline void note_rollouts(const Floats& row, const Floats& rollouts) {
    if (row[WHOLE] > rollouts[WHOLE]) {
        for (const Int column : {WHOLE, ALONE, SHARED, QUEUED}) {
            rollouts[column] = row[column];
        }
    }
    for (const Int column : {BUSY, REFILL, RENEWAL}) {
        rollouts[column] = std::max(rollouts[column], row[column]);
    }
}

// Set seconds, switch and memory of the task from its shares.
inline void note_serving(Int task, const Genes& options, Int cache, Int idle, const Tables& tables,
                         const Shares& shares, const Parts& parts) {
    const ServingTables& serving = tables.serving;
    const bool generates = task == tables.generation;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        parts.runs[task][kind] = shares.units[kind] > 0 ? shares.replicas[kind] : shares.extra[kind];
    }
    if (generates) {
        fill(parts.rollouts, 0.0);
    }
    double whole = 0.0;
    Int most = 0;  // units of a replica
    Local<Int> done(2 * tables.classes, 0);
    Local<double> busy(2 * tables.classes, 0.0);
    Int servers = 0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (parts.runs[task][kind] == 0) {
            continue;
        }
        const Int option = options[kind];
        const auto row = serving.seconds[shares.row[kind]];
        hold(task, kind, serving.resident_gb[task][kind][option][cache][idle],
             serving.peak_gb[task][kind][option][cache][idle], serving.host_gb[task][kind][option][cache][idle], parts);
        const double switched = serving.switch_seconds[task][kind][option][cache][idle];
        parts.switch_seconds[task] = std::max(parts.switch_seconds[task], switched);
        for (Int more = 0; more < 2; ++more) {
            const Int units = shares.units[kind] + more;
            const Int replicas = more ? shares.extra[kind] : shares.replicas[kind] - shares.extra[kind];
            if (units == 0 || replicas == 0) {
                continue;
            }
            whole = std::max(whole, row[units][WHOLE]);
            most = std::max(most, units);
            if (generates) {
                note_rollouts(row[units], parts.rollouts);
            }
            done[servers] = replicas * units;
            busy[servers] = row[units][BUSY];
            ++servers;
        }
    }
    if (!generates) {
        const double tokens = double(most * serving.unit_samples[task]) * tables.training.mean_tokens;
        whole *= uneven(longest_tokens(double(tables.training.samples), tables), tokens);
    }
    parts.seconds[task] = whole;
    if (generates && tables.staleness > 0) {
        parts.rollouts[BUSY] = steady_seconds(head(done.all(), servers), head(busy.all(), servers));
        parts.seconds[task] = parts.rollouts[BUSY];
    }
    if (generates && idle == RESIDENT) {
        parts.rollouts[REFILL] = 0.0;
    }
}

// Fill a serving task's parts; return `VALUED`, or the row of seconds that must be filled first.
inline Int value_serving(Int task, const Genes& devices, const Genes& options, const Genes& choice,
                         const Tables& tables, const Shares& shares, const Parts& parts) {
    clear_task(task, parts);
    const ServingTables& serving = tables.serving;
    const Int cache = task == tables.generation ? choice[CACHE] : 0;
    Int count = 0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        shares.replicas[kind] = shares.units[kind] = shares.extra[kind] = 0;
        const Int option = options[kind];
        if (option == 0 || devices[kind] == 0) {
            continue;
        }
        if (!std::isfinite(serving.peak_gb[task][kind][option][cache][choice[IDLE]])) {
            continue;
        }
        shares.replicas[kind] = replicas_of(task, kind, option, devices[kind], tables);
        shares.row[kind] = serving.row[task][kind][option][cache];
        if (shares.replicas[kind] && !serving.ready[shares.row[kind]]) {
            return shares.row[kind];
        }
        count += shares.replicas[kind];
    }
    if (count > 0) {
        share_units(task, tables, shares);
        note_serving(task, options, cache, choice[IDLE], tables, shares, parts);
    }
    return VALUED;
}
