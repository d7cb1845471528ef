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

// Return whether the hop behind stage i leaves the node, for one replica of a cohort.
inline bool leaves_node(const Training& training, Int q, Int i, Int instance, const Cohorts& cohorts) {
    if (cohorts.kind[q][i] != cohorts.kind[q][i + 1]) {
        return true;
    }
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

// Set `flows`: the hops that leave the busiest node of each class, over its uplink and over its network card.
inline void count_hops(const Training& training, const Cohorts& cohorts) {
    if (training.choice[PIPELINE] == 1) {
        return;
    }
    const Ints& site = training.tables.site;
    fill(cohorts.flows, Int(0));
    fill(cohorts.hops, Int(0));
    for_each_node(training, cohorts, [&](Int q, Int first, Int run, Int begin, Int end, bool entered) {
        const Int kind = cohorts.kind[q][first];
        Int hops[] = {0, 0, 0, 0};
        for (Int way = 0; entered && way < 4; ++way) {
            hops[way] = cohorts.hops[way][kind];
        }
        for (Int unit = begin; unit < end; ++unit) {
            const Int i = first + unit % run, instance = unit / run;
            for (const Int ahead : {0, 1}) {  // the hop behind the stage, and the one that leads to it
                const Int hop = i - ahead;
                if (hop < 0 || hop + 1 == training.choice[PIPELINE] ||
                    !leaves_node(training, q, hop, instance, cohorts)) {
                    continue;
                }
                hops[ahead] += site[cohorts.kind[q][hop]] != site[cohorts.kind[q][hop + 1]];
                ++hops[2 + ahead];
            }
        }
        for (Int way = 0; way < 4; ++way) {
            cohorts.hops[way][kind] = hops[way];
        }
        const Int flows[] = {hops[0] + hops[1], hops[0] + hops[1], hops[0], hops[1],  // a step's gradients return
                             hops[2] + hops[3], hops[2] + hops[3], hops[2], hops[3]};
        for (Int wire = 0; wire < 8; ++wire) {
            cohorts.flows[wire][kind] = std::max(cohorts.flows[wire][kind], flows[wire]);
        }
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

// Set alpha + bytes / beta from stage i to the next one, and the latter alone, for a replica that has so many samples
// (`hetrl.cost.hops`); `sharing` tasks use a link between sites at the same time.
inline void set_hop(const Training& training, Int q, Int i, Int instance, Pass pass, double tokens, Int samples,
                    double sharing, const Cohorts& cohorts) {
    const Int kind = cohorts.kind[q][i], following = cohorts.kind[q][i + 1];
    const Int here = training.tables.site[kind], there = training.tables.site[following];
    const NetworkTables& network = training.tables.network;
    const bool leaves = leaves_node(training, q, i, instance, cohorts);
    double byte = leaves ? network.byte[kind][following] : network.peer[kind];
    const auto flows = [&](Int wire, Int way, Int end) {
        return double(cohorts.flows[4 * wire + 2 * pass + way][end]);
    };
    if (leaves) {
        byte = std::max({byte, network.nic[kind] * flows(1, 0, kind), network.nic[following] * flows(1, 1, following)});
    }
    if (here != there) {
        const double link = count_flows(training, here, there, pass, samples, cohorts) * sharing;
        byte = std::max({byte, network.link_byte[here][there] * link, network.uplink[kind] * flows(0, 0, kind),
                         network.uplink[following] * flows(0, 1, following)});
    }
    cohorts.transfer[i] = tokens * training.tables.training.hop_bytes[training.task] * byte;
    cohorts.hop[i] = (leaves ? network.delay[kind][following] : network.node_delay[kind]) + cohorts.transfer[i];
}

// Return the time of so many micro-batches through the stages that are set.
inline double stages_seconds(Int stages, Int micro_batches, const Cohorts& cohorts) {
    return pipeline_seconds(head(cohorts.both, stages), head(cohorts.back, stages), head(cohorts.hop, stages),
                            head(cohorts.transfer, stages), micro_batches);
}

// Return the time of a pass over a replica's part of so many samples on the slowest of the replicas first .. end - 1 of
// a cohort. They differ in which of their hops leave a node, and that repeats with the units of a node.
inline double slowest_instance(const Training& training, Int q, Int first, Int end, Pass pass, Int samples,
                               const Cohorts& cohorts, const Parts& parts, Int other) {
    const auto& [task, choice, tables, found, replicas] = training;
    const TrainingTables& numbers = tables.training;
    const Int stages = choice[PIPELINE];
    const double share = at_once(training, pass, samples);
    const Int size = choice[MICRO_BATCH], place = numbers.place[Int(std::ceil(share))];
    const Int micro_batches = micro_batch_count(share, numbers.per_sample[size][place]);
    const double tokens =
        micro_batch_tokens(share * numbers.mean_tokens, micro_batches, stages, numbers.fullest[size][place]);
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
        set_hop(training, q, i, 0, pass, tokens, samples, shared ? 2.0 : 1.0, cohorts);
    }
    double slowest = 0.0;
    Int seen = -1;
    for (Int instance = first; instance < std::min(first + repeats, end); ++instance) {
        Int leaving = 0;
        for (Int i = 0; i + 1 < stages; ++i) {
            if (inner >> i & 1) {
                set_hop(training, q, i, instance, pass, tokens, samples, 1.0, cohorts);
                leaving |= Int(leaves_node(training, q, i, instance, cohorts)) << i;
            }
        }
        if (leaving != seen) {
            const double seconds = pass == STEP ? stages_seconds(stages, micro_batches, cohorts)
                                                : forward_seconds(head(cohorts.both, stages), head(cohorts.hop, stages),
                                                                  head(cohorts.transfer, stages), micro_batches,
                                                                  numbers.call[cohorts.kind[q][0]]);
            slowest = std::max(slowest, seconds);
        }
        seen = leaving;
    }
    return slowest;
}
