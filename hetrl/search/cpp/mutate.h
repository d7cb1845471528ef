// Changes of a vector at one of the levels, as the evolution tries them.
//
//     level 1      a task goes to another group, or to one of its own: only where groupings may change (`regroup`)
//     level 2, 3   devices of a class go from one group to another, or to and from the idle ones;
//                  whole nodes, halves, quarters, one, or all; half the time as many of another class come back
//     level 4      one choice of one task: TP, PP, shape, micro-batch, recomputation, sharding, idle state, KV cap,
//                  the option of a class, layers over a boundary, who sends weights, or all of them drawn anew
//     level 5      the order of a training's classes: two change places, one goes to the front, more or fewer count
//
// Every change flags the tasks whose costs it may touch.
#pragma once

#include "draw.h"

constexpr double MOVES = 0.35;  // share of changes that move devices

inline void touch(Int g, const Genes& group, const Flags& stale) {
    for (Int task = 0; task < group.size(); ++task) {
        stale[task] = stale[task] || group[task] == g;
    }
}

inline Int count_groups(const Genes& group) {
    return *std::max_element(group.begin(), group.end()) + 1;
}

// Move devices of a class; the row behind the last group stands for the idle ones.
inline void shift(Int source, Int target, Int groups, Int kind, Int amount, const Genes2& devices) {
    if (source < groups) {
        devices[source][kind] -= std::int32_t(amount);
    }
    if (target < groups) {
        devices[target][kind] += std::int32_t(amount);
    }
}

// Return the devices of a class that a group owns, or that no group does.
inline Int owned_by(Int g, Int groups, Int kind, const Genes2& devices, const Tables& tables) {
    if (g < groups) {
        return devices[g][kind];
    }
    Int idle = tables.devices[kind];
    for (Int other = 0; other < groups; ++other) {
        idle -= devices[other][kind];
    }
    return idle;
}

// Draw how many devices to move: mostly whole nodes, then halves, quarters and single ones, or all.
inline Int draw_amount(Int node, Int available, const Hashes& state) {
    switch (below(state, 8)) {
        case 0:
        case 1:
        case 2:
            return node;
        case 3:
            return std::max(node / 2, Int(1));
        case 4:
            return std::max(node / 4, Int(1));
        case 5:
            return 1;
        case 6:
            return available;
        default:
            return node * (1 + below(state, std::max(available / node, Int(1))));
    }
}

inline void move_devices(const View& x, const Flags& stale, const Hashes& state, const Tables& tables) {
    const Int groups = count_groups(x.group), kind = below(state, tables.classes);
    Int source = below(state, groups + 1), target = below(state, groups);
    if (source == target) {
        ++target;
    } else if (source > target) {
        std::swap(source, target);
    }
    if (uniform(state) < 0.5) {
        std::swap(source, target);
    }
    const Int available = owned_by(source, groups, kind, x.devices, tables);
    if (available == 0) {
        return;
    }
    const Int amount = std::min(draw_amount(tables.per_node[kind], available, state), available);
    shift(source, target, groups, kind, amount, x.devices);
    if (uniform(state) < 0.5) {
        const Int other = below(state, tables.classes);
        const Int back = std::min(amount, owned_by(target, groups, other, x.devices, tables));
        if (other != kind && back > 0) {
            shift(target, source, groups, other, back, x.devices);
        }
    }
    for (const Int g : {source, target}) {
        if (g < groups) {
            touch(g, x.group, stale);
            settle(g, x, state, tables);
        }
    }
}

// Return another of 0 .. count - 1, where there is one.
inline std::int32_t draw_other(Int value, Int count, const Hashes& state) {
    return std::int32_t(count > 1 ? (value + 1 + below(state, count - 1)) % count : 0);
}

inline void change_order(Int task, const View& x, const Hashes& state, const Tables& tables) {
    const Genes order = x.classes[task], choice = x.choice[task];
    const Int used = clamp(choice[USED], 1, tables.classes);  // several changes come before a repair
    const Int drawn = below(state, 5);
    if (drawn == 0) {
        draw_order(task, x.devices[x.group[task]], order, choice, state, tables);
    } else if (drawn == 1) {
        choice[USED] = std::int32_t(uniform(state) < 0.5 ? used + 1 : used - 1);
    } else if (drawn == 2 || drawn == 3) {
        const Int a = below(state, used), b = below(state, drawn == 2 ? tables.classes : used);
        std::swap(order[a], order[b]);
    } else {  // the last one used leaves, another class takes its place
        std::swap(order[below(state, used)], order[used - 1]);
        choice[USED] = std::int32_t(used - 1);
    }
}

// Move a layer or two over a boundary, or none over any.
inline void move_layer(const Genes& choice, const Hashes& state) {
    if (choice[PIPELINE] < 2) {
        return;
    }
    if (uniform(state) < 0.1) {
        std::fill_n(choice.begin() + MOVED, MAX_STAGES - 1, std::int32_t(0));
        return;
    }
    const Int amount = 1 + below(state, 2), boundary = MOVED + below(state, choice[PIPELINE] - 1);
    choice[boundary] += std::int32_t(uniform(state) < 0.5 ? amount : -amount);
}

