// Tasks of a group whose devices or tasks have changed.
#pragma once

#include "draw.h"

constexpr double REDRAWN = 0.4;  // share of the changes that draw a training's order anew
constexpr double STOPS = 0.5;    // share of the changes of groups in which all tasks of a group leave the devices

// Let the classes that a training has devices of count, those that counted in their order, the others at random places.
inline void adopt(Int task, const Genes& own, const Genes& order, const Genes& choice, const Hashes& state,
                  const Tables& tables) {
    const auto counts = [&](Int kind) { return own[kind] > 0 && tables.usable[task][kind]; };
    const Int counted = clamp(choice[USED], 1, tables.classes);  // several changes come before a repair
    std::int32_t* const first = order.begin();
    Int used = std::stable_partition(first, first + counted, counts) - first;
    for (Int position = used; position < tables.classes; ++position) {
        if (counts(order[position])) {
            const Int place = below(state, used + 1);
            std::rotate(first + place, first + position, first + position + 1);
            ++used;
        }
    }
    choice[USED] = std::int32_t(std::max(used, Int(1)));
}

// Let the tasks of a group use the classes that it has.
inline void settle(Int g, const View& x, const Hashes& state, const Tables& tables) {
    const Genes own = x.devices[g];
    for (Int task = 0; task < tables.tasks; ++task) {
        if (x.group[task] != g) {
            continue;
        }
        const Genes classes = x.classes[task];
        if (tables.is_training[task]) {
            if (uniform(state) < REDRAWN) {
                draw_order(task, own, classes, x.choice[task], state, tables);
            } else {
                adopt(task, own, classes, x.choice[task], state, tables);
            }
            continue;
        }
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (own[kind] > 0 && classes[kind] == 0 && uniform(state) < 0.8) {
                classes[kind] = std::int32_t(std::min(1 + below(state, 2), tables.serving.options[task][kind]));
            }
        }
    }
}

// Let each task of a group leave the devices to the others while it does nothing: most do not fit otherwise.
inline void take_turns(Int g, const View& x, const Tables& tables) {
    for (Int task = 0; task < tables.tasks; ++task) {
        if (x.group[task] == g) {
            x.choice[task][IDLE] = std::int32_t(task == tables.generation ? SLEEP : OFFLOAD);
        }
    }
}
