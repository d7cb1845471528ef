// States: what a set of tasks on one allotment costs and needs, as `hetrl.search.core.ilp_states` describes them.
#pragma once

#include "records.h"

using Numbers = Array<double, 2>;

// Return the place of a class in a block of an option's numbers.
inline Int at(Int block, Int kind, Int classes) {
    return SECONDS + block * classes + kind;
}

// Return whether no number of a row is larger than that of another.
inline bool nowhere_larger(const Floats& row, const Floats& other) {
    return std::equal(row.begin(), row.end(), other.begin(), [](double one, double two) { return one <= two; });
}

// Return whether one of the kept rows, from `begin` to `end`, is nowhere larger than the row.
inline bool is_dominated(const Floats& row, const Numbers& kept, Int begin, Int end) {
    for (Int n = begin; n < end; ++n) {
        if (nowhere_larger(kept[n], row)) {
            return true;
        }
    }
    return false;
}

// Return the least length of a phase in which the group is busy for so long.
//
// If tasks that take up to `longest` on other devices stay out, all that take longer there join.
inline double phase_bound(Int phase, double seconds, Int members, const Floats& own_least, const Floats& rest_least,
                          const Fixed& fixed) {
    double least = INFINITE;
    const Int tasks = own_least.size();
    for (Int last = -1; last < tasks; ++last) {
        if (last >= 0 && (members >> last & 1 || fixed.phase[last] != phase)) {
            continue;
        }
        const double longest = last >= 0 ? rest_least[last] : 0.0;
        double joined = seconds;
        for (Int task = 0; task < tasks; ++task) {
            if (!(members >> task & 1) && fixed.phase[task] == phase && rest_least[task] > longest) {
                joined += own_least[task];
            }
        }
        least = std::min(least, std::max(joined, longest));
    }
    return least;
}

// Return a bound below every iteration with this state.
//
// The other tasks take at least `own_least` seconds if they join the group, and `rest_least` on the devices left.
inline double bound(const Floats& row, Int members, const Floats& own_least, const Floats& rest_least,
                    const Fixed& fixed) {
    double phases[CHAIN], busy = 0.0, longest = 0.0;
    for (Int phase = 0; phase < CHAIN; ++phase) {
        phases[phase] = phase_bound(phase, row[phase], members, own_least, rest_least, fixed);
        busy += row[phase];
    }
    for (Int task = 0; task < own_least.size(); ++task) {
        if (!(members >> task & 1)) {
            longest = std::max(longest, std::min(own_least[task], rest_least[task]));
            busy += rest_least[task] > fixed.limit ? own_least[task] : 0.0;
        }
    }
    const double generation = fixed.staleness == 0 ? phases[GENERATION] : row[CHAIN];
    const double chain = generation + phases[INFERENCES] + phases[TRAINING] + row[TRANSFER];
    return std::max({busy, longest, row[TRANSFER], chain / double(1 + fixed.staleness)});
}

// Set the most that the tasks behind each one may add to RESIDENT_GB, ACTIVE_GB and HOST_GB of each class.
inline void set_most_ahead(const Numbers& numbers, const Ints& first, Int classes, const Array<double, 3>& most) {
    for (Int last = first.size() - 2; last > 0; --last) {
        copy(most[last], most[last - 1]);
        for (Int block = RESIDENT_GB; first[last] < first[last + 1] && block <= HOST_GB; ++block) {
            for (Int kind = 0; kind < classes; ++kind) {
                double largest = -INFINITE;
                for (Int option = first[last]; option < first[last + 1]; ++option) {
                    largest = std::max(largest, numbers[option][at(block, kind, classes)]);
                }
                const double behind = most[last][block][kind];
                most[last - 1][block][kind] = block == ACTIVE_GB ? std::max(behind, largest) : behind + largest;
            }
        }
    }
}

// Set the memory to 0 that suffices whatever the tasks behind add: less of it makes no state better.
inline void forget_room(const Floats& row, const Array<double, 2>& most, const Fixed& fixed) {
    for (Int kind = 0; kind < fixed.classes; ++kind) {
        double& resident = row[at(RESIDENT_GB, kind, fixed.classes)];
        double& active = row[at(ACTIVE_GB, kind, fixed.classes)];
        double& host = row[at(HOST_GB, kind, fixed.classes)];
        if (resident + most[RESIDENT_GB][kind] + std::max(active, most[ACTIVE_GB][kind]) <= fixed.usable_gb[kind]) {
            resident = active = 0.0;
        }
        if (host + most[HOST_GB][kind] <= fixed.node_gb[kind]) {
            host = 0.0;
        }
    }
}

