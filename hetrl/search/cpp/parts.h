// What a task costs and needs, as `hetrl.search.core.workspace` holds it, and what crosses between sites, which passes
// gateways at the best-connected nodes: `hetrl.cost.network`.
#pragma once

#include <utility>

#include "records.h"

// Forget what a task costs and needs.
inline void clear_task(Int task, const Parts& parts) {
    parts.seconds[task] = INFINITE;
    parts.scoring[task] = 0.0;
    parts.switch_seconds[task] = 0.0;
    fill(parts.resident_gb[task], 0.0);
    fill(parts.peak_gb[task], 0.0);
    fill(parts.host_gb[task], 0.0);
    fill(parts.runs[task], Int(0));
    parts.links[task] = 0;
}

// Add to what a training sends over a direction between sites: in its steps, and ahead of them for scoring the batch.
inline void add_bytes(Int task, Int direction, double moved, double scored, const Parts& parts) {
    Int& links = parts.links[task];
    Int d = 0;
    while (d < links && parts.direction[task][d] != direction) {
        ++d;
    }
    if (d == links) {
        parts.direction[task][d] = direction;
        parts.direction_bytes[task][d] = parts.scored_bytes[task][d] = 0.0;
        ++links;
    }
    parts.direction_bytes[task][d] += moved + scored;
    parts.scored_bytes[task][d] += scored;
}

// Return whether a training uses a direction.
inline bool uses(Int task, Int direction, const Parts& parts) {
    for (Int d = 0; d < parts.links[task]; ++d) {
        if (parts.direction[task][d] == direction) {
            return true;
        }
    }
    return false;
}

// Take note of a device of a class: the fullest one counts.
inline void hold(Int task, Int kind, double resident, double peak, double host, const Parts& parts) {
    parts.resident_gb[task][kind] = std::max(parts.resident_gb[task][kind], resident);
    parts.peak_gb[task][kind] = std::max(parts.peak_gb[task][kind], peak);
    parts.host_gb[task][kind] = std::max(parts.host_gb[task][kind], host);
}

// Return the expected tokens of the longest of so many sequences, rounded up to whole ones.
inline double longest_tokens(double samples, const Tables& tables) {
    return tables.training.longest[Int(std::ceil(samples))];
}

// The gateways of sites, of whose classes those count that were noted.
class Gateways {
  public:
    explicit Gateways(const Tables& tables)
        : tables_(tables), uplink_(tables.sites, INFINITE), card_(tables.sites, INFINITE) {}

    void note(Int kind) {
        const NetworkTables& network = tables_.network;
        const Int site = tables_.site[kind];
        if (std::pair(network.uplink[kind], network.nic[kind]) < std::pair(uplink_[site], card_[site])) {
            uplink_[site] = network.uplink[kind];
            card_[site] = network.nic[kind];
        }
    }

    // Return the seconds per byte of the uplink of a site's gateway, and of its network card.
    double uplink(Int site) { return uplink_[site]; }
    double card(Int site) { return card_[site]; }

    // Return those of the path between two sites.
    double path(Int source, Int target) {
        return std::max({tables_.network.link_byte[source][target], uplink_[source], uplink_[target]});
    }

  private:
    const Tables& tables_;
    Local<double> uplink_, card_;
};

// Transfers between sites that go on at the same time.
class Crossing {
  public:
    Crossing(Gateways& gateways, Int sites) : gateways_(gateways), leaving_(sites, 0.0), arriving_(sites, 0.0) {}

    // Add so many bytes on a path, which has the delay ahead of them.
    void add(Int source, Int target, double bytes, double delay) {
        leaving_[source] += bytes;
        arriving_[target] += bytes;
        seconds_ =
            std::max({seconds_, delay + bytes * gateways_.path(source, target),
                      leaving_[source] * gateways_.uplink(source), arriving_[target] * gateways_.uplink(target)});
    }

    // Return their time: of the slowest path, or of the slowest uplink with all that leaves its site, or arrives.
    double seconds() const { return seconds_; }

    // Return the time of all that a site's gateway passes on its network card.
    double card_seconds(Int site) {
        const double bytes = std::max(leaving_[site], arriving_[site]);
        return bytes > 0 ? bytes * gateways_.card(site) : 0.0;
    }

  private:
    Gateways& gateways_;
    Local<double> leaving_, arriving_;
    double seconds_ = 0.0;
};
