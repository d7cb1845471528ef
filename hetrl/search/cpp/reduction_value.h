// Seconds of the data-parallel reduction of a training laid out in columns: `hetrl.cost.network`, summed up by classes.
//
// The ranks of one stage, over all replicas, form `2^tensor` equal rings. Which nodes they touch follows from the
// places of the columns (`hetrl.search.core.columns`): inside a column they stand at equal distances.
#pragma once

#include "pipeline_value.h"

// What one ring touches.
struct Ring {
    Int nodes;
    Int sites;
    double latency;  // seconds, inside sites
};

// Return what a ring of stage i touches, and set `sites` to the indices of its sites in order.
inline Ring ring_of(const Training& training, Int i, const Columns& columns, Local<Int>& sites) {
    const auto& [task, choice, tables, found, replicas] = training;
    Int nodes = 0, count = 0;
    Local<Int> members(tables.sites, 0);
    for (Int q = 0; q < found; ++q) {
        const Int kind = columns.kind[q][i], site = tables.site[kind], own = columns.replicas[q];
        if (members[site] == 0) {
            sites[count] = site;
            ++count;
        }
        members[site] += own;
        const Int units = training.units_per_node(kind);
        const Int offset = columns.offset[q][i], stride = columns.stride[q][i], start = offset / units;
        nodes += stride >= units ? own : (offset + (own - 1) * stride) / units - start + 1;
        for (Int before = q - 1; before >= 0; --before) {
            if (columns.kind[before][i] ==
                kind) {  // it stands before this column in the class: they may meet in a node
                const Int last = columns.offset[before][i] + (columns.replicas[before] - 1) * columns.stride[before][i];
                nodes -= last / units == start;
                break;
            }
        }
    }
    double local = 0.0, inside = 0.0;
    for (Int q = 0; q < found; ++q) {
        const Int kind = columns.kind[q][i], site = tables.site[kind];
        const double exchanges = double(2 * (members[site] - 1));
        local = std::max(local, exchanges * tables.network.site_delay[site]);
        inside = std::max(inside, exchanges * tables.network.node_delay[kind]);
    }
    return {nodes, count, nodes == count ? inside : local};
}

// Return the seconds per byte between the best-connected classes of two sites: the gateways stand there.
inline double best_byte(const Training& training, Int a, Int b, const Columns& columns) {
    const auto& [task, choice, tables, found, replicas] = training;
    double best = INFINITE;
    for (Int q = 0; q < found; ++q) {
        for (Int i = 0; i < choice[PIPELINE]; ++i) {
            const Int source = columns.kind[q][i];
            if (tables.site[source] != a) {
                continue;
            }
            for (Int p = 0; p < found; ++p) {
                for (Int j = 0; j < choice[PIPELINE]; ++j) {
                    const Int target = columns.kind[p][j];
                    if (tables.site[target] == b) {
                        best = std::min(best, tables.network.byte[source][target]);
                    }
                }
            }
        }
    }
    return best;
}

// Return the time of the busiest node of one run of stages; nodes repeat after as many as it has stages.
inline double run_interfaces(const Training& training, Int q, Int first, Int run, const Columns& columns) {
    const auto& [task, choice, tables, found, replicas] = training;
    const Int kind = columns.kind[q][first], units = training.units_per_node(kind);
    const Int begin = columns.offset[q][first], end = begin + run * columns.replicas[q], last = (end - 1) / units;
    double slowest = 0.0;
    Int node = begin / units;
    while (node <= last) {
        Int held = columns.cursor[kind] == node ? columns.held[kind] : 0;
        const Int stop = std::min(end, (node + 1) * units);
        for (Int unit = std::max(begin, node * units); unit < stop; ++unit) {
            held |= Int(1) << (first + (unit - begin) % run);
        }
        double load = 0.0;
        for (Int i = 0; i < choice[PIPELINE]; ++i) {
            if (held >> i & 1) {
                load += columns.load[i];
            }
        }
        slowest = std::max(slowest, load * tables.network.nic[kind]);
        columns.cursor[kind] = node;
        columns.held[kind] = held;
        node = node <= begin / units + run ? node + 1 : std::max(last, node + 1);
    }
    return slowest;
}

// Return the time of the busiest node's network interface: all rings of the stages that the node holds.
inline double interface_seconds(const Training& training, const Columns& columns) {
    double slowest = 0.0;
    fill(columns.cursor, Int(-1));  // the node that the last run of the class ends in
    fill(columns.held, Int(0));     // its stages, as bits
    for (Int q = 0; q < training.found; ++q) {
        Int first = 0;
        while (first < training.choice[PIPELINE]) {
            const Int run = training.choice[SHAPE] >= ALIKE ? 1 : columns.stride[q][first];
            slowest = std::max(slowest, run_interfaces(training, q, first, run, columns));
            first += run;
        }
    }
    return slowest;
}

// Return the time of one reduction beside the task `other`, which uses its directions too (itself: alone).
//
// The slowest of lanes inside nodes, network interfaces and links between sites, and the latency of the slowest ring.
inline double reduction_seconds(const Training& training, const Columns& columns, const Parts& parts, Int other,
                                bool fresh) {
    const auto& [task, choice, tables, found, replicas] = training;
    const Int places = tables.sites;
    if (replicas < 2) {
        return 0.0;
    }
    const TrainingTables& numbers = tables.training;
    const double ranks = double(Int(1) << choice[TENSOR]);
    double lanes = 0.0, latency = 0.0, wan = 0.0;
    Local<Int> sites(places, 0);
    Local<double> load(places * places, 0.0);
    for (Int i = 0; i < choice[PIPELINE]; ++i) {
        const double parameters = stage_parameters(training, i, double(columns.layers[i]));
        const double gradient = parameters * numbers.gradient_bytes, weights = parameters * numbers.weight_bytes;
        const double moved =
            double(replicas - 1) / double(replicas) * (gradient + (choice[SHARDING] ? weights : gradient));
        const Ring ring = ring_of(training, i, columns, sites);
        if (ring.nodes < replicas) {
            for (Int q = 0; q < found; ++q) {
                lanes = std::max(lanes, moved * tables.network.peer[columns.kind[q][i]]);
            }
        }
        columns.load[i] = ring.nodes > 1 ? ranks * moved : 0.0;
        double delay = 0.0;
        for (Int s = 0; s + 1 < ring.sites; ++s) {
            delay = std::max(delay, tables.network.link_delay[sites[s]][sites[s + 1]]);
        }
        latency = std::max(latency, ring.latency + double(2 * (ring.sites - 1)) * delay);
        if (ring.sites > 1) {
            const double part = double(ring.sites - 1) / double(ring.sites);
            const double around = ranks * (2 * part * gradient + (choice[SHARDING] ? part * weights : 0.0));
            for (Int s = 0; s < ring.sites; ++s) {
                load[sites[s] * places + sites[(s + 1) % ring.sites]] += around;
            }
        }
    }
    for (Int direction = 0; direction < places * places; ++direction) {
        if (load[direction] > 0) {
            const double shared = other != task && uses(other, direction, parts) ? 2.0 : 1.0;
            const double byte = best_byte(training, direction / places, direction % places, columns);
            wan = std::max(wan, load[direction] * shared * byte);
            if (fresh) {
                add_bytes(task, direction, double(numbers.steps) * load[direction], parts);
            }
        }
    }
    return std::max({lanes, interface_seconds(training, columns), wan}) + latency;
}
