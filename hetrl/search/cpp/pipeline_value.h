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

// Return the samples that are shared out at once: whole micro-batches of every minibatch if possible.
inline Int unit_of(const Training& training) {
    const TrainingTables& numbers = training.tables.training;
    const Int micro_batch = numbers.micro_batches[training.choice[MICRO_BATCH]];
    const Int unit = micro_batch * numbers.minibatches;
    return numbers.samples % unit == 0 && numbers.samples / unit >= training.replicas ? unit : micro_batch;
}

// What is timed: the steps of a training, or the forward pass that scores its batch ahead of them.
enum Pass { STEP, SCORE };

// Return how many of the samples of an iteration a pass takes: a minibatch's, or all.
inline double at_once(const Training& training, Pass pass, Int samples) {
    return double(samples) / double(pass == STEP ? training.tables.training.minibatches : 1);
}

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

// Call `visit(q, first, run, begin, end, entered)` for each node and each run of stages side by side on it: the stages
// first .. first + run - 1 of cohort q, whose units begin .. end - 1, counted from the run's first one, are there;
// `entered`: so is the end of the class's run before. Nodes repeat after as many as a run has stages; those that do
// nothing else are left out.
template <class Visit>
void for_each_node(const Training& training, const Cohorts& cohorts, const Visit& visit) {
    fill(cohorts.cursor, Int(-1));  // the node that the last run of the class ends in
    for (Int q = 0; q < training.found; ++q) {
        Int run = 1;
        for (Int first = 0; first < training.choice[PIPELINE]; first += run) {
            run = training.choice[SHAPE] >= ALIKE ? 1 : cohorts.stride[q][first];
            const Int kind = cohorts.kind[q][first], units = training.units_per_node(kind);
            const Int offset = cohorts.offset[q][first], all = run * cohorts.replicas[q];
            const Int last = (offset + all - 1) / units;
            Int node = offset / units;
            while (node <= last) {
                const Int begin = std::max(node * units - offset, Int(0)), end = (node + 1) * units - offset;
                visit(q, first, run, begin, std::min(end, all), cohorts.cursor[kind] == node);
                cohorts.cursor[kind] = node;
                node = node <= offset / units + run ? node + 1 : std::max(last, node + 1);
            }
        }
    }
}

// Return how many of the units begin .. end - 1 of runs are the stage so far behind the first.
inline Int count_stage(Int begin, Int end, Int run, Int behind) {
    return (end - behind + run - 1) / run - (begin - behind + run - 1) / run;
}

// Set `flows`: the hops between sites that send, or receive, over the uplink of the busiest node of each class.
inline void count_uplinks(const Training& training, const Cohorts& cohorts) {
    const Ints& site = training.tables.site;
    const Int stages = training.choice[PIPELINE];
    const auto leaves = [&](Int q, Int i) {
        return i >= 0 && i + 1 < stages && site[cohorts.kind[q][i]] != site[cohorts.kind[q][i + 1]];
    };
    bool any = false;
    for (Int q = 0; q < training.found; ++q) {
        for (Int i = 0; i < stages; ++i) {
            any = any || leaves(q, i);
        }
    }
    if (!any) {
        return;
    }
    fill(cohorts.flows, Int(0));
    fill(cohorts.held, Int(0));
    fill(cohorts.taken, Int(0));
    for_each_node(training, cohorts, [&](Int q, Int first, Int run, Int begin, Int end, bool entered) {
        const Int kind = cohorts.kind[q][first], last = first + run - 1;
        const Int sent = leaves(q, last) ? count_stage(begin, end, run, run - 1) : 0;
        const Int received = leaves(q, first - 1) ? count_stage(begin, end, run, 0) : 0;
        const Int held = sent + (entered ? cohorts.held[kind] : 0);
        const Int taken = received + (entered ? cohorts.taken[kind] : 0);
        const Int of_pass[] = {held + taken, held + taken, held, taken};  // a step's gradients return
        for (Int way = 0; way < 4; ++way) {
            cohorts.flows[way][kind] = std::max(cohorts.flows[way][kind], of_pass[way]);
        }
        cohorts.held[kind] = held;
        cohorts.taken[kind] = taken;
    });
}

