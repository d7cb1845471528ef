// The cost model's formulas of numbers: see formulas.py in `hetrl/cost`, which has the same functions in the same order
// with their documentation and sources. records.h declares them, so that a test can call each one; a list that Python
// returns is written into the last argument here, and its length is returned.
#pragma once

#include "records.h"

double window_seconds(double trip, Int stages, double slowest, double slowest_forward, double slowest_back, Int alone,
                      double rest, Int micro_batches) {
    const Int apart = std::min(alone, micro_batches - 1);
    const Int trips = (micro_batches - 1 - apart) / stages, left = (micro_batches - 1 - apart) % stages;
    const double begin = std::max(double(apart) * slowest_forward - rest, 0.0);
    return double(trips) * trip + double(left) * std::min(slowest, trip / double(stages)) +
           double(apart) * slowest_back + begin;
}

double following_seconds(const Floats& both, const Floats& back, const Floats& hops, const Floats& transfers,
                         Int micro_batches) {
    const Int stages = both.size();
    double found = 0.0, rest[MAX_STAGES], onwards = 0.0;
    for (Int i = stages - 1; i >= 0; --i) {
        rest[i] = onwards + 2 * hops[i];
        onwards = rest[i] + both[i];
    }
    for (Int first = 0; first < stages; ++first) {
        double round_trip = 0.0, slowest = 0.0, slowest_forward = 0.0, slowest_back = 0.0;
        for (Int last = first; last < stages; ++last) {
            const Int count = last - first + 1;
            const double wire = last > first ? transfers[last - 1] : 0.0;
            slowest = std::max({slowest, both[last], wire});
            slowest_forward = std::max({slowest_forward, both[last] - back[last], wire});
            slowest_back = std::max({slowest_back, back[last], wire});
            const double seconds = window_seconds(round_trip + both[last], count, slowest, slowest_forward,
                                                  slowest_back, stages - 1 - last, rest[last], micro_batches);
            found = std::max(found, seconds);
            round_trip += both[last] + 2 * hops[last];
        }
    }
    return found;
}

double pipeline_seconds(const Floats& both, const Floats& back, const Floats& hops, const Floats& transfers,
                        Int micro_batches) {
    double filling = 0.0;
    for (Int i = 0; i < both.size(); ++i) {
        filling += both[i] + 2 * hops[i];
    }
    return filling + following_seconds(both, back, hops, transfers, micro_batches);
}

double overlapped(double products, double memory) {
    return std::sqrt(products * products + memory * memory);
}

double forward_seconds(const Floats& forward, const Floats& hops, const Floats& transfers, Int micro_batches,
                       double call) {
    double filling = 0.0, period = 0.0;
    for (Int i = 0; i < forward.size(); ++i) {
        filling += forward[i] + hops[i];
        period = std::max({period, forward[i], transfers[i]});
    }
    const double rest = filling > period ? filling - period : 0.0;
    return call + double(micro_batches) * period + rest;
}

Int micro_batch_count(double samples, double per_sample) {
    return std::max(Int(1), Int(std::ceil(samples * per_sample * (1 - ROUNDING))));
}

double micro_batch_tokens(double tokens, Int micro_batches, Int stages, double fullest) {
    return tokens / double(micro_batches) * (stages > 1 && micro_batches > 1 ? fullest : 1.0);
}

double uneven(double longest, double tokens) {
    return std::max(1.0, longest / tokens);
}

Int split_layers(const Floats& layer, const Floats& beside, const Floats& capacity, Int layers, const Ints& found) {
    const Int stages = layer.size();
    double room = 0.0;
    for (Int i = 0; i < stages; ++i) {
        if (capacity[i] < 1) {
            return 0;
        }
        room += std::min(capacity[i], double(layers));
        found[i] = 1;
    }
    if (room < double(layers)) {
        return 0;
    }
    for (Int left = layers - stages; left > 0; --left) {
        Int chosen = -1;
        double least = INFINITE;
        for (Int i = 0; i < stages; ++i) {
            const double more = double(found[i] + 1), ends = beside[i] + more * layer[i];
            if (more <= capacity[i] && ends < least) {
                chosen = i;
                least = ends;
            }
        }
        ++found[chosen];
    }
    return stages;
}

