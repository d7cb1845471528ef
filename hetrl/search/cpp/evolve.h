// Steady-state evolution of one population: tournament, mutation, replace the worst.
//
//     repeat `budget` times:
//         child = mutate(the better of two drawn from the population)
//         value it, unless a plan like it has been valued before
//         replace the worst of the population if the child is better
//
// With a temperature the candidates are chains of simulated annealing instead: a child is of any one, and replaces
// that. Chains of neighbouring temperatures may change places (`exchange`).
//
// A set of hashes remembers all plans that were valued: what is met again costs nothing and does not count.
#pragma once

#include "mutate.h"
#include "value.h"

// Return a hash of what a vector says: genes that have no effect do not count. FNV-1a (Fowler, Noll, Vo).
inline Word hash_vector(const Genes& x, const Tables& tables) {
    const auto [group, devices, classes, choice] = view(x, tables);
    Word state = 14695981039346656037ULL;
    const auto mix = [&state](Int value) { state = (state ^ Word(value)) * 1099511628211ULL; };
    for (Int task = 0; task < tables.tasks; ++task) {
        const bool training = tables.is_training[task];
        const Genes own = devices[group[task]], genes = choice[task];
        mix(group[task]);
        for (Int gene = 0; gene < CHOICES; ++gene) {
            if (gene != USED || !training) {
                mix(genes[gene]);
            }
        }
        const Int end = training ? genes[USED] : tables.classes;
        for (Int position = 0; position < end; ++position) {
            const Int kind = training ? classes[task][position] : position;
            if (can_use(task, kind, own, tables)) {
                mix(kind);
                mix(own[kind]);
                mix(classes[task][position]);
            }
        }
        mix(255);  // ends the task: how many numbers it has differs
    }
    return state | 1;  // 0 is an empty slot of the set
}

// See `hetrl.search.core.functions.remember`. Open addressing, 0 is empty; a full set forgets.
bool remember(const Genes& x, const Tables& tables, const Hashes& seen) {
    constexpr Int TRIES = 32;
    const Word mark = hash_vector(x, tables);
    Int slot = Int(mark >> 20) % (seen.size() - 1);
    for (Int tries = 0; tries < TRIES; ++tries) {
        if (seen[slot] == mark) {
            return false;
        }
        if (seen[slot] == 0) {
            break;
        }
        slot = (slot + 1) % (seen.size() - 1);
    }
    seen[slot] = mark;
    return true;
}

// Where two plans take as long as each other, the one whose tasks take less in all goes before: its value counts a
// share of their seconds on top.
constexpr double GUIDE = 0.1;
// Places in `Population.counters`.
constexpr Int CANDIDATES = 0, CHILDREN = 1, WAITS = 2, PARENT = 3;

inline Int room_for(const Population& population) {
    return population.value.size() - 1;
}

inline bool is_full(const Population& population) {
    return population.counters[CANDIDATES] == room_for(population);
}

// Draw a parent: the better of two, or in annealing any one.
inline Int draw_parent(const Population& population, bool annealing, const Hashes& state) {
    const Int a = below(state, room_for(population));
    if (annealing) {
        return a;
    }
    const Int b = below(state, room_for(population));
    return population.value[a] <= population.value[b] ? a : b;
}

// Make the next child and bring its parent's parts along; false where it is a known plan.
inline bool next_child(const Population& population, double regrouped, double temperature, const Hashes& state,
                       const Tables& tables, const Parts& parts, const Hashes& seen) {
    const Genes& child = population.child;
    if (!is_full(population)) {
        std::copy_n(population.x[0].begin(), tables.tasks, child.begin());
        draw(child, state, tables);
        fill(population.stale, true);
        return remember(child, tables, seen);
    }
    const Int parent = draw_parent(population, temperature > 0, state);
    population.counters[PARENT] = parent;
    copy(population.x[parent], child);
    fill(population.stale, false);
    if (uniform(state) < regrouped) {
        regroup(child, population.stale, state, tables);
    } else {
        mutate(child, population.stale, state, tables);
    }
    if (!remember(child, tables, seen)) {
        return false;
    }
    copy(population.floats[parent], parts.floats);
    copy(population.ints[parent], parts.ints);
    return true;
}

