// The objective of a plan from the seconds of its iteration: `hetrl.cost.objective`, summed up by classes.
//
// A task uses the devices of its group from the first on, in units: the ranks of a stage (training), a replica. So what
// it uses of a class is a prefix of the nodes, and of each node, and the group's part of a node is its greediest
// task's.
#pragma once

#include "sync_value.h"

// What is to be least, and by what shares the objective's bounds are exceeded (summed up; 0 where all are kept).
struct Found {
    double value;
    double excess;
};

// The units of a task on a class, the ranks of each, and how many a node of the class has room for.
struct Units {
    Int count;
    Int ranks;
    Int per_node;
};

inline Units units_of(Int task, Int kind, const View& x, const Tables& tables, const Parts& parts) {
    const Int size = tables.per_node[kind], units = parts.runs[task][kind];
    if (tables.is_training[task]) {
        const Int tensor = x.choice[task][TENSOR];
        return {units, Int(1) << tensor, size >> tensor};
    }
    const Int option = x.classes[task][kind], nodes = tables.serving.nodes[task][kind][option];
    if (nodes > 1) {  // a stage on each node
        return {units * nodes, tables.serving.tensor[task][kind][option], 1};
    }
    const Int ranks = ranks_of(task, kind, option, tables);
    return {units, ranks, size / ranks};
}

struct Used {
    Int devices;
    Int nodes;
};

// Return how many devices of a class the tasks of a group use together, and on how many of its nodes.
inline Used used_by(Int g, Int kind, const View& x, const Tables& tables, const Parts& parts) {
    Int used = 0, node = 0;
    while (true) {
        Int most = 0, following = 0;  // devices used on this node; the next one on which it is another number
        for (Int task = 0; task < tables.tasks; ++task) {
            if (x.group[task] != g || parts.runs[task][kind] == 0) {
                continue;
            }
            const Units units = units_of(task, kind, x, tables, parts);
            const Int whole = units.count / units.per_node, rest = units.count % units.per_node;
            Int here = 0, end = 0;
            if (node < whole) {
                here = units.per_node * units.ranks;
                end = whole;
            } else if (node == whole && rest > 0) {
                here = rest * units.ranks;
                end = node + 1;
            } else {
                continue;
            }
            most = std::max(most, here);
            following = following == 0 ? end : std::min(following, end);
        }
        if (following == 0) {
            return {used, node};
        }
        used += most * (following - node);
        node = following;
    }
}

// Return how many devices of a class the jobs hold.
inline Int held_of_class(Int kind, const View& x, const Tables& tables, const Parts& parts) {
    const Int size = tables.per_node[kind];
    const bool whole_nodes = tables.objective.whole_nodes[kind];
    Int devices = 0, nodes = 0, shared = 0;
    for (Int g = 0; g < tables.tasks; ++g) {
        if (x.devices[g][kind] == 0) {
            continue;
        }
        const Used used = used_by(g, kind, x, tables, parts);
        const Int whole = x.devices[g][kind] / size;
        devices += used.devices;
        nodes += std::min(used.nodes, whole);
        if (whole_nodes && used.nodes > whole) {  // groups may share the node that has what they own beyond whole nodes
            shared |= Int(1) << remainder_node(g, kind, x.devices, size);
        }
    }
    for (; shared > 0; shared >>= 1) {
        nodes += shared & 1;
    }
    return held_devices(devices, nodes, size, whole_nodes);
}

inline Found time_to_result(double seconds, Local<Int>& held, const Tables& tables) {
    const ObjectiveTables& objective = tables.objective;
    double earliest = INFINITE, latest = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (held[kind] > 0) {
            earliest = std::min(earliest, objective.start[tables.site[kind]]);
            latest = std::max(latest, objective.start[tables.site[kind]]);
        }
    }
    const double end = result_seconds(latest, objective.steps, seconds);
    Local<double> hours(tables.sites, 0.0);
    for (Int kind = 0; kind < tables.classes; ++kind) {
        const Int site = tables.site[kind];
        hours[site] += gpu_hours(held[kind], objective.start[site], end);
    }
    double excess = share_beyond(latest - earliest, objective.queue_timeout_seconds);
    excess += share_beyond(end - earliest, objective.walltime_seconds);
    excess += share_beyond(sum(hours.all(), tables.sites), objective.budget_gpu_hours);
    for (Int site = 0; site < tables.sites; ++site) {
        excess += share_beyond(hours[site], objective.site_gpu_hours[site]);
    }
    return {end, excess};
}

inline Found objective_value(double seconds, const View& x, const Tables& tables, const Parts& parts) {
    const ObjectiveTables& objective = tables.objective;
    if (objective.kind == FOR_THROUGHPUT) {
        return {seconds, 0.0};
    }
    Local<Int> held(tables.classes, 0);
    for (Int kind = 0; kind < tables.classes; ++kind) {
        held[kind] = held_of_class(kind, x, tables, parts);
    }
    if (objective.kind != FOR_COST) {
        return time_to_result(seconds, held, tables);
    }
    const double per_hour = price_per_hour(held.all(), objective.price);
    const double excess =
        share_beyond(seconds, objective.max_iteration_seconds) + share_beyond(per_hour, objective.budget_per_hour);
    if (std::isinf(objective.budget_per_hour)) {
        return {price_value(per_hour, seconds), excess};
    }
    return {seconds, excess};
}
