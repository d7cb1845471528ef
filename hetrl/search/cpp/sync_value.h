// Seconds of a weight version: `hetrl.cost.weight_sync.weight_sync_cost`, summed up by classes.
#pragma once

#include "encoding.h"
#include "parts.h"

// Seconds; the first three run at the same time.
struct Sync {
    double encode;
    double uplinks;
    double fan_out;
    double pause;

    double transfer() const { return transfer_seconds(encode, uplinks, fan_out); }
};

// What the next batch's trainings send while a version travels: `hetrl.cost.weight_sync.TrainingsAhead`.
struct TrainingsAhead {
    double begins[2], lasts[2];
    const Tables& tables;
    const Parts& parts;
    bool none;
    bool scored;  // ahead of the steps, instead of among them

    // Return the time of a transfer that takes `alone()` on a free wire and gives way; 0 where no training sends.
    template <typename Call>
    double behind(Int source, Int target, const Call& alone) const {
        double taken[] = {0.0, 0.0};
        for (Int task = 0; !none && task < tables.tasks; ++task) {
            for (Int d = 0; d < parts.links[task]; ++d) {
                if (parts.direction[task][d] == source * tables.sites + target) {
                    const double first = scored ? parts.scored_bytes[task][d] : 0.0;
                    taken[0] += first * tables.network.link_byte[source][target];
                    taken[1] += (parts.direction_bytes[task][d] - first) * tables.network.link_byte[source][target];
                }
            }
        }
        if (taken[0] + taken[1] == 0.0) {
            return 0.0;
        }
        double from[] = {begins[0], begins[1]}, during[] = {lasts[0], lasts[1]};
        return yielding_seconds(alone(), {from, {2}}, {during, {2}}, {taken, {2}});
    }
};

// The version of a trained model: who trains it, who takes it, and what its first replica holds.
struct Version {
    Int m, trains, takes;
    Ints runs, trained;  // units of both by class
    Ints stage_kind, stage_node;
    Floats node_bytes, site_bytes, bytes;
};

inline Version version_of(Int m, const Tables& tables, const Parts& parts) {
    const Int trains = tables.trained[m], takes = tables.takes[m];
    return {m,
            trains,
            takes,
            parts.runs[takes],
            parts.runs[trains],
            parts.stage_kind[m],
            parts.stage_node[m],
            parts.node_bytes[m],
            parts.site_bytes[m],
            parts.version[m]};
}

// Return whether a class uses the weights (`runs` by class) and is the first of its site that does.
inline bool first_user(Int kind, const Ints& runs, const Ints& site) {
    for (Int before = 0; before < kind; ++before) {
        if (site[before] == site[kind] && runs[before] > 0) {
            return false;
        }
    }
    return runs[kind] > 0;
}

// Return the gateways of a version: at the nodes that train the model or use it.
inline Gateways gateways_of(const Version& sent, const Tables& tables) {
    Gateways found(tables);
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (sent.runs[kind] > 0 || sent.trained[kind] > 0) {
            found.note(kind);
        }
    }
    return found;
}

// Call with source site, target site and bytes of each direction that a version takes between sites.
template <typename Call>
inline void each_route(const Version& sent, const Tables& tables, const Call& call) {
    for (Int i = 0; i < sent.site_bytes.size(); ++i) {
        if (sent.site_bytes[i] == 0) {
            continue;
        }
        const Int source = tables.site[sent.stage_kind[i]];
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (tables.site[kind] != source && first_user(kind, sent.runs, tables.site)) {
                call(source, tables.site[kind], sent.site_bytes[i]);
            }
        }
    }
}

// Return the time of a version's ways between sites, all at once.
inline double uplink_seconds(const Version& sent, const Tables& tables) {
    Gateways gateways = gateways_of(sent, tables);
    Crossing crossing(gateways, tables.sites);
    each_route(sent, tables, [&](Int source, Int target, double moved) {
        crossing.add(source, target, moved, tables.network.link_delay[source][target]);
    });
    return crossing.seconds();
}

// Return how many nodes of a class use the weights: replicas fill the group's nodes in order.
inline Int user_nodes(Int kind, const Version& sent, const View& x, const Tables& tables) {
    const ServingTables& serving = tables.serving;
    const Int takes = sent.takes, option = x.classes[takes][kind], runs = sent.runs[kind];
    if (serving.nodes[takes][kind][option] > 1) {
        return runs * serving.nodes[takes][kind][option];
    }
    const Int size = tables.per_node[kind], per_node = size / ranks_of(takes, kind, option, tables);
    const Int whole = x.devices[x.group[takes]][kind] / size;
    return runs <= whole * per_node ? (runs + per_node - 1) / per_node : whole + 1;
}

// Return whether the node of stage i is one of so many nodes of its class that use the weights.
//
// Inside one group both count the same nodes. Different groups meet only where their remainders share a node.
inline bool takes_too(Int i, Int nodes, const Version& sent, const View& x, const Tables& tables) {
    const Int kind = sent.stage_kind[i], node = sent.stage_node[i], size = tables.per_node[kind];
    const Int trainer = x.group[sent.trains], user = x.group[sent.takes];
    if (trainer == user) {
        return node < nodes;
    }
    if (node < x.devices[trainer][kind] / size || nodes <= x.devices[user][kind] / size) {
        return false;  // one of them is a whole node
    }
    return remainder_node(trainer, kind, x.devices, size) == remainder_node(user, kind, x.devices, size);
}

