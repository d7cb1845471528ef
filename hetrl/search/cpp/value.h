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

// The seconds of an iteration's tasks: of generation; by groups of inferences, with scoring where it is one, and of
// trainings; of scoring beside inferences; of the critic's inference with what its devices score behind it; from the
// end of the inferences until actor and critic are trained.
struct TaskSeconds {
    double generation;
    Local<double> inferences, trainings;
    double scoring, valuing, actor, critic;
};

inline TaskSeconds task_seconds(const View& x, const Tables& tables, const Room& room, const Parts& parts) {
    const auto seconds = [&](Int task) { return room.seconds[task] + parts.switch_seconds[task]; };
    TaskSeconds found{seconds(tables.generation), {tables.tasks, 0.0}, {tables.tasks, 0.0}, 0.0, 0.0, 0.0, 0.0};
    const Int valuing = tables.takes.size() > 1 ? tables.takes[1] : -1;
    found.valuing = valuing < 0 ? 0.0 : seconds(valuing);
    const Int trainer = tables.trainer;
    // `workload.scores_beside_inferences`
    const bool beside = tables.staleness == 0 || x.group[trainer] != x.group[tables.generation];
    for (Int task = 0; task < tables.tasks; ++task) {
        if (tables.is_training[task]) {
            const double scoring = beside ? room.scoring[task] : 0.0;
            const bool waits = tables.kl_in_reward && !beside && x.group[task] != x.group[trainer];
            found.trainings[x.group[task]] += waits ? room.scoring[trainer] : 0.0;
            found.scoring += scoring;
            found.valuing += valuing >= 0 && x.group[task] == x.group[valuing] ? scoring : 0.0;
            found.inferences[x.group[task]] += scoring;
            found.trainings[x.group[task]] += seconds(task) - scoring;
        } else if (tables.is_inference[task]) {
            found.inferences[x.group[task]] += seconds(task);
        }
    }
    found.actor = seconds(trainer) - found.scoring;
    if (tables.trained.size() > 1) {
        found.critic = found.trainings[x.group[tables.trained[1]]];
    }
    return found;
}

// The versions of the models, alone, and all that crosses the busiest link.
struct Versions {
    Sync actor, critic;
    double links;
};

// Return the seconds of an iteration whose versions give way to trainings.
inline double seconds_of(TaskSeconds& tasks, const Versions& alone, const TrainingsAhead& ahead, const View& x) {
    const Tables& tables = ahead.tables;
    const Sync actor = give_way(0, alone.actor, ahead);
    double critic = 0.0, transfer = actor.transfer(), links = std::max(alone.links, transfer);
    if (tables.takes.size() > 1) {
        const Sync own = give_way(1, alone.critic, ahead), behind = critic_behind(actor, own, ahead);
        const double lead = tasks.critic - tasks.actor;
        const double travels = behind_seconds(own.transfer(), behind.transfer(), lead);
        critic = tasks.critic + travels + behind.pause;
        links = std::max(links, travels);
        if (tables.staleness > 0) {
            transfer = shared_transfer_seconds(transfer, own.transfer(), travels, lead);
        }
    }
    return iteration_seconds(tasks.generation, tasks.inferences.all(), tasks.trainings.all(),
                             x.group[tables.generation], ahead.parts.rollouts, tasks.actor, transfer, actor.pause,
                             critic, tasks.valuing, links, tables.staleness);
}

// Return what the next batch's trainings send: `hetrl.cost.iteration._trainings_ahead`.
inline TrainingsAhead trainings_ahead(double period, TaskSeconds& tasks, const View& x, const Tables& tables,
                                      const Parts& parts) {
    const double inference = *std::max_element(tasks.inferences.begin(), tasks.inferences.end());
    const double training = *std::max_element(tasks.trainings.begin(), tasks.trainings.end());
    const double own = tasks.inferences[x.group[tables.trained[0]]], scoring = tasks.scoring;
    const double begins = std::max(period + own - scoring - inference - tasks.actor, 0.0);
    const double steps = std::max(period - tasks.actor, begins + scoring);
    return {{begins, steps}, {scoring, training}, tables, parts, false, scoring > 0};
}

// Return the seconds between two weight versions: `hetrl.cost.iteration.settled_seconds`.
inline double plan_seconds(const View& x, const Tables& tables, const Room& room, const Parts& parts) {
    TaskSeconds tasks = task_seconds(x, tables, room, parts);
    Versions alone{sync_seconds(0, x, tables, parts), {}, 0.0};
    if (tables.takes.size() > 1) {
        alone.critic = sync_seconds(1, x, tables, parts);
    }
    if (tables.takes.size() > 1 || tables.staleness > 0) {  // otherwise all that crosses does so one after the other
        alone.links = busiest_link(tables, parts);
    }
    const auto following = [&](double period) {
        return seconds_of(tasks, alone, trainings_ahead(period, tasks, x, tables, parts), x);
    };
    const double first = seconds_of(tasks, alone, {{}, {}, tables, parts, true, false}, x);
    Int crossing = 0;
    for (Int task = 0; task < tables.tasks; ++task) {
        crossing += parts.links[task];
    }
    if (tables.staleness == 0 || crossing == 0 || std::isinf(first)) {
        return first;
    }
    const double second = following(first);
    if (second <= first || std::isinf(second)) {
        return second;
    }
    return settled_seconds(first, second, following(second));
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
