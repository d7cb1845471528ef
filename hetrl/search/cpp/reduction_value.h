// Seconds of the data-parallel reduction of a training laid out in cohorts: `hetrl.cost.network`, summed up by classes.
//
// The ranks of one stage, over all replicas, form `2^tensor` equal rings. Which nodes they touch follows from the
// places of the cohorts (`hetrl.search.core.cohorts`): inside a cohort they stand at equal distances.
#pragma once

#include "pipeline_value.h"

// What one ring touches.
struct Ring {
    Int sites;
    double latency;  // seconds
};

// Return what a ring of stage i touches; set `sites` to the indices of its sites in order, and for each site of the
// topology how many of the ring's ranks are its `members`, on so many `nodes`.
inline Ring ring_of(const Training& training, Int i, const Cohorts& cohorts, Local<Int>& sites, Local<Int>& members,
                    Local<Int>& nodes) {
    const auto& [task, choice, tables, found, replicas] = training;
    Int count = 0, all = 0;
    Local<Int> kinds(tables.sites, 0);
    for (Int site = 0; site < tables.sites; ++site) {
        members[site] = nodes[site] = 0;
    }
    for (Int q = 0; q < found; ++q) {
        const Int kind = cohorts.kind[q][i], site = tables.site[kind], own = cohorts.replicas[q];
        if (members[site] == 0) {
            sites[count] = site;
            kinds[count] = kind;
            ++count;
        }
        members[site] += own;
        const Int units = training.units_per_node(kind);
        const Int offset = cohorts.offset[q][i], stride = cohorts.stride[q][i], start = offset / units;
        Int touched = stride >= units ? own : (offset + (own - 1) * stride) / units - start + 1;
        for (Int before = q - 1; before >= 0; --before) {
            if (cohorts.kind[before][i] ==
                kind) {  // it stands before this cohort in the class: they may meet in a node
                const Int last = cohorts.offset[before][i] + (cohorts.replicas[before] - 1) * cohorts.stride[before][i];
                touched -= last / units == start;
                break;
            }
        }
        nodes[site] += touched;
        all += touched;
    }
    const NetworkTables& network = tables.network;
    Local<Int> ranks(count, 0);
    Local<double> delays(count, 0.0);
    double between = 0.0;
    for (Int s = 0; s < count; ++s) {
        ranks[s] = members[sites[s]];
        delays[s] = all == count ? network.node_delay[kinds[s]] : network.site_delay[sites[s]];
        for (Int before = 0; before < s; ++before) {
            between = std::max(between, network.link_delay[sites[before]][sites[s]]);
        }
    }
    return {count, ring_latency(ranks.all(), delays.all(), between)};
}

// Set of each site the time of its busiest node's network card: all rings of the stages on that node, by `load`.
inline void set_cards(const Training& training, const Cohorts& cohorts, Local<double>& slowest) {
    fill(cohorts.held, Int(0));  // the stages on the node that the last run of the class ends in, as bits
    for_each_node(training, cohorts, [&](Int q, Int first, Int run, Int begin, Int end, bool entered) {
        const Int kind = cohorts.kind[q][first];
        Int held = entered ? cohorts.held[kind] : 0;
        for (Int unit = begin; unit < end; ++unit) {
            held |= Int(1) << (first + unit % run);
        }
        double load = 0.0;
        for (Int i = 0; i < training.choice[PIPELINE]; ++i) {
            if (held >> i & 1) {
                load += cohorts.load[training.tables.site[kind]][i];
            }
        }
        double& seconds = slowest[training.tables.site[kind]];
        seconds = std::max(seconds, load * training.tables.network.nic[kind]);
        cohorts.held[kind] = held;
    });
}

// The seconds of a reduction: of the gradients, and of gathering parameters behind the update.
struct Reduction {
    double reduce;
    double gather;
};

