// What a task costs and needs, as `hetrl.search.core.workspace` holds it.
#pragma once

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
