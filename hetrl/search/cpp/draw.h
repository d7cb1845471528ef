// Random vectors, all of them legal: devices dealt to the groups, then every task's choices drawn; and how tasks take
// to devices or mates that their group got.
#pragma once

#include "chance.h"
#include "encoding.h"

// How much of the devices a task tends to want: the seconds of equal devices, training 6 N, decode slow per token.
constexpr double LIGHT = 1.0, HEAVY = 4.0;

constexpr double REDRAWN = 0.4;  // share of the changes that draw a training's order anew
constexpr double STOPS = 0.5;    // share of the changes of groups in which all tasks of a group leave the devices

// Put 0 .. size - 1 in random order.
inline void shuffle(Local<Int>& order, Int size, const Hashes& state) {
    for (Int index = 0; index < size; ++index) {
        order[index] = index;
    }
    for (Int index = size - 1; index > 0; --index) {
        std::swap(order[index], order[below(state, index + 1)]);
    }
}

// Put the classes in random order, those of one site together.
inline void order_by_site(Local<Int>& order, const Hashes& state, const Tables& tables) {
    Local<Int> sites(tables.sites, 0);
    shuffle(sites, tables.sites, state);
    Int found = 0;
    for (const Int site : sites) {
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (tables.site[kind] == site) {
                order[found] = kind;
                ++found;
            }
        }
    }
}

// Return whether a task of the group can use a class.
inline bool able(Int g, Int kind, const Genes& group, const Tables& tables) {
    for (Int task = 0; task < tables.tasks; ++task) {
        if (group[task] == g && tables.usable[task][kind]) {
            return true;
        }
    }
    return false;
}

// Return a number of devices near the wanted one: whole nodes, or a power of two inside one.
inline Int rounded(Int wanted, Int node, const Hashes& state) {
    if (wanted >= node) {
        return (wanted + node / 2) / node * node;
    }
    Int size = 1;
    while (size * 2 <= wanted) {
        size *= 2;
    }
    return size == wanted || uniform(state) < 0.5 ? size : std::min(size * 2, node);
}

// Deal the devices: groups in random order fill up class by class, sites in random order, by random appetites.
inline void deal(const Genes& group, const Genes2& devices, const Hashes& state, const Tables& tables) {
    const Int tasks = tables.tasks;
    Local<double> part(tasks, 0.0), got(tasks, 0.0);
    for (Int task = 0; task < tasks; ++task) {
        // never nothing, and up to seven times as much in one draw as in another
        part[group[task]] += (tables.is_inference[task] ? LIGHT : HEAVY) * (0.2 + 1.3 * uniform(state));
    }
    fill(devices, std::int32_t(0));
    Local<Int> groups(tasks, 0), order(tables.classes, 0);
    shuffle(groups, tasks, state);
    const double appetite = sum(part.all(), tasks), total = double(sum(tables.devices, tables.classes));
    for (double& some : part) {
        some = some / appetite * total;
    }
    order_by_site(order, state, tables);
    for (const Int kind : order) {
        Int left = tables.devices[kind];
        while (left > 0) {
            Int chosen = -1;
            for (const Int g : groups) {  // the first that lacks some, or any one that can use them
                const bool lacks = chosen < 0 || (got[chosen] >= part[chosen] && got[g] < part[g]);
                if (lacks && part[g] > 0 && able(g, kind, group, tables)) {
                    chosen = g;
                }
            }
            if (chosen < 0) {
                break;
            }
            const Int wanted = std::max(Int(part[chosen] - got[chosen]), Int(1));
            const Int taken = std::min(left, rounded(wanted, tables.per_node[kind], state));
            devices[chosen][kind] += std::int32_t(taken);
            got[chosen] += double(taken);
            left -= taken;
        }
    }
}

// Return a number of stages: small ones more often, powers of two mostly.
inline Int draw_stages(const Hashes& state) {
    if (uniform(state) < 0.7) {
        return Int(1) << below(state, 4);
    }
    return 1 + below(state, MAX_STAGES);
}

// Draw an option for every class that has one: one random preference for all of them, squared, so that small degrees of
// tensor parallelism come more often.
inline void draw_options(Int task, const Genes& options, const Hashes& state, const Tables& tables) {
    const double preferred = uniform(state);
    for (Int kind = 0; kind < tables.classes; ++kind) {
        const Int most = tables.serving.options[task][kind];
        const Int drawn = 1 + Int(preferred * preferred * double(most));
        options[kind] = std::int32_t(most == 0 ? 0 : std::min(drawn, most));
    }
}

// Draw the order of classes and how many count: those with devices first, mostly from one to the next nearest.
inline void draw_order(Int task, const Genes& own, const Genes& order, const Genes& choice, const Hashes& state,
                       const Tables& tables) {
    const bool random_order = uniform(state) < 0.3;
    const Int kinds = tables.classes;
    Local<Int> left(kinds, 0);
    shuffle(left, kinds, state);
    Int count = 0;
    for (Int kind = 0; kind < kinds; ++kind) {
        count += can_use(task, kind, own, tables);
    }
    for (Int position = 0; position < kinds; ++position) {
        Int chosen = position;
        double nearest = INFINITE;
        for (Int index = position; index < kinds; ++index) {
            double distance = can_use(task, left[index], own, tables) ? 0.0 : 1e18;
            if (position > 0 && !random_order) {
                distance += std::min(tables.network.byte[order[position - 1]][left[index]], 1e9);
            }
            if (distance < nearest) {
                chosen = index;
                nearest = distance;
            }
        }
        std::swap(left[position], left[chosen]);
        order[position] = std::int32_t(left[position]);
    }
    count = std::max(count, Int(1));
    choice[USED] = std::int32_t(uniform(state) < 0.6 ? 1 + below(state, count) : count);
}

// Draw all choices of a task on its group's devices.
inline void draw_task(Int task, const View& x, const Hashes& state, const Tables& tables) {
    const Genes choice = x.choice[task], classes = x.classes[task];
    const auto draw = [&](Int gene, Int limit) { choice[gene] = std::int32_t(below(state, limit)); };
    fill(choice, std::int32_t(0));
    draw(IDLE, 3);
    if (!tables.is_training[task]) {
        draw_options(task, classes, state, tables);
        choice[CACHE] = std::int32_t(uniform(state) < 0.5 ? below(state, tables.serving.cache_gb.size()) : 0);
        return;
    }
    draw(TENSOR, tables.training.most_tensor[task] + 1);
    choice[PIPELINE] = std::int32_t(draw_stages(state));
    draw(SHAPE, SHAPES);
    draw(MICRO_BATCH, tables.training.micro_batches.size());
    draw(RECOMPUTE, MODES);
    draw(SHARDING, 2);
    draw_order(task, x.devices[x.group[task]], classes, choice, state, tables);
}

// See `hetrl.search.core.functions.draw`.
void draw(const Genes& x, const Hashes& state, const Tables& tables) {
    const View parts = view(x, tables);
    deal(parts.group, parts.devices, state, tables);
    for (Int task = 0; task < tables.tasks; ++task) {
        draw_task(task, parts, state, tables);
    }
    repair(x, tables);
}

// Let the classes that a training has devices of count, those that counted in their order, the others at random places.
inline void adopt(Int task, const Genes& own, const Genes& order, const Genes& choice, const Hashes& state,
                  const Tables& tables) {
    const auto counts = [&](Int kind) { return can_use(task, kind, own, tables); };
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