// Return the time of one reduction beside the task `other`, which uses its directions too (itself: alone).
//
// Of either phase the slowest of lanes inside nodes, network interfaces and links between sites, and its part of the
// latency of the slowest ring. Bytes inside a site are divided between the phases as those of a parameter are.
inline Reduction reduction_of(const Training& training, const Cohorts& cohorts, const Parts& parts, Int other,
                              bool fresh) {
    const auto& [task, choice, tables, found, replicas] = training;
    const Int places = tables.sites;
    if (replicas < 2) {
        return {0.0, 0.0};
    }
    const TrainingTables& numbers = tables.training;
    const double ranks = double(Int(1) << choice[TENSOR]);
    const bool sharded = choice[SHARDING];
    double lanes = 0.0, latency = 0.0;
    Local<Int> sites(places, 0), members(places, 0), nodes(places, 0);
    Local<double> reduced(places * places, 0.0), gathered(places * places, 0.0);
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const double parameters = stage_parameters(training, i, double(cohorts.layers[i]));
        const double gradient = parameters * numbers.gradient_bytes, weights = parameters * numbers.weight_bytes;
        const Ring ring = ring_of(training, i, cohorts, sites, members, nodes);
        const auto moved = [&](Int site) {
            return ring_reduce_bytes(members[site], gradient, sharded) +
                   ring_gather_bytes(members[site], weights, sharded);
        };
        for (Int q = 0; q < found; ++q) {
            const Int kind = cohorts.kind[q][i], site = tables.site[kind];
            if (nodes[site] < members[site]) {
                lanes = std::max(lanes, moved(site) * tables.network.peer[kind]);
            }
        }
        latency = std::max(latency, ring.latency);
        const double packed = numbers.packed * gradient, sent = numbers.gathered * weights;
        for (Int s = 0; s < ring.sites; ++s) {
            cohorts.load[sites[s]][i] = nodes[sites[s]] > 1 ? ranks * moved(sites[s]) : 0.0;
            for (Int t = 0; t < ring.sites; ++t) {
                if (s != t) {
                    const Int direction = sites[s] * places + sites[t];
                    reduced[direction] +=
                        ranks * wan_reduce_bytes(members[sites[t]], replicas, ring.sites, packed, sharded);
                    gathered[direction] += ranks * wan_gather_bytes(members[sites[s]], replicas, sent, sharded);
                }
            }
        }
    }
    Gateways gateways(tables);
    for (Int q = 0; q < found; ++q) {
        for (Int i = 0; i < choice[PIPELINE]; ++i) {
            gateways.note(cohorts.kind[q][i]);
        }
    }
    Crossing reducing(gateways, places), gathering(gateways, places);
    for (Int direction = 0; direction < places * places; ++direction) {
        if (reduced[direction] > 0) {
            const Int source = direction / places, target = direction % places;
            const double shared = other != task && uses(other, direction, parts) ? 2.0 : 1.0;
            reducing.add(source, target, shared * reduced[direction], 0.0);
            gathering.add(source, target, shared * gathered[direction], 0.0);
            if (fresh) {
                add_bytes(task, direction, double(numbers.steps) * (reduced[direction] + gathered[direction]), 0.0,
                          parts);
            }
        }
    }
    Local<double> cards(places, 0.0);
    set_cards(training, cohorts, cards);
    const double first = sharded ? numbers.gradient_bytes / (numbers.gradient_bytes + numbers.weight_bytes) : 1.0;
    double scatter = 0.0, gather = 0.0;
    for (Int site = 0; site < places; ++site) {
        scatter = std::max(scatter, first * cards[site] + reducing.card_seconds(site));
        gather = std::max(gather, (1 - first) * cards[site] + gathering.card_seconds(site));
    }
    const double delays = sharded ? 0.5 * latency : latency;
    return {rings_seconds(first * lanes, scatter, reducing.seconds(), delays),
            rings_seconds((1 - first) * lanes, gather, gathering.seconds(), latency - delays)};
}