// Set the state of a set of tasks from that without its last task and an option of that.
inline void add_option(const Floats& state, const Floats& option, Int members, Int last, const Fixed& fixed,
                       const Floats& row) {
    for (Int place = 0; place < row.size(); ++place) {
        row[place] = state[place] + option[place];
    }
    for (Int kind = 0; kind < fixed.classes; ++kind) {
        const Int place = at(ACTIVE_GB, kind, fixed.classes);
        row[place] = std::max(state[place], option[place]);
    }
    const Int both = Int(1) << fixed.trainer | Int(1) << fixed.generation;
    if (!(both >> last & 1) || (members & both) != both) {
        return;
    }
    for (Int kind = 0; kind < fixed.classes; ++kind) {
        if (row[at(RUNS, kind, fixed.classes)] > 0) {
            row[TRANSFER] = std::max(row[TRANSFER], row[at(TOGETHER, kind, fixed.classes)]);
        }
    }
    for (const Int block : {APART, TOGETHER, RUNS}) {
        for (Int kind = 0; kind < fixed.classes; ++kind) {
            row[at(block, kind, fixed.classes)] = 0.0;
        }
    }
}

// Return whether what all tasks keep, and the largest active set, fit each class; host memory likewise.
inline bool has_room(const Floats& row, const Fixed& fixed) {
    for (Int kind = 0; kind < fixed.classes; ++kind) {
        const double held = row[at(RESIDENT_GB, kind, fixed.classes)] + row[at(ACTIVE_GB, kind, fixed.classes)];
        if (held > fixed.usable_gb[kind] || row[at(HOST_GB, kind, fixed.classes)] > fixed.node_gb[kind]) {
            return false;
        }
    }
    return true;
}

// Add a state in place of those that it is nowhere worse than; return the end of the set.
inline Int insert_state(const Floats& row, Int parent, Int option, Int begin, Int filled, const Numbers& pool,
                        const Array<Int, 2>& trace) {
    Int end = begin;
    for (Int n = begin; n < filled; ++n) {
        if (!nowhere_larger(row, pool[n])) {
            copy(pool[n], pool[end]);
            copy(trace[n], trace[end]);
            ++end;
        }
    }
    copy(row, pool[end]);
    trace[end][0] = parent;
    trace[end][1] = option;
    return end + 1;
}

// See `hetrl.search.core.functions.fill_states`.
Int fill_states(const Numbers& numbers, const Ints& first, const Floats& own_least, const Floats& rest_least,
                const Fixed& fixed, const Numbers& pool, const Array<Int, 2>& trace, const Ints& starts) {
    const Int tasks = fixed.phase.size(), width = pool.sizes[1];
    Local<double> row_memory(width, 0.0), most_memory((tasks + 1) * 3 * fixed.classes, 0.0);
    Local<bool> alive(numbers.size(), false);
    const Floats row = row_memory.all();
    const Array<double, 3> most{most_memory.begin(), {tasks + 1, 3, fixed.classes}};
    fill(pool[0], 0.0);
    starts[0] = 0;
    starts[1] = 1;
    for (Int task = 0; task < tasks; ++task) {
        for (Int option = first[task]; option < first[task + 1]; ++option) {
            alive[option] = bound(numbers[option], Int(1) << task, own_least, rest_least, fixed) <= fixed.limit;
        }
    }
    set_most_ahead(numbers, first, fixed.classes, most);
    Int filled = 1;
    for (Int members = 1; members < Int(1) << tasks; ++members) {
        Int last = 0;
        while (members >> (last + 1)) {
            ++last;
        }
        const Int before = members ^ Int(1) << last, begin = filled;
        for (Int parent = starts[before]; parent < starts[before + 1]; ++parent) {
            for (Int option = first[last]; option < first[last + 1]; ++option) {
                if (!alive[option]) {
                    continue;
                }
                add_option(pool[parent], numbers[option], members, last, fixed, row);
                if (!has_room(row, fixed) || bound(row, members, own_least, rest_least, fixed) > fixed.limit) {
                    continue;
                }
                forget_room(row, most[last], fixed);
                if (filled < pool.size() && !is_dominated(row, pool, begin, filled)) {
                    filled = insert_state(row, parent, option, begin, filled, pool, trace);
                }
            }
        }
        starts[members + 1] = filled;
    }
    return filled;
}
