// The time between two weight versions: see cycle.py in `hetrl/cost`, which has the same functions in the same order
// with their documentation and sources.
#pragma once

#include "formulas.h"

double waiting_share(Int samples_per_prompt, Int samples) {
    return (1 - double(samples_per_prompt) / double(samples)) / 2;
}

double held_up(double period, double arrival, double begin, double stop) {
    double phase = arrival - std::floor(arrival / period) * period;
    if (begin < phase + period && phase + period < begin + stop) {
        phase += period;
    }
    return begin < phase && phase < begin + stop ? begin + stop - phase : 0.0;
}

double running_seconds(double period, Int batches, double arrival, double inference, double own_inference,
                       double own_training, double pause, double refill) {
    const double first = std::max(inference + own_training - period, 0.0);
    const bool together = own_training > 0 && own_inference == inference;
    const double stop = own_inference + (own_inference > 0 && !together ? refill : 0.0);
    const double later_stop = own_training + (own_training > 0 ? refill : 0.0);
    const double wait =
        std::max(held_up(period, arrival, first, stop), held_up(period, arrival, inference, later_stop));
    const double latency = arrival + wait + pause;
    double found = double(batches) * period - latency;
    for (Int batch = 0; batch < batches; ++batch) {
        const double begins = double(batch) * period;
        found -= std::max(begins + first + stop - std::max(begins + first, latency), 0.0);
        found -= std::max(begins + inference + later_stop - std::max(begins + inference, latency), 0.0);
        found -= std::max(begins + latency - std::max(begins + latency - pause, latency), 0.0);
    }
    return found;
}

double least_period(double least, double needed, double waiting, double stopped, Int batches, double arrival,
                    double inference, double own_inference, double own_training, double pause, double refill) {
    double period = least;
    for (Int step = 0; step < ROUNDS; ++step) {
        const double running =
            running_seconds(period, batches, arrival, inference, own_inference, own_training, pause, refill);
        const double lacking = needed + waiting * (period - stopped) - running;
        if (lacking <= SETTLED * period) {
            break;
        }
        const double following = period + lacking / (double(batches) - waiting);
        const double cycles = std::floor((arrival - inference) / following);
        const double ahead = (arrival - inference) / std::max(cycles, 1.0) * (1 + SETTLED);
        period = cycles >= 1 && period < ahead && ahead < following ? ahead : following;
    }
    return period;
}

double iteration_seconds(double generation, const Floats& inferences, const Floats& trainings, Int own,
                         const Floats& rollouts, double transfer, double pause, double critic, double valuing,
                         double links, Int staleness, Int samples_per_prompt, Int samples) {
    const double inference = *std::max_element(inferences.begin(), inferences.end());
    const double training = *std::max_element(trainings.begin(), trainings.end());
    if (staleness == 0) {
        return std::max(generation + inference + transfer + pause, critic + valuing) + training;
    }
    if (std::isinf(inference + training + transfer + critic)) {
        return INFINITE;
    }
    const double refill = rollouts[REFILL], own_inference = inferences[own], own_training = trainings[own];
    const Int batches = 1 + staleness;
    const bool together = own_training > 0 && own_inference == inference;
    const Int stops = Int(own_inference > 0 && !together) + Int(own_training > 0);
    const double stopped = own_inference + own_training + pause + double(stops) * refill;
    double least = std::max({std::max(generation, rollouts[BUSY]) + stopped, transfer, links});
    least =
        std::max({least, generation + own_inference + own_training, (critic + valuing + training) / double(batches)});
    for (Int group = 0; group < inferences.size(); ++group) {
        least = std::max(least, inferences[group] + trainings[group]);
    }
    const double arrival = inference + training + transfer;
    const auto period = [&](double start, double needed, double waiting) {
        return least_period(start, needed, waiting, stopped, batches, arrival, inference, own_inference, own_training,
                            pause, refill);
    };
    return std::min({period(least, rollouts[LAST], 0.0),
                     period(least, rollouts[PROMPT], waiting_share(samples_per_prompt, samples)),
                     period(std::max(least, stopped + rollouts[WHOLE]), rollouts[WHOLE], 0.0)});
}