inline void change_training(Int task, const View& x, const Hashes& state, const Tables& tables) {
    const Genes choice = x.choice[task];
    const Int degrees = tables.training.most_tensor[task] + 1;
    const auto change = [&](Int gene, Int count) { choice[gene] = draw_other(choice[gene], count, state); };
    switch (below(state, 17)) {
        case 0:
        case 1:
            return change(TENSOR, degrees);
        case 2:
        case 3:
            choice[PIPELINE] = std::int32_t(draw_stages(state));
            return;
        case 4:
            return change(SHAPE, SHAPES);
        case 5:
            return change(MICRO_BATCH, tables.training.micro_batches.size());
        case 6:
            return change(RECOMPUTE, MODES);
        case 7:
            choice[SHARDING] = 1 - choice[SHARDING];
            return;
        case 8:
            choice[IDLE] = 1 - std::min(choice[IDLE], 1);
            return;
        case 14:
        case 15:
            return move_layer(choice, state);
        case 16:
            return change(SENDER, tables.classes + 1);
        case 9:  // a chain of changes that only pay together
            choice[TENSOR] = std::int32_t(below(state, degrees));
            choice[PIPELINE] = std::int32_t(draw_stages(state));
            choice[SHAPE] = std::int32_t(below(state, SHAPES));
            return;
        default:
            change_order(task, x, state, tables);
    }
}

inline void change_serving(Int task, const View& x, const Hashes& state, const Tables& tables) {
    const Genes own = x.devices[x.group[task]], options = x.classes[task], choice = x.choice[task];
    const bool generates = task == tables.generation;
    const Int drawn = below(state, 10);
    if (drawn < 5) {
        Int kind = below(state, tables.classes);
        for (Int tries = 0; tries < 8 && own[kind] == 0; ++tries) {  // of a class that counts
            kind = below(state, tables.classes);
        }
        options[kind] = draw_other(options[kind], tables.serving.options[task][kind] + 1, state);
    } else if (drawn == 5) {
        draw_options(task, options, state, tables);
    } else if (drawn < 8 || !generates) {
        choice[IDLE] = generates ? std::int32_t(below(state, 3)) : 1 - std::min(choice[IDLE], 1);
    } else if (uniform(state) < 0.5) {
        choice[CACHE] = std::int32_t(below(state, tables.serving.cache_gb.size()));
    } else {
        choice[CACHE] += uniform(state) < 0.5 ? 1 : -1;
    }
}

// Draw the task to change. Trainings take the most seconds and have the most choices: another task gets the change only
// when three draws in a row give none of them.
inline Int draw_changed(const Hashes& state, const Tables& tables) {
    Int task = below(state, tables.tasks);
    for (Int again = 0; again < 2 && !tables.is_training[task]; ++again) {
        task = below(state, tables.tasks);
    }
    return task;
}

inline void change_one_task(Int task, const View& x, const Hashes& state, const Tables& tables) {
    if (uniform(state) < 0.04) {
        draw_task(task, x, state, tables);
    } else if (tables.is_training[task]) {
        change_training(task, x, state, tables);
    } else {
        change_serving(task, x, state, tables);
    }
}

// Make a changed vector legal. Fitting devices may cut groups that the change left alone: their tasks are flagged, too.
inline void repair_changed(const Genes& x, const Flags& stale, const Tables& tables) {
    const auto& [group, devices, classes, choice] = view(x, tables);
    const Int tasks = tables.tasks, kinds = tables.classes;
    Local<std::int32_t> before(tasks * kinds, 0);
    for (Int task = 0; task < tasks; ++task) {
        const Genes own = devices[group[task]];
        std::copy(own.begin(), own.end(), before.begin() + task * kinds);
    }
    repair(x, tables);
    for (Int task = 0; task < tasks; ++task) {
        const Genes own = devices[group[task]];
        stale[task] = stale[task] || !std::equal(own.begin(), own.end(), before.begin() + task * kinds);
    }
}

// See `hetrl.search.core.functions.mutate`.
void mutate(const Genes& x, const Flags& stale, const Hashes& state, const Tables& tables) {
    const View parts = view(x, tables);
    do {
        if (uniform(state) < MOVES) {
            move_devices(parts, stale, state, tables);
        } else {
            const Int task = draw_changed(state, tables);
            stale[task] = true;
            change_one_task(task, parts, state, tables);
        }
    } while (uniform(state) >= 0.65);  // a third changes more: some changes only pay together
    repair_changed(x, stale, tables);
}

// See `hetrl.search.core.functions.regroup`. A group that is left without a task gives its devices to the other one.
void regroup(const Genes& x, const Flags& stale, const Hashes& state, const Tables& tables) {
    const View parts = view(x, tables);
    const auto& [group, devices, classes, choice] = parts;
    const Int groups = count_groups(group), task = below(state, tables.tasks), source = group[task];
    Int target = below(state, groups);
    touch(source, group, stale);
    if (target == source && groups < tables.tasks) {
        target = groups;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            const Int available = devices[source][kind];
            if (uniform(state) < 0.5 && available > 0) {
                const Int amount = std::min(draw_amount(tables.per_node[kind], available, state), available);
                shift(source, target, groups + 1, kind, amount, devices);
            }
        }
    }
    group[task] = std::int32_t(target);
    if (std::count(group.begin(), group.end(), source) == 0) {
        for (Int kind = 0; kind < tables.classes; ++kind) {
            shift(source, target, groups + 1, kind, devices[source][kind], devices);
        }
    }
    touch(target, group, stale);
    if (tables.is_training[task]) {
        draw_order(task, devices[target], classes[task], choice[task], state, tables);
    }
    settle(source, parts, state, tables);
    settle(target, parts, state, tables);
    if (uniform(state) < STOPS) {
        take_turns(target, parts, tables);
    }
    repair_changed(x, stale, tables);
}
