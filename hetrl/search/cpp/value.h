// The value of a complete plan: its tasks' parts put together, with memory, links and the objective's bounds checked.
//
//     parts of every task that is to be valued anew       training_value.h, serving_value.h
//     memory of each class, links between used sites      memory_excess, all_joined
//     trainings that share directions are slowed          slow_down
//     weight synchronisation and the iteration            hetrl.cost.weight_sync, hetrl.cost.iteration
//     what the plan is chosen for                         objective_value.h
//
// Memory is bounded by class: a device of a class counts as holding the fullest stage that each task of its group has
// on the class. So what fits here fits on every device; a plan whose tasks keep clear of each other inside a class may
// fit although it does not here.
#pragma once

#include "objective_value.h"
#include "serving_value.h"
#include "training_value.h"

constexpr double NOT_CARRIED = 100.0;  // excess of a task that its devices do not carry at all

// Fill the parts of one task, and its cohorts or shares in the workspace. Return a training's number of cohorts; for
// another task `VALUED`, or the row that must be filled first.
Int value_task(Int task, const Genes& vector, const Tables& tables, const Room& room, const Parts& parts) {
    const View x = view(vector, tables);
    const Genes own = x.devices[x.group[task]];
    if (tables.is_training[task]) {
        return value_training(task, own, x.classes[task], x.choice[task], tables, room.cohorts, parts);
    }
    return value_serving(task, own, x.classes[task], x.choice[task], tables, room.shares, parts);
}

// Return by what share device and host memory are exceeded, summed over tasks and classes; 0 where all fits.
inline double memory_excess(const View& x, const Tables& tables, const Parts& parts) {
    double excess = 0.0;
    for (Int kind = 0; kind < tables.classes; ++kind) {
        double worst = 0.0, total = 0.0;
        for (Int g = 0; g < tables.tasks; ++g) {
            const Int owned = x.devices[g][kind];
            if (owned == 0) {
                continue;
            }
            double resident = 0.0, host = 0.0;
            for (Int task = 0; task < tables.tasks; ++task) {
                if (x.group[task] == g) {
                    resident += parts.resident_gb[task][kind];
                    host += parts.host_gb[task][kind];
                }
            }
            for (Int task = 0; task < tables.tasks; ++task) {
                if (x.group[task] == g && parts.runs[task][kind] > 0) {
                    const double needed = parts.peak_gb[task][kind] + resident - parts.resident_gb[task][kind];
                    excess += std::max(needed / tables.usable_gb[kind] - 1, 0.0);
                }
            }
            worst = std::max(worst, host);
            total += host * double(owned);
        }
        const double needed = std::min(worst * double(tables.per_node[kind]), total);
        excess += std::max(needed / tables.node_gb[kind] - 1, 0.0);
    }
    return excess;
}

// Return whether the controller's site reaches every used one, and a training's sites and weights each other.
inline bool all_joined(const Tables& tables, const Parts& parts) {
    const auto& linked = tables.network.linked;
    const Int lead = tables.site[parts.stage_kind[0][0]];
    for (Int kind = 0; kind < tables.classes; ++kind) {
        const Int site = tables.site[kind];
        for (Int task = 0; task < tables.tasks; ++task) {
            if (parts.runs[task][kind] == 0) {
                continue;
            }
            if (!linked[lead][site]) {
                return false;
            }
            for (Int m = 0; m < tables.takes.size(); ++m) {
                for (Int i = 0; task == tables.takes[m] && i < MAX_STAGES; ++i) {
                    const Int stage = parts.stage_kind[m][i];
                    if (stage >= 0 && !linked[tables.site[stage]][site]) {
                        return false;
                    }
                }
            }
            for (Int other = 0; tables.is_training[task] && other < kind; ++other) {
                if (parts.runs[task][other] > 0 && !linked[tables.site[other]][site]) {
                    return false;
                }
            }
        }
    }
    return true;
}

// Return whether two tasks use the same direction between sites.
inline bool meet(Int task, Int other, const Parts& parts) {
    for (Int d = 0; d < parts.links[task]; ++d) {
        if (uses(other, parts.direction[task][d], parts)) {
            return true;
        }
    }
    return false;
}

// Value trainings of different groups anew that use the same directions between sites: they begin together, each with
// half of a link, and what is left of one when the first has ended has the link to itself.
inline void slow_down(const Genes& vector, const Tables& tables, const Room& room, const Parts& parts) {
    const View x = view(vector, tables);
    Local<double> slowed(tables.tasks, INFINITE);
    double first = INFINITE;
    for (Int task = 0; task < tables.tasks; ++task) {
        for (Int other = 0; other < tables.tasks; ++other) {
            if (tables.is_training[task] && tables.is_training[other] && x.group[task] != x.group[other] &&
                meet(task, other, parts)) {
                const Int found = value_task(task, vector, tables, room, parts);
                const Training training = laid_out(task, x.choice[task], tables, found, room.cohorts);
                const TrainingSeconds seconds = training_seconds(training, room.cohorts, parts, other, false);
                slowed[task] = seconds.all - seconds.scoring;
                first = std::min(first, slowed[task]);
            }
        }
    }
    for (Int task = 0; first < INFINITE && task < tables.tasks; ++task) {
        if (slowed[task] < INFINITE) {
            const double scoring = parts.scoring[task], alone = parts.seconds[task] - scoring;
            room.seconds[task] = scoring + shared_seconds(first, slowed[task], alone);
        }
    }
}