double ring_reduce_bytes(Int ranks, double gradient, bool sharded) {
    return double(ranks - 1) / double(ranks) * gradient * double(sharded ? 1 : 2);
}

double ring_gather_bytes(Int ranks, double parameters, bool sharded) {
    return sharded ? double(ranks - 1) / double(ranks) * parameters : 0.0;
}

double wan_reduce_bytes(Int receivers, Int ranks, Int sites, double gradient, bool sharded) {
    if (sharded) {
        return gradient * double(receivers) / double(ranks);
    }
    return 2.0 * gradient / double(sites);
}

double wan_gather_bytes(Int senders, Int ranks, double parameters, bool sharded) {
    return sharded ? parameters * double(senders) / double(ranks) : 0.0;
}

double ring_latency(const Ints& members, const Floats& delays, double between) {
    double local = 0.0;
    for (Int site = 0; site < members.size(); ++site) {
        local = std::max(local, double(2 * (members[site] - 1)) * delays[site]);
    }
    return local + (members.size() > 1 ? 2.0 * between : 0.0);
}

double rings_seconds(double lanes, double interfaces, double links, double latency) {
    return std::max({lanes, interfaces, links}) + latency;
}

double exposed_seconds(double reduction, double backward, double buckets) {
    return std::max(reduction / buckets, reduction - backward * (1 - 1 / buckets));
}

double shared_seconds(double first, double slowed, double alone) {
    return slowed <= first ? slowed : first + (1 - first / slowed) * alone;
}

double bucket_count(double parameters, Int replicas) {
    return std::max(1.0, parameters / std::max(40e6, 1e6 * double(replicas)));
}

double steady_seconds(const Ints& units, const Floats& busy) {
    Int all = 0;
    double rate = 0.0;
    for (Int server = 0; server < units.size(); ++server) {
        all += units[server];
        rate += double(units[server]) / busy[server];
    }
    return double(all) / rate;
}

double interface_bytes(double total, double held, bool generates, Int copies) {
    return std::max(generates ? total - held : 0.0, held * double(copies));
}

Int deal_remainders(const Ints& remainders, Int size, Int nodes, const Ints& found) {
    const Int groups = remainders.size(), most = clamp(nodes, 0, groups);
    Local<Int> rooms(most, size);
    Local<bool> done(groups, false);
    fill(found, Int(-1));
    for (Int turn = 0; turn < groups; ++turn) {
        Int largest = -1;
        for (Int g = 0; g < groups; ++g) {
            if (!done[g] && (largest < 0 || remainders[g] > remainders[largest])) {
                largest = g;
            }
        }
        done[largest] = true;
        const Int rest = remainders[largest];
        if (rest == 0) {
            break;
        }
        Int place = 0;
        while (place < most && rooms[place] < rest) {
            ++place;
        }
        if (place < most) {
            rooms[place] -= rest;
            found[largest] = place;
        }
    }
    return groups;
}

Int held_devices(Int used, Int nodes, Int size, bool whole_nodes) {
    return whole_nodes ? nodes * size : used;
}

double price_per_hour(const Ints& held, const Floats& prices) {
    double price = 0.0;
    for (Int kind = 0; kind < held.size(); ++kind) {
        price += double(held[kind]) * prices[kind];
    }
    return price;
}

double price_of(double per_hour, double seconds) {
    return per_hour * seconds / HOUR;
}

double price_value(double per_hour, double seconds) {
    return price_of(per_hour, seconds) + TIE * seconds;
}

double result_seconds(double latest, Int steps, double seconds) {
    return latest + double(steps) * seconds;
}

double gpu_hours(Int held, double start, double end) {
    return double(held) * (end - start) / HOUR;
}

double share_beyond(double found, double limit) {
    return std::max(found / limit * (1 - ROUNDING) - 1, 0.0);
}
