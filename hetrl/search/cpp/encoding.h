// The vector of `hetrl.search.core.encoding`, and the vectors that are legal.
#pragma once

#include "cycle.h"

// A vector's parts; they share its memory.
struct View {
    Genes group;     // [t]
    Genes2 devices;  // [g, c]
    Genes2 classes;  // [t, c]
    Genes2 choice;   // [t, CHOICES]
};

inline View view(const Genes& x, const Tables& tables) {
    const Int tasks = tables.tasks, kinds = tables.classes;
    std::int32_t* devices = x.data + tasks;
    std::int32_t* classes = devices + tasks * kinds;
    std::int32_t* choice = classes + tasks * kinds;
    return {{x.data, {tasks}}, {devices, {tasks, kinds}}, {classes, {tasks, kinds}}, {choice, {tasks, CHOICES}}};
}

// Return the ranks of a replica of a serving task's option.
inline Int ranks_of(Int task, Int kind, Int option, const Tables& tables) {
    return tables.serving.tensor[task][kind][option] * tables.serving.pipeline[task][kind][option];
}

// Return whether a task can use devices of a class that its group owns.
inline bool can_use(Int task, Int kind, const Genes& own, const Tables& tables) {
    return own[kind] > 0 && tables.usable[task][kind];
}

// Return how many units of so many ranks so many devices of a class have room for: in whole nodes and the remainder.
inline Int units_on(Int devices, Int node, Int ranks) {
    return (devices / node) * (node / ranks) + devices % node / ranks;
}

// Number the groups by their first task, move their rows along, and return how many there are.
inline Int renumber(const Genes& group, const Genes2& devices) {
    const Int tasks = group.size(), kinds = devices.sizes[1];
    Int count = 0;
    for (Int task = 0; task < tasks; ++task) {  // most vectors are numbered already
        if (group[task] == count) {
            ++count;
        } else if (group[task] < 0 || group[task] > count) {
            count = -1;
            break;
        }
    }
    if (count <= 0) {
        Local<std::int32_t> number(tasks, -1), rows(tasks * kinds, 0);
        std::copy(devices.begin(), devices.end(), rows.begin());
        count = 0;
        for (Int task = 0; task < tasks; ++task) {
            const Int label = clamp(group[task], 0, tasks - 1);
            if (number[label] < 0) {
                number[label] = std::int32_t(count);
                std::copy_n(rows.begin() + label * kinds, kinds, devices[count].begin());
                ++count;
            }
            group[task] = number[label];
        }
    }
    for (Int g = count; g < tasks; ++g) {
        fill(devices[g], std::int32_t(0));
    }
    return count;
}

// Set which of so many shared nodes of a class holds each group's remainder (devices beyond whole nodes); -1 for none.
inline void deal_class(const Genes2& devices, Int groups, Int kind, Int size, Int nodes, Local<Int>& place) {
    Local<Int> rest(groups, 0);
    for (Int g = 0; g < groups; ++g) {
        rest[g] = devices[g][kind] % size;
    }
    deal_remainders(rest.all(), size, nodes, place.all());
}

// Return which of the shared nodes of a class holds a group's remainder; -1 where it has none.
inline Int remainder_node(Int wanted, Int kind, const Genes2& devices, Int size) {
    const Int groups = devices.size();
    Local<Int> place(groups, -1);
    deal_class(devices, groups, kind, size, groups, place);
    return place[wanted];
}

// Drop the remainders that find no node.
inline void fit_remainders(const Genes2& devices, Int count, Int kind, const Tables& tables) {
    const Int node = tables.per_node[kind];
    Int free = tables.devices[kind] / node, torn = 0;
    for (Int g = 0; g < count; ++g) {
        free -= devices[g][kind] / node;
        torn += devices[g][kind] % node > 0;
    }
    if (torn <= free) {
        return;
    }
    Local<Int> place(count, -1);
    deal_class(devices, count, kind, node, free, place);
    for (Int g = 0; g < count; ++g) {
        devices[g][kind] -= std::int32_t(place[g] < 0 ? devices[g][kind] % node : 0);
    }
}

// Cut what is too much of each class, and remainders that would be torn over two nodes.
inline void fit_devices(const Genes2& devices, Int count, const Tables& tables) {
    for (Int kind = 0; kind < tables.classes; ++kind) {
        Int left = tables.devices[kind];
        for (Int g = 0; g < count; ++g) {
            devices[g][kind] = std::int32_t(clamp(devices[g][kind], 0, left));
            left -= devices[g][kind];
        }
        fit_remainders(devices, count, kind, tables);
    }
}