// Put the child in a candidate's place.
inline void enter(const Population& population, Int place, double found, const Parts& parts) {
    copy(population.child, population.x[place]);
    population.value[place] = found;
    copy(parts.floats, population.floats[place]);
    copy(parts.ints, population.ints[place]);
}

// Add the child while there is room; then let it replace the worst if it is no worse.
inline void admit(const Population& population, double found, const Parts& parts) {
    if (!is_full(population)) {
        enter(population, population.counters[CANDIDATES], found, parts);
        ++population.counters[CANDIDATES];
        return;
    }
    const double* first = population.value.begin();
    const Int worst = std::max_element(first, first + room_for(population)) - first;
    if (found <= population.value[worst]) {
        enter(population, worst, found, parts);
    }
}

// Return a chain's own temperature: steps up to the given one, the first chain's least.
inline double own_temperature(Int chain, double temperature, const Population& population) {
    return temperature * double(chain + 1) / double(room_for(population));
}

// Let the child replace its parent if it is better, or with the probability exp(-rise / T) of simulated annealing
// (Kirkpatrick, Gelatt, Vecchi, Science 220, 1983); `rise` is relative to the parent. The best child of all is kept
// behind the candidates.
inline void admit_annealed(const Population& population, double found, double temperature, const Hashes& state,
                           const Parts& parts) {
    const Int parent = population.counters[PARENT], best = room_for(population);
    const double own = own_temperature(parent, temperature, population);
    if (found < population.value[best]) {
        enter(population, best, found, parts);
    }
    if (found <= population.value[parent] * (1 - own * std::log(uniform(state)))) {
        enter(population, parent, found, parts);
    }
}

// See `hetrl.search.core.functions.exchange`. Neighbours a (colder) and b change places with the probability
// exp((1 / T_a - 1 / T_b) (E_a - E_b)) of replica exchange (Swendsen, Wang, Phys. Rev. Lett. 57, 1986; Hukushima,
// Nemoto, J. Phys. Soc. Jpn. 65, 1996); E is the logarithm of the value, for a rise is relative.
void exchange(const Population& population, double temperature, const Hashes& state) {
    for (Int chain = 0; chain + 1 < population.counters[CANDIDATES]; ++chain) {
        const Int next = chain + 1;
        const double colder = own_temperature(chain, temperature, population);
        const double hotter = own_temperature(next, temperature, population);
        const double gained = std::log(population.value[chain] / population.value[next]);
        if (std::log(uniform(state)) <= (1 / colder - 1 / hotter) * gained) {
            std::swap(population.value[chain], population.value[next]);
            std::swap_ranges(population.x[chain].begin(), population.x[chain].end(), population.x[next].begin());
            std::swap_ranges(population.floats[chain].begin(), population.floats[chain].end(),
                             population.floats[next].begin());
            std::swap_ranges(population.ints[chain].begin(), population.ints[chain].end(),
                             population.ints[next].begin());
        }
    }
}

// See `hetrl.search.core.functions.evolve`.
Int evolve(const Population& population, Int budget, double regrouped, double temperature, const Hashes& state,
           const Tables& tables, const Room& room, const Parts& parts, const Hashes& seen) {
    // a population that has converged, or a small problem, has hardly a child that was not met before
    for (Int tries = 0; population.counters[CHILDREN] < budget && tries < 20 * budget;) {
        if (!population.counters[WAITS]) {
            ++tries;
            if (!next_child(population, regrouped, temperature, state, tables, parts, seen)) {
                continue;
            }
            population.counters[WAITS] = 1;
        }
        const Int row = value(population.child, population.stale, tables, room, parts);
        if (row != VALUED) {
            return row;
        }
        population.counters[WAITS] = 0;
        ++population.counters[CHILDREN];
        double guide = room.result[0];
        if (guide < INFEASIBLE) {
            double all = 0.0;
            for (Int task = 0; task < tables.tasks; ++task) {
                all += room.seconds[task] + parts.switch_seconds[task];
            }
            guide *= 1 + GUIDE * all / room.result[1];
        }
        if (temperature > 0 && is_full(population)) {
            admit_annealed(population, guide, temperature, state, parts);
        } else {
            admit(population, guide, parts);
        }
    }
    return VALUED;
}
