// Seconds of the pipelines of a training laid out in cohorts.
#pragma once

#include <numeric>

#include "cohorts.h"
#include "parts.h"

// A training whose devices are laid out.
struct Training {
    Int task;
    Genes choice;
    const Tables& tables;
    Int found;     // cohorts
    Int replicas;  // of all cohorts

    // Return by how many ranks the optimiser's state is shared.
    double shards() const { return choice[SHARDING] ? double(replicas) : 1.0; }

    // Return how many units a node of a class has room for.
    Int units_per_node(Int kind) const { return tables.per_node[kind] >> choice[TENSOR]; }
};

// Return the parameters of one rank of a stage.
inline double stage_parameters(const Training& training, Int i, double layers) {
    const auto& [task, choice, tables, found, replicas] = training;
    const auto parameters = tables.training.parameters[task][choice[TENSOR]][i == 0][i == choice[PIPELINE] - 1];
    return parameters[0] + parameters[1] * layers;
}

// What is timed: the steps of a training, or the forward pass that scores its batch ahead of them.
enum Pass { STEP, SCORE };

// Set forward plus backward of one micro-batch, or the forward alone, on each stage of a cohort.
inline void set_stages(const Training& training, Int q, Pass pass, double tokens, const Cohorts& cohorts) {
    const auto& [task, choice, tables, found, replicas] = training;
    const Int stages = choice[PIPELINE];
    for (Int i = 0; i < stages; ++i) {
        const Int kind = cohorts.kind[q][i], last = i == stages - 1;
        const double layers = double(cohorts.layers[i]);
        if (pass == STEP) {
            const auto both = tables.training.both[task][kind][choice[TENSOR]][choice[RECOMPUTE]][last];
            cohorts.both[i] = both[0] + both[1] * layers + tokens * (both[2] + both[3] * layers);
            cohorts.back[i] = both[4] + both[5] * layers + tokens * (both[6] + both[7] * layers);
        } else {
            const auto one = tables.training.forward[task][kind][choice[TENSOR]][last];
            const double beside = one[4] + one[5] * layers + tokens * (one[6] + one[7] * layers);
            cohorts.both[i] = overlapped(tokens * (one[0] + one[1] * layers), one[2] + one[3] * layers) + beside;
        }
    }
    cohorts.hop[stages - 1] = cohorts.transfer[stages - 1] = 0.0;
}

// Return whether the hop behind stage i leaves the node, for one replica of a cohort inside one class.
inline bool crosses_node(const Training& training, Int q, Int i, Int instance, const Cohorts& cohorts) {
    const Int units = training.units_per_node(cohorts.kind[q][i]);
    const Int here = cohorts.offset[q][i] + instance * cohorts.stride[q][i];
    const Int there = cohorts.offset[q][i + 1] + instance * cohorts.stride[q][i + 1];
    return here / units != there / units;
}

// Set alpha + bytes / beta from stage i to the next one, and the latter alone; `sharing` flows divide a link between
// sites.
inline void set_hop(const Training& training, Int q, Int i, Int instance, double tokens, double sharing,
                    const Cohorts& cohorts) {
    const Int kind = cohorts.kind[q][i], following = cohorts.kind[q][i + 1];
    const double moved = tokens * training.tables.training.hop_bytes[training.task] * sharing;
    const NetworkTables& network = training.tables.network;
    const bool inside = kind == following && !crosses_node(training, q, i, instance, cohorts);
    cohorts.transfer[i] = moved * (inside ? network.peer[kind] : network.byte[kind][following]);
    cohorts.hop[i] = (inside ? network.node_delay[kind] : network.delay[kind][following]) + cohorts.transfer[i];
}

// Count the hops of a pass that use the link behind stage i of cohort q in one direction; a step goes there and back.
inline Int count_flows(const Training& training, Int q, Int i, Pass pass, const Cohorts& cohorts) {
    const Ints& site = training.tables.site;
    const Int here = site[cohorts.kind[q][i]], following = site[cohorts.kind[q][i + 1]];
    if (here == following) {
        return 1;
    }
    Int count = 0;
    for (Int other = 0; other < training.found; ++other) {
        for (Int j = 0; j + 1 < training.choice[PIPELINE]; ++j) {
            const Int a = site[cohorts.kind[other][j]], b = site[cohorts.kind[other][j + 1]];
            if ((a == here && b == following) || (pass == STEP && a == following && b == here)) {
                count += cohorts.replicas[other];
            }
        }
    }
    return count;
}

// Return the time of so many micro-batches through the stages that are set.
inline double stages_seconds(Int stages, Int micro_batches, double variation, const Tables& tables,
                             const Cohorts& cohorts) {
    const Floats& largest = tables.training.largest;
    return pipeline_seconds(head(cohorts.both, stages), head(cohorts.back, stages), head(cohorts.hop, stages),
                            head(cohorts.transfer, stages), micro_batches, variation, largest);
}

// Return the time of a pass over so many samples (`share`) on the slowest of the replicas first .. end - 1 of a cohort.
// They differ in which of their hops leave a node, and that repeats with the units of a node.
inline double slowest_instance(const Training& training, Int q, Int first, Int end, Pass pass, double share,
                               const Cohorts& cohorts, const Parts& parts, Int other) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int stages = choice[PIPELINE];
    const Int micro_batches = Int(std::ceil(share / double(numbers.micro_batches[choice[MICRO_BATCH]])));
    const double tokens = share / double(micro_batches) * numbers.mean_tokens;
    const double variation = numbers.variation / std::sqrt(share / double(micro_batches));
    set_stages(training, q, pass, tokens, cohorts);
    Int inner = 0, repeats = 1;  // hops inside a class, as bits
    for (Int i = 0; i + 1 < stages; ++i) {
        const Int kind = cohorts.kind[q][i], following = cohorts.kind[q][i + 1];
        if (kind == following) {
            inner |= Int(1) << i;
            repeats = std::lcm(repeats, training.units_per_node(kind));
            continue;
        }
        double sharing = double(count_flows(training, q, i, pass, cohorts));
        if (other != task && uses(other, tables.site[kind] * tables.sites + tables.site[following], parts)) {
            sharing *= 2;
        }
        set_hop(training, q, i, 0, tokens, sharing, cohorts);
    }
    const double longest = pass == SCORE ? 1 + numbers.largest[micro_batches] * variation : 1.0;
    double slowest = 0.0;
    Int seen = -1;
    for (Int instance = first; instance < std::min(first + repeats, end); ++instance) {
        Int leaving = 0;
        for (Int i = 0; i + 1 < stages; ++i) {
            if (inner >> i & 1) {
                set_hop(training, q, i, instance, tokens, 1.0, cohorts);
                leaving |= Int(crosses_node(training, q, i, instance, cohorts)) << i;
            }
        }
        if (leaving != seen) {
            const double seconds = pass == STEP ? stages_seconds(stages, micro_batches, variation, tables, cohorts)
                                                : forward_seconds(head(cohorts.both, stages), head(cohorts.hop, stages),
                                                                  head(cohorts.transfer, stages), micro_batches,
                                                                  longest, numbers.call[cohorts.kind[q][0]]);
            slowest = std::max(slowest, seconds);
        }
        seen = leaving;
    }
    return slowest;
}
