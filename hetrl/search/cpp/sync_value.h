// Seconds of a weight version: `hetrl.cost.weight_sync.weight_sync_cost`, summed up by classes.
#pragma once

#include "encoding.h"
#include "parts.h"

struct Sync {
    double transfer;  // seconds: encode, every uplink once, fan-out inside the sites
    double pause;     // seconds: load
};

// Return whether a class has rollout replicas (`runs` by class) and is the first of its site that has.
inline bool first_rollouts(Int kind, const Ints& runs, const Ints& site) {
    for (Int before = 0; before < kind; ++before) {
        if (site[before] == site[kind] && runs[before] > 0) {
            return false;
        }
    }
    return runs[kind] > 0;
}

// Seconds per byte and delay of a path.
struct Way {
    double byte;
    double delay;
};

// Return the path between the best-connected nodes of two sites: the gateways of a version stand there.
inline Way best_way(Int source, Int target, const Tables& tables, const Parts& parts) {
    const Ints rollouts = parts.runs[tables.generation], trains = parts.runs[tables.trainer];
    Way best{INFINITE, INFINITE};
    for (Int a = 0; a < tables.classes; ++a) {
        if (tables.site[a] != source || (rollouts[a] == 0 && trains[a] == 0)) {
            continue;
        }
        for (Int b = 0; b < tables.classes; ++b) {
            const bool used = tables.site[b] == target && (rollouts[b] > 0 || trains[b] > 0);
            if (used && tables.network.byte[a][b] < best.byte) {
                best = {tables.network.byte[a][b], tables.network.delay[a][b]};
            }
        }
    }
    return best;
}

// Return the slowest of: each link alone; each source's uplink with all that leaves it through its best node.
inline double uplink_seconds(const Tables& tables, const Parts& parts) {
    const Ints rollouts = parts.runs[tables.generation], trains = parts.runs[tables.trainer];
    double slowest = 0.0;
    for (Int i = 0; i < parts.site_bytes.size(); ++i) {
        const double moved = parts.site_bytes[i];
        if (moved == 0) {
            continue;
        }
        const Int source = tables.site[parts.stage_kind[i]];
        double leaving = 0.0, best = INFINITE;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (tables.site[kind] == source) {
                if (rollouts[kind] > 0 || trains[kind] > 0) {
                    best = std::min(best, tables.network.uplink[kind]);
                }
            } else if (first_rollouts(kind, rollouts, tables.site)) {
                const Way way = best_way(source, tables.site[kind], tables, parts);
                slowest = std::max(slowest, way.delay + moved * way.byte);
                leaving += moved;
            }
        }
        if (leaving > 0) {
            slowest = std::max(slowest, leaving * best);
        }
    }
    return slowest;
}

// Return how many nodes of a class have rollout replicas: they fill the group's nodes in order.
inline Int rollout_nodes(Int kind, const View& x, const Tables& tables, const Parts& parts) {
    const ServingTables& serving = tables.serving;
    const Int generation = tables.generation, option = x.classes[generation][kind], runs = parts.runs[generation][kind];
    if (serving.nodes[generation][kind][option] > 1) {
        return runs * serving.nodes[generation][kind][option];
    }
    const Int size = tables.per_node[kind], per_node = size / ranks_of(generation, kind, option, tables);
    const Int whole = x.devices[x.group[generation]][kind] / size;
    return runs <= whole * per_node ? (runs + per_node - 1) / per_node : whole + 1;
}

// Return whether the node of stage i is one of so many rollout nodes of its class.
//
// Inside one group both count the same nodes. Different groups meet only where their remainders share a node.
inline bool generates_too(Int i, Int nodes, const View& x, const Tables& tables, const Parts& parts) {
    const Int kind = parts.stage_kind[i], node = parts.stage_node[i], size = tables.per_node[kind];
    const Int trainer = x.group[tables.trainer], generator = x.group[tables.generation];
    if (trainer == generator) {
        return node < nodes;
    }
    if (node < x.devices[trainer][kind] / size || nodes <= x.devices[generator][kind] / size) {
        return false;  // one of them is a whole node
    }
    return remainder_node(trainer, kind, x.devices, size) == remainder_node(generator, kind, x.devices, size);
}

// Return the slowest interface: a rollout node receives what it lacks, one with weights sends them to its site.
inline double fan_out_seconds(const View& x, const Tables& tables, const Parts& parts) {
    const Ints runs = parts.runs[tables.generation];
    const Floats &nic = tables.network.nic, &held = parts.node_bytes;
    const double total = parts.version[0];
    double slowest = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (runs[kind] == 0) {
            continue;
        }
        const Int nodes = rollout_nodes(kind, x, tables, parts);
        Int with_weights = 0;
        for (Int i = 0; i < held.size(); ++i) {
            if (held[i] > 0 && parts.stage_kind[i] == kind && generates_too(i, nodes, x, tables, parts)) {
                ++with_weights;
                slowest = std::max(slowest, interface_bytes(total, held[i], true, false) * nic[kind]);
            }
        }
        if (with_weights < nodes) {
            slowest = std::max(slowest, interface_bytes(total, 0.0, true, false) * nic[kind]);
        }
    }
    for (Int i = 0; i < held.size(); ++i) {
        if (held[i] == 0) {
            continue;
        }
        const Int here = parts.stage_kind[i];
        Int others = 0;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (tables.site[kind] == tables.site[here] && runs[kind] > 0) {
                const Int nodes = rollout_nodes(kind, x, tables, parts);
                others += nodes - (kind == here && generates_too(i, nodes, x, tables, parts));
            }
        }
        if (others > 0) {
            slowest = std::max(slowest, interface_bytes(total, held[i], false, true) * nic[here]);
        }
    }
    return slowest;
}

inline Sync sync_seconds(const View& x, const Tables& tables, const Parts& parts) {
    const Int generation = tables.generation;
    double pause = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (parts.runs[generation][kind] > 0) {
            const Int ranks = ranks_of(generation, kind, x.classes[generation][kind], tables);
            const double load = parts.version[0] / double(ranks) * tables.host_byte[kind];
            pause = std::max(pause, load + tables.version_seconds[kind]);
        }
    }
    const double uplinks = uplink_seconds(tables, parts), fan_out = fan_out_seconds(x, tables, parts);
    return {transfer_seconds(parts.version[1], uplinks, fan_out), pause};
}
