// The time between two weight versions: see cycle.py in `hetrl/cost`, which has the same functions in the same order
// with their documentation and sources.
#pragma once

#include "formulas.h"

double transfer_seconds(double encode, double uplinks, double fan_out) {
    return std::max({encode, uplinks, fan_out});
}

double behind_seconds(double critic, double behind, double lead) {
    return behind <= critic || critic + lead <= 0 ? critic
                                                  : critic + std::max(behind - critic - std::max(lead, 0.0), 0.0);
}

double shared_transfer_seconds(double actor, double critic, double behind, double lead) {
    return behind <= critic ? actor : actor + std::min(behind - critic, critic + std::min(lead, 0.0));
}

double yielding_seconds(double alone, const Floats& begins, const Floats& lasts, const Floats& taken) {
    double left = alone, now = 0.0;
    for (Int i = 0; i < begins.size(); ++i) {
        const double free = std::max(begins[i] - now, 0.0), rest = std::max(lasts[i] - taken[i], 0.0);
        if (left <= free) {
            return now + left;
        }
        left -= free;
        now += free;
        if (left <= rest) {
            return now + left * lasts[i] / rest;
        }
        left -= rest;
        now += lasts[i];
    }
    return now + left;
}

double settled_seconds(double first, double second, double third) {
    return first + (second - first) * (second - first) / (2 * second - first - std::min(third, second));
}

double held_up(double period, double arrival, double begin, double stop) {
    double phase = arrival - std::floor(arrival / period) * period;
    if (begin < phase + period && phase + period < begin + stop) {
        phase += period;
    }
    return begin < phase && phase < begin + stop ? begin + stop - phase : 0.0;
}

double overlap(double begin, double end, double after, double before) {
    return std::max(std::min(end, before) - std::max(begin, after), 0.0);
}

double running_seconds(double period, Int batches, double arrival, double inference, double own_inference,
                       double own_training, double pause, double refill, double renewal) {
    const double first = std::max(inference + own_training - period, 0.0);
    const bool together = own_training > 0 && own_inference == inference;
    const double stop = own_inference + (own_inference > 0 && !together ? refill : 0.0);
    const double later_stop = own_training + (own_training > 0 ? refill : 0.0);
    const double wait =
        std::max(held_up(period, arrival, first, stop), held_up(period, arrival, inference, later_stop));
    const double loaded = pause + (wait > refill && refill > 0 ? 0.0 : renewal);
    const double latency = arrival + wait + loaded;
    const double end = double(batches) * period;
    double found = end - latency;
    for (Int batch = 0; batch < batches; ++batch) {
        const double begins = double(batch) * period;
        found -= overlap(begins + first, begins + first + stop, latency, INFINITE);
        found -= overlap(begins + inference, begins + inference + later_stop, latency, INFINITE);
        found -= overlap(begins + latency - loaded, begins + latency, latency, end);
    }
    return found;
}

double evenness(double period, double regular) {
    return std::min(regular / period, 1.0);
}

double others_share(double even, Int batches) {
    return even + (1 - even) * double(batches - 1) / double(batches);
}

double batch_seconds(double period, double stopped, double regular, Int batches, double whole, double alone,
                     double shared, double queued) {
    const double even = evenness(period, regular), running = period - stopped;
    const double found = (alone + shared * (1 - even)) / (1 - shared * others_share(even, batches) / running);
    return std::max(whole, found + queued * std::max(1 - running / found, 0.0));
}

double least_period(double least, double regular, double stopped, Int batches, double arrival, double inference,
                    double own_inference, double own_training, double pause, double refill, double renewal,
                    double whole, double alone, double shared, double queued) {
    double period = std::max(least, stopped + shared * (1 + NEAREST));
    for (Int step = 0; step < ROUNDS; ++step) {
        const double running =
            running_seconds(period, batches, arrival, inference, own_inference, own_training, pause, refill, renewal);
        const double needed = batch_seconds(period, stopped, regular, batches, whole, alone, shared, queued);
        if (needed - running <= SETTLED * period) {
            break;
        }
        const double own = period - stopped, others = shared * others_share(evenness(period, regular), batches);
        const double steep =
            needed > whole ? (1 + queued / own) * needed * others / (own * (own - others)) + queued / own : 0.0;
        const double following = period + (needed - running) / (double(batches) + steep);
        const double cycles = std::floor((arrival - inference) / following);
        const double ahead = (arrival - inference) / std::max(cycles, 1.0) * (1 + SETTLED);
        period = cycles >= 1 && period < ahead && ahead < following ? ahead : following;
    }
    return period;
}

double iteration_seconds(double generation, const Floats& inferences, const Floats& trainings, Int own,
                         const Floats& rollouts, double actor, double transfer, double pause, double critic,
                         double valuing, double links, Int staleness) {
    const double inference = *std::max_element(inferences.begin(), inferences.end());
    double busiest = 0.0;
    for (Int group = 0; group < inferences.size(); ++group) {
        busiest = std::max(busiest, inferences[group] + trainings[group]);
    }
    if (staleness == 0) {
        const double served = std::max(actor + transfer, trainings[own]) + pause;
        return std::max({generation + inference + served, critic + valuing, busiest, links});
    }
    if (!std::isfinite(busiest + transfer + critic)) {
        return INFINITE;
    }
    const double refill = rollouts[REFILL], renewal = rollouts[RENEWAL], own_inference = inferences[own],
                 own_training = trainings[own];
    const Int batches = 1 + staleness;
    const bool together = own_training > 0 && own_inference == inference;
    const Int stops = Int(own_inference > 0 && !together) + Int(own_training > 0);
    const double stopped = own_inference + own_training + pause + renewal + double(stops) * refill;
    const double regular = std::max(transfer, busiest);
    double least = std::max({std::max(generation, rollouts[BUSY]) + stopped, regular, links});
    least = std::max({least, generation + own_inference + own_training, (critic + valuing) / double(batches)});
    const double arrival = inference + actor + transfer;
    return least_period(least, regular, stopped, batches, arrival, inference, own_inference, own_training, pause,
                        refill, renewal, rollouts[WHOLE], rollouts[ALONE], rollouts[SHARED], rollouts[QUEUED]);
}
