// From a training's genes to columns, as `hetrl.search.core.columns` describes them.
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
inline Int stages_by_class(Int used, Int stages, Int most, const Columns& columns) {
    const Int replicas = std::min(sum(columns.units, used) / stages, most);
    if (replicas == 0) {
        return 0;
    }
    const Ints& cuts = columns.cuts;
    Int found = 1, chained = 0;
    cuts[0] = 0;
    for (Int position = 0; position < used; ++position) {
        chained += columns.units[position];
        if (chained >= replicas * stages) {
            break;
        }
        found = insert_cut(cuts, found, chained % replicas);
    }
    for (Int q = 0; q < found; ++q) {
        const Int following = q + 1 < found ? cuts[q + 1] : replicas;
        columns.replicas[q] = following - cuts[q];
        Int position = 0, end = columns.units[0];
        for (Int i = 0; i < stages; ++i) {
            while (end <= i * replicas + cuts[q]) {
                ++position;
                end += columns.units[position];
            }
            columns.kind[q][i] = columns.order[position];
        }
    }
    return found;
}

inline void set_kinds(Int q, Int stages, Int kind, const Columns& columns) {
    for (Int i = 0; i < stages; ++i) {
        columns.kind[q][i] = kind;
    }
}

// Count the replicas inside each class, and those that take the rest of one class and go on in the next.
inline Int replicas_by_class(Int used, Int stages, Int most, const Columns& columns) {
    const Int replicas = std::min(sum(columns.units, used) / stages, most);
    Int found = 0, done = 0, position = 0, left = columns.units[0];
    while (done < replicas) {
        Int inside = std::min(left / stages, replicas - done);
        if (inside > 0) {
            set_kinds(found, stages, columns.order[position], columns);
            left -= inside * stages;
        } else {
            inside = 1;
            for (Int i = 0; i < stages; ++i) {
                while (left == 0) {
                    ++position;
                    left = columns.units[position];
                }
                columns.kind[found][i] = columns.order[position];
                --left;
            }
        }
        columns.replicas[found] = inside;
        done += inside;
        ++found;
    }
    return found;
}

// Count the replicas inside each class; what is left of a class stays idle.
inline Int whole_replicas(Int used, Int stages, Int most, const Columns& columns) {
    Int found = 0, left = most;
    for (Int position = 0; position < used; ++position) {
        const Int inside = std::min(columns.units[position] / stages, left);
        if (inside > 0) {
            set_kinds(found, stages, columns.order[position], columns);
            columns.replicas[found] = inside;
            left -= inside;
            ++found;
        }
    }
    return found;
}

// Deal the units of each class to the columns, one column after the other.
inline void place_units(Int found, Int stages, bool alike, const Columns& columns) {
    fill(columns.cursor, Int(0));
    for (Int q = 0; q < found; ++q) {
        Int first = 0;
        while (first < stages) {
            const Int kind = columns.kind[q][first];
            Int end = first + 1;
            while (!alike && end < stages && columns.kind[q][end] == kind) {
                ++end;
            }
            for (Int i = first; i < end; ++i) {
                columns.offset[q][i] = columns.cursor[kind] + i - first;
                columns.stride[q][i] = end - first;
            }
            columns.cursor[kind] += (end - first) * columns.replicas[q];
            first = end;
        }
    }
}

// Fill kinds, counts and places; return the number of columns, 0 where the devices do not make one replica.
inline Int lay_out(Int task, const Genes& devices, const Genes& order, const Genes& choice, const Tables& tables,
                   const Columns& columns) {
    Int used = 0;
    for (Int position = 0; position < choice[USED]; ++position) {
        const Int kind = order[position], owned = devices[kind], node = tables.per_node[kind];
        const Int units = (owned / node) * (node >> choice[TENSOR]) + ((owned % node) >> choice[TENSOR]);
        if (units > 0 && tables.usable[task][kind]) {
            columns.order[used] = kind;
            columns.units[used] = units;
            ++used;
        }
    }
    if (used == 0) {
        return 0;
    }
    const Int stages = choice[PIPELINE], shape = choice[SHAPE] % ALIKE;
    const Int most = tables.training.samples / tables.training.micro_batches[choice[MICRO_BATCH]];
    const Int found = shape == STAGES_BY_CLASS  ? stages_by_class(used, stages, most, columns)
                      : shape == WHOLE_REPLICAS ? whole_replicas(used, stages, most, columns)
                                                : replicas_by_class(used, stages, most, columns);
    place_units(found, stages, choice[SHAPE] >= ALIKE, columns);
    return found;
}

// Split the layers: the stage that would end first gets the next one, within its memory; false without room.
inline bool split_layers(Int stages, Int layers, const Columns& columns) {
    double room = 0.0;
    for (Int i = 0; i < stages; ++i) {
        if (columns.capacity[i] < 1) {
            return false;
        }
        room += std::min(columns.capacity[i], double(layers));
        columns.layers[i] = 1;
    }
    if (room < double(layers)) {
        return false;
    }
    for (Int left = layers - stages; left > 0; --left) {
        Int chosen = -1;
        double least = INFINITE;
        for (Int i = 0; i < stages; ++i) {
            const double more = double(columns.layers[i] + 1), ends = columns.beside[i] + more * columns.layer[i];
            if (more <= columns.capacity[i] && ends < least) {
                chosen = i;
                least = ends;
            }
        }
        ++columns.layers[chosen];
    }
    return true;
}

// Give every column the samples, in units, with which all would end at the same time, rounded down, at least one;
// return the units that are left (negative: too many are given).
inline Int share_evenly(Int found, Int units, const Columns& columns) {
    const Ints &samples = columns.samples, &replicas = columns.replicas;
    const Floats &slope = columns.slope, &start = columns.start;
    Int left = units, open = found;
    double end = 0.0;
    for (Int q = 0; q < found; ++q) {
        samples[q] = 0;
    }
    while (true) {  // columns whose part is below one unit get one, and the others share the rest anew
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
// replica of column q takes `start[q] + n slope[q]` seconds for n units. What is left of equal ends, rounded down, goes
// to the columns that would end first, a unit to each of their replicas.
inline void share_samples(Int found, Int units, Int unit, const Columns& columns) {
    Int left = share_evenly(found, units, columns);
    for (Int q = 0; q < found; ++q) {
        columns.extra[q] = 0;
    }
    while (left > 0) {
        Int chosen = 0;
        double least = INFINITE;
        for (Int q = 0; q < found; ++q) {
            const double ends = columns.start[q] + double(columns.samples[q] + 1) * columns.slope[q];
            if (ends < least) {
                chosen = q;
                least = ends;
            }
        }
        const Int given = std::min(left, columns.replicas[chosen]);
        left -= given;
        columns.extra[chosen] = given;
        if (given == columns.replicas[chosen]) {
            ++columns.samples[chosen];
            columns.extra[chosen] = 0;
        }
    }
    for (Int q = 0; q < found; ++q) {
        columns.samples[q] *= unit;
    }
}
