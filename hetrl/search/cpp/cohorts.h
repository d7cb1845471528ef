// From a training's genes to cohorts, as `hetrl.search.core.cohorts` describes them.
#pragma once

#include "encoding.h"

// Insert a value in ascending order unless it is there; return how many there are.
inline Int insert_cut(const Ints& cuts, Int found, Int cut) {
    Int place = found;
    while (place > 0 && cuts[place - 1] > cut) {
        --place;
    }
    if (place > 0 && cuts[place - 1] == cut) {
        return found;
    }
    for (Int index = found; index > place; --index) {
        cuts[index] = cuts[index - 1];
    }
    cuts[place] = cut;
    return found + 1;
}

// Cut the replicas where one of their stages passes from one class to the next.
inline Int stages_by_class(Int used, Int stages, Int most, const Cohorts& cohorts) {
    const Int replicas = std::min(sum(cohorts.units, used) / stages, most);
    if (replicas == 0) {
        return 0;
    }
    const Ints& cuts = cohorts.cuts;
    Int found = 1, chained = 0;
    cuts[0] = 0;
    for (Int position = 0; position < used; ++position) {
        chained += cohorts.units[position];
        if (chained >= replicas * stages) {
            break;
        }
        found = insert_cut(cuts, found, chained % replicas);
    }
    for (Int q = 0; q < found; ++q) {
        const Int following = q + 1 < found ? cuts[q + 1] : replicas;
        cohorts.replicas[q] = following - cuts[q];
        Int position = 0, end = cohorts.units[0];
        for (Int i = 0; i < stages; ++i) {
            while (end <= i * replicas + cuts[q]) {
                ++position;
                end += cohorts.units[position];
            }
            cohorts.kind[q][i] = cohorts.order[position];
        }
    }
    return found;
}

inline void set_kinds(Int q, Int stages, Int kind, const Cohorts& cohorts) {
    for (Int i = 0; i < stages; ++i) {
        cohorts.kind[q][i] = kind;
    }
}

// Count the replicas inside each class, and those that take the rest of one class and go on in the next.
inline Int replicas_by_class(Int used, Int stages, Int most, const Cohorts& cohorts) {
    const Int replicas = std::min(sum(cohorts.units, used) / stages, most);
    Int found = 0, done = 0, position = 0, left = cohorts.units[0];
    while (done < replicas) {
        Int inside = std::min(left / stages, replicas - done);
        if (inside > 0) {
            set_kinds(found, stages, cohorts.order[position], cohorts);
            left -= inside * stages;
        } else {
            inside = 1;
            for (Int i = 0; i < stages; ++i) {
                while (left == 0) {
                    ++position;
                    left = cohorts.units[position];
                }
                cohorts.kind[found][i] = cohorts.order[position];
                --left;
            }
        }
        cohorts.replicas[found] = inside;
        done += inside;
        ++found;
    }
    return found;
}

// Count the replicas inside each class; what is left of a class stays idle.
inline Int whole_replicas(Int used, Int stages, Int most, const Cohorts& cohorts) {
    Int found = 0, left = most;
    for (Int position = 0; position < used; ++position) {
        const Int inside = std::min(cohorts.units[position] / stages, left);
        if (inside > 0) {
            set_kinds(found, stages, cohorts.order[position], cohorts);
            cohorts.replicas[found] = inside;
            left -= inside;
            ++found;
        }
    }
    return found;
}

// Deal the units of each class to the cohorts, one cohort after the other.
inline void place_units(Int found, Int stages, bool alike, const Cohorts& cohorts) {
    fill(cohorts.cursor, Int(0));
    for (Int q = 0; q < found; ++q) {
        Int first = 0;
        while (first < stages) {
            const Int kind = cohorts.kind[q][first];
            Int end = first + 1;
            while (!alike && end < stages && cohorts.kind[q][end] == kind) {
                ++end;
            }
            for (Int i = first; i < end; ++i) {
                cohorts.offset[q][i] = cohorts.cursor[kind] + i - first;
                cohorts.stride[q][i] = end - first;
            }
            cohorts.cursor[kind] += (end - first) * cohorts.replicas[q];
            first = end;
        }
    }
}