// Return the slowest interface: a node that uses weights receives what it lacks, one with weights sends them to its
// site and to each other one that uses them.
inline double fan_out_seconds(const Version& sent, const View& x, const Tables& tables) {
    const Ints& runs = sent.runs;
    const Floats &nic = tables.network.nic, &held = sent.node_bytes;
    const double total = sent.bytes[0];
    double slowest = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (runs[kind] == 0) {
            continue;
        }
        const Int nodes = user_nodes(kind, sent, x, tables);
        Int with_weights = 0;
        for (Int i = 0; i < held.size(); ++i) {
            if (held[i] > 0 && sent.stage_kind[i] == kind && takes_too(i, nodes, sent, x, tables)) {
                ++with_weights;
                slowest = std::max(slowest, interface_bytes(total, held[i], true, 0) * nic[kind]);
            }
        }
        if (with_weights < nodes) {
            slowest = std::max(slowest, interface_bytes(total, 0.0, true, 0) * nic[kind]);
        }
    }
    for (Int i = 0; i < held.size(); ++i) {
        if (held[i] == 0) {
            continue;
        }
        const Int here = sent.stage_kind[i];
        Int others = 0, copies = 0;
        for (Int kind = 0; kind < tables.classes; ++kind) {
            if (tables.site[kind] != tables.site[here]) {
                copies += first_user(kind, runs, tables.site);
            } else if (runs[kind] > 0) {
                const Int nodes = user_nodes(kind, sent, x, tables);
                others += nodes - (kind == here && takes_too(i, nodes, sent, x, tables));
            }
        }
        copies += others > 0;
        slowest = std::max(slowest, interface_bytes(total, held[i], false, copies) * nic[here]);
    }
    return slowest;
}

// Return the seconds of a version of model m.
inline Sync sync_seconds(Int m, const View& x, const Tables& tables, const Parts& parts) {
    const Version sent = version_of(m, tables, parts);
    double pause = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (sent.runs[kind] > 0) {
            const Int ranks = ranks_of(sent.takes, kind, x.classes[sent.takes][kind], tables);
            const double load = sent.bytes[0] / double(ranks) * tables.host_byte[kind];
            pause = std::max(pause, load + tables.version_seconds[kind]);
        }
    }
    return {sent.bytes[1], uplink_seconds(sent, tables), fan_out_seconds(sent, x, tables), pause};
}

// Return whether a model's weights are used at a site.
inline bool used_at(Int site, Int m, const Tables& tables, const Parts& parts) {
    const Ints runs = parts.runs[tables.takes[m]];
    for (Int kind = 0; kind < tables.classes; ++kind) {
        if (runs[kind] > 0 && tables.site[kind] == site) {
            return true;
        }
    }
    return false;
}

// Return a version of model m that gives way to trainings.
inline Sync give_way(Int m, Sync sync, const TrainingsAhead& ahead) {
    if (ahead.none) {
        return sync;
    }
    const Tables& tables = ahead.tables;
    const Version sent = version_of(m, tables, ahead.parts);
    Gateways gateways = gateways_of(sent, tables);
    each_route(sent, tables, [&](Int source, Int target, double moved) {
        const auto alone = [&] {
            return tables.network.link_delay[source][target] + moved * gateways.path(source, target);
        };
        sync.uplinks = std::max(sync.uplinks, ahead.behind(source, target, alone));
    });
    return sync;
}

// Return the critic's version as it travels beside the actor's: its weights stand still while the actor's take a
// direction between two sites that both take, or the network cards of a site that both are used at, and give way.
inline Sync critic_behind(const Sync& actor, Sync critic, const TrainingsAhead& ahead) {
    const Tables& tables = ahead.tables;
    const Parts& parts = ahead.parts;
    Local<double> ways(tables.sites * tables.sites, 0.0), before(tables.sites * tables.sites, 0.0);
    const auto add = [&](Local<double>& seconds, Int m) {
        each_route(version_of(m, tables, parts), tables, [&](Int source, Int target, double moved) {
            seconds[source * tables.sites + target] += moved * tables.network.link_byte[source][target];
        });
    };
    add(before, 0);
    add(ways, 1);
    double inside = 0.0;
    for (Int target = 0; target < tables.sites; ++target) {
        const bool both = used_at(target, 0, tables, parts) && used_at(target, 1, tables, parts);
        inside = both ? actor.fan_out : inside;
        for (Int source = 0; source < tables.sites; ++source) {
            const Int way = source * tables.sites + target;
            if (ways[way] > 0) {
                const double still = std::max(before[way], both ? actor.fan_out : 0.0);
                const double delay = tables.network.link_delay[source][target];
                const double alone = still + delay + ways[way];
                const double behind = ahead.behind(source, target, [&] { return alone; });
                critic.uplinks = std::max({critic.uplinks, alone, behind});
            }
        }
    }
    critic.fan_out += inside;
    return critic;
}