// Cut remainders of classes of several nodes to the largest power of two that shares a node out evenly.
inline void even_remainders(const Genes2& devices, const Tables& tables) {
    for (Int kind = 0; kind < tables.classes; ++kind) {
        const Int node = tables.per_node[kind];
        if (tables.devices[kind] <= node) {
            continue;
        }
        for (Int g = 0; g < devices.size(); ++g) {
            const Int rest = devices[g][kind] % node;
            Int part = 1;
            while (2 * part <= rest && node % (2 * part) == 0) {
                part *= 2;
            }
            devices[g][kind] -= std::int32_t(rest - std::min(part, rest));
        }
    }
}

inline void repair_training(Int task, const Genes& order, const Genes& choice, const Tables& tables) {
    const Int kinds = tables.classes;
    Local<bool> seen(kinds, false);
    for (Int position = 0; position < kinds; ++position) {
        if (order[position] < 0 || order[position] >= kinds || seen[order[position]]) {
            order[position] = -1;
        } else {
            seen[order[position]] = true;
        }
    }
    Int following = 0;
    for (Int position = 0; position < kinds; ++position) {
        if (order[position] < 0) {
            while (seen[following]) {
                ++following;
            }
            order[position] = std::int32_t(following);
            seen[following] = true;
        }
    }
    const auto limit = [&choice](Int gene, Int least, Int most) {
        choice[gene] = std::int32_t(clamp(choice[gene], least, most));
    };
    limit(TENSOR, 0, tables.training.most_tensor[task]);
    limit(PIPELINE, 1, std::min(MAX_STAGES, tables.layers[task]));
    limit(SHAPE, 0, SHAPES - 1);
    limit(MICRO_BATCH, 0, tables.training.micro_batches.size() - 1);
    limit(RECOMPUTE, 0, MODES - 1);
    limit(SHARDING, 0, 1);
    limit(USED, 1, kinds);
    limit(SENDER, 0, tables.narrow ? 0 : kinds);
    for (Int i = 0; i + 1 < MAX_STAGES; ++i) {
        const Int most = tables.narrow || i + 1 >= choice[PIPELINE] ? 0 : MOST_MOVED;
        limit(MOVED + i, -most, most);
    }
}

// Keep options that exist; where no class with devices runs the task, all that can do so take their first.
inline void repair_serving(Int task, const Genes& devices, const Genes& options, const Genes& choice,
                           const Tables& tables) {
    bool runs = false;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        options[kind] = std::int32_t(clamp(options[kind], 0, tables.serving.options[task][kind]));
        runs = runs || (options[kind] > 0 && devices[kind] > 0);
    }
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (!runs && devices[kind] > 0) {
            options[kind] = std::int32_t(std::min(Int(1), tables.serving.options[task][kind]));
        }
    }
    for (Int unused = 0; unused < CHOICES; ++unused) {
        choice[unused] = unused == IDLE || unused == CACHE ? choice[unused] : 0;
    }
    const Int caches = task == tables.generation ? tables.serving.cache_gb.size() : 1;
    choice[CACHE] = std::int32_t(clamp(choice[CACHE], 0, caches - 1));
}

// See `hetrl.search.core.functions.repair`.
void repair(const Genes& x, const Tables& tables) {
    const auto [group, devices, classes, choice] = view(x, tables);
    fit_devices(devices, renumber(group, devices), tables);
    if (tables.narrow) {
        even_remainders(devices, tables);
    }
    for (Int task = 0; task < tables.tasks; ++task) {
        const bool alone = std::count(group.begin(), group.end(), group[task]) == 1;
        const Genes own = choice[task];
        if (tables.is_training[task]) {
            repair_training(task, classes[task], own, tables);
        } else {
            repair_serving(task, devices[group[task]], classes[task], own, tables);
        }
        const Int states = task == tables.generation ? 3 : 2;
        own[IDLE] = std::int32_t(alone ? RESIDENT : clamp(own[IDLE], 0, states - 1));
        if (tables.narrow && tables.is_training[task]) {
            own[PIPELINE] = std::int32_t(std::min<Int>(own[PIPELINE], NARROW_STAGES));
            std::sort(classes[task].begin(), classes[task].begin() + own[USED]);
        } else if (tables.narrow) {
            own[CACHE] -= std::int32_t(own[CACHE] % NARROW_CACHE);
        }
    }
}