// Return the time of all that crosses the busiest link in an iteration, in one direction: trainings and weights.
inline double busiest_link(const Tables& tables, const Parts& parts) {
    Local<double> load(tables.sites * tables.sites, 0.0);
    for (Int task = 0; task < tables.tasks; ++task) {
        for (Int d = 0; d < parts.links[task]; ++d) {
            load[parts.direction[task][d]] += parts.direction_bytes[task][d];
        }
    }
    for (Int m = 0; m < tables.trained.size(); ++m) {
        each_route(version_of(m, tables, parts), tables,
                   [&](Int source, Int target, double moved) { load[source * tables.sites + target] += moved; });
    }
    double slowest = 0.0;
    for (Int a = 0; a < tables.sites; ++a) {
        for (Int b = 0; b < tables.sites; ++b) {
            slowest = std::max(slowest, load[a * tables.sites + b] * tables.network.link_byte[a][b]);
        }
    }
    return slowest;
}

// Return the seconds between two weight versions: `hetrl.cost.iteration.plan_seconds`.
inline double plan_seconds(const View& x, const Tables& tables, const Room& room, const Parts& parts) {
    const Sync sync = sync_seconds(0, x, tables, parts);
    const double generation = room.seconds[tables.generation] + parts.switch_seconds[tables.generation];
    Local<double> inferences(tables.tasks, 0.0), trainings(tables.tasks, 0.0), scorings(tables.tasks, 0.0);
    for (Int task = 0; task < tables.tasks; ++task) {
        const double seconds = room.seconds[task] + parts.switch_seconds[task];
        if (tables.is_training[task]) {
            const bool beside = tables.staleness == 0 || x.group[task] != x.group[tables.generation];
            const double scoring = beside ? room.scoring[task] : 0.0;  // `workload.scores_beside_inferences`
            scorings[x.group[task]] += scoring;
            inferences[x.group[task]] += scoring;
            trainings[x.group[task]] += seconds - scoring;
        } else if (tables.is_inference[task]) {
            inferences[x.group[task]] += seconds;
        }
    }
    double critic = 0.0, valuing = 0.0, links = 0.0, transfer = sync.transfer();
    if (tables.staleness > 0) {
        links = std::max(busiest_link(tables, parts), sync.transfer());
    }
    if (tables.takes.size() > 1) {
        const Sync alone = sync_seconds(1, x, tables, parts);
        const Sync behind = critic_behind(sync, alone, tables, parts);
        critic = behind.transfer() + behind.pause;
        valuing = room.seconds[tables.takes[1]] + parts.switch_seconds[tables.takes[1]];
        valuing += scorings[x.group[tables.takes[1]]];
        links = std::max(links, behind.transfer());
        if (tables.staleness > 0) {
            transfer = shared_transfer_seconds(transfer, alone.transfer(), behind.transfer());
        }
    }
    return iteration_seconds(generation, inferences.all(), trainings.all(), x.group[tables.generation], parts.rollouts,
                             transfer, sync.pause, critic, valuing, links, tables.staleness);
}

// Set `room.result` to what the objective wants least and the seconds of an iteration; see
// `hetrl.search.core.functions.value`.
Int value(const Genes& vector, const Flags& stale, const Tables& tables, const Room& room, const Parts& parts) {
    const View x = view(vector, tables);
    for (Int task = 0; task < tables.tasks; ++task) {
        if (!stale[task]) {
            continue;
        }
        const Int row = value_task(task, vector, tables, room, parts);
        if (row != VALUED && !tables.is_training[task]) {
            return row;
        }
        stale[task] = false;
    }
    double missing = memory_excess(x, tables, parts);
    for (Int task = 0; task < tables.tasks; ++task) {
        missing += std::isfinite(parts.seconds[task]) ? 0.0 : NOT_CARRIED;
    }
    if (missing == 0.0 && !all_joined(tables, parts)) {  // where nothing lies, no site is known
        missing = NOT_CARRIED;
    }
    room.result[0] = UNFIT * (1 + missing);
    room.result[1] = INFINITE;
    if (missing == 0.0) {
        copy(parts.seconds, room.seconds);
        copy(parts.scoring, room.scoring);
        slow_down(vector, tables, room, parts);
        const double seconds = plan_seconds(x, tables, room, parts);
        const Found found = objective_value(seconds, x, tables, parts);
        // below UNFIT however large the excess
        room.result[0] = found.excess == 0.0 ? found.value : INFEASIBLE * (1 + found.excess / (1 + found.excess));
        room.result[1] = seconds;
    }
    return VALUED;
}