// Return by how many flows the replicas of a cohort disturb one that has so many samples.
inline double disturbing(const Training& training, Int q, Int samples, const Cohorts& cohorts) {
    const double all = double(cohorts.replicas[q]);
    if (samples == 0) {
        return all;
    }
    const double more = double(cohorts.extra[q]), own = double(cohorts.samples[q]), other = double(samples);
    return more * std::min(1.0, (own + double(unit_of(training))) / other) + (all - more) * std::min(1.0, own / other);
}

// Count the hops of a pass that use a link between sites in one direction, as they disturb a replica that has so many
// samples (`hetrl.cost.hops`; 0: before samples are shared out, all alike). A step goes there and back.
inline double count_flows(const Training& training, Int here, Int there, Pass pass, Int samples,
                          const Cohorts& cohorts) {
    const Ints& site = training.tables.site;
    double count = 0.0;
    for (Int q = 0; q < training.found; ++q) {
        for (Int i = 0; i + 1 < training.choice[PIPELINE]; ++i) {
            const Int a = site[cohorts.kind[q][i]], b = site[cohorts.kind[q][i + 1]];
            if ((a == here && b == there) || (pass == STEP && a == there && b == here)) {
                count += disturbing(training, q, samples, cohorts);
            }
        }
    }
    return count;
}

// Set alpha + bytes / beta from stage i to the next one inside a class, and the latter alone.
inline void set_hop(const Training& training, Int q, Int i, Int instance, double tokens, const Cohorts& cohorts) {
    const Int kind = cohorts.kind[q][i];
    const NetworkTables& network = training.tables.network;
    const bool leaves = crosses_node(training, q, i, instance, cohorts);
    const double moved = tokens * training.tables.training.hop_bytes[training.task];
    cohorts.transfer[i] = moved * (leaves ? network.byte[kind][kind] : network.peer[kind]);
    cohorts.hop[i] = (leaves ? network.delay[kind][kind] : network.node_delay[kind]) + cohorts.transfer[i];
}

// The same between classes, for a replica that has so many samples; `sharing` tasks use a link between sites at the
// same time.
inline void set_far_hop(const Training& training, Int q, Int i, Pass pass, double tokens, Int samples, double sharing,
                        const Cohorts& cohorts) {
    const Int kind = cohorts.kind[q][i], following = cohorts.kind[q][i + 1];
    const Int here = training.tables.site[kind], there = training.tables.site[following];
    const NetworkTables& network = training.tables.network;
    double byte = network.byte[kind][following];
    if (here != there) {
        const double flows = count_flows(training, here, there, pass, samples, cohorts) * sharing;
        byte = std::max({byte, network.link_byte[here][there] * flows,
                         network.uplink[kind] * double(cohorts.flows[2 * pass][kind]),
                         network.uplink[following] * double(cohorts.flows[2 * pass + 1][following])});
    }
    cohorts.transfer[i] = tokens * training.tables.training.hop_bytes[training.task] * byte;
    cohorts.hop[i] = network.delay[kind][following] + cohorts.transfer[i];
}
// Return the time of so many micro-batches through the stages that are set.
inline double stages_seconds(Int stages, Int micro_batches, double variation, const Tables& tables,
                             const Cohorts& cohorts) {
    const Floats& largest = tables.training.largest;
    return pipeline_seconds(head(cohorts.both, stages), head(cohorts.back, stages), head(cohorts.hop, stages),
                            head(cohorts.transfer, stages), micro_batches, variation, largest);
}

// Return the time of a pass over a replica's part of so many samples on the slowest of the replicas first .. end - 1 of
// a cohort. They differ in which of their hops leave a node, and that repeats with the units of a node.
inline double slowest_instance(const Training& training, Int q, Int first, Int end, Pass pass, Int samples,
                               const Cohorts& cohorts, const Parts& parts, Int other) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int stages = choice[PIPELINE];
    const double share = at_once(training, pass, samples);
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
        const bool shared =
            other != task && uses(other, tables.site[kind] * tables.sites + tables.site[following], parts);
        set_far_hop(training, q, i, pass, tokens, samples, shared ? 2.0 : 1.0, cohorts);
    }
    const double longest = pass == SCORE ? 1 + numbers.largest[micro_batches] * variation : 1.0;
    double slowest = 0.0;
    Int seen = -1;
    for (Int instance = first; instance < std::min(first + repeats, end); ++instance) {
        Int leaving = 0;
        for (Int i = 0; i + 1 < stages; ++i) {
            if (inner >> i & 1) {
                set_hop(training, q, i, instance, tokens, cohorts);
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