// Fill kinds, counts and places; return the number of cohorts, 0 where the devices do not make one replica.
inline Int lay_out(Int task, const Genes& devices, const Genes& order, const Genes& choice, const Tables& tables,
                   const Cohorts& cohorts) {
    Int used = 0;
    for (Int position = 0; position < choice[USED]; ++position) {
        const Int kind = order[position], owned = devices[kind], node = tables.per_node[kind];
        const Int units = units_on(owned, node, Int(1) << choice[TENSOR]);
        const bool away = tables.home && used > 0 && tables.site[kind] != tables.site[cohorts.order[0]];
        if (units > 0 && tables.usable[task][kind] && !away) {
            cohorts.order[used] = kind;
            cohorts.units[used] = units;
            ++used;
        }
    }
    if (used == 0) {
        return 0;
    }
    const Int stages = choice[PIPELINE], shape = choice[SHAPE] % ALIKE;
    const Int most = tables.training.samples / tables.training.micro_batches[choice[MICRO_BATCH]];
    const Int found = shape == STAGES_BY_CLASS  ? stages_by_class(used, stages, most, cohorts)
                      : shape == WHOLE_REPLICAS ? whole_replicas(used, stages, most, cohorts)
                                                : replicas_by_class(used, stages, most, cohorts);
    if (const Int sender = found > 0 ? choice[SENDER] % found : 0) {
        std::swap_ranges(cohorts.kind[0].begin(), cohorts.kind[0].begin() + stages, cohorts.kind[sender].begin());
        std::swap(cohorts.replicas[0], cohorts.replicas[sender]);
    }
    place_units(found, stages, choice[SHAPE] >= ALIKE, cohorts);
    return found;
}

// Give every cohort the samples, in units, with which all would end at the same time, rounded down, at least one;
// return the units that are left (negative: too many are given).
inline Int share_evenly(Int found, Int units, const Cohorts& cohorts) {
    const Ints &samples = cohorts.samples, &replicas = cohorts.replicas;
    const Floats &slope = cohorts.slope, &start = cohorts.start;
    Int left = units, open = found;
    double end = 0.0;
    for (Int q = 0; q < found; ++q) {
        samples[q] = 0;
    }
    while (true) {  // cohorts whose part is below one unit get one, and the others share the rest anew
        double rate = 0.0, offset = 0.0;
        for (Int q = 0; q < found; ++q) {
            if (samples[q] == 0) {
                rate += double(replicas[q]) / slope[q];
                offset += double(replicas[q]) * start[q] / slope[q];
            }
        }
        end = (double(left) + offset) / rate;
        Int closed = 0;
        for (Int q = 0; q < found; ++q) {
            if (samples[q] == 0 && (end - start[q]) / slope[q] < 1) {
                samples[q] = 1;
                left -= replicas[q];
                ++closed;
            }
        }
        open -= closed;
        if (closed == 0 || open == 0) {
            break;
        }
    }
    for (Int q = 0; q < found; ++q) {
        if (samples[q] == 0) {
            samples[q] = std::max(Int((end - start[q]) / slope[q]), Int(1));
            left -= replicas[q] * samples[q];
        }
    }
    return left;
}

// Share the units of samples out: every replica at least one, and all end at the same time as nearly as possible. A
// replica of cohort q takes `start[q] + n slope[q]` seconds for n units. What is left of equal ends, rounded down, goes
// to the cohorts that would end first, a unit to each of their replicas.
inline void share_samples(Int found, Int units, Int unit, const Cohorts& cohorts) {
    Int left = share_evenly(found, units, cohorts);
    for (Int q = 0; q < found; ++q) {
        cohorts.extra[q] = 0;
    }
    while (left > 0) {
        Int chosen = 0;
        double least = INFINITE;
        for (Int q = 0; q < found; ++q) {
            const double ends = cohorts.start[q] + double(cohorts.samples[q] + 1) * cohorts.slope[q];
            if (ends < least) {
                chosen = q;
                least = ends;
            }
        }
        const Int given = std::min(left, cohorts.replicas[chosen]);
        left -= given;
        cohorts.extra[chosen] = given;
        if (given == cohorts.replicas[chosen]) {
            ++cohorts.samples[chosen];
            cohorts.extra[chosen] = 0;
        }
    }
    for (Int q = 0; q < found; ++q) {
        cohorts.samples[q] *= unit;
    }
}
