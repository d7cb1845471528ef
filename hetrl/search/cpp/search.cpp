// What Python calls: the functions of `hetrl.search.core.functions`, which has their documentation.
// `hetrl.search.core.build` compiles this file; it writes records.h (named tuples, constants, prototypes) from the
// Python sources.

#include "evolve.h"
#include "ilp_space.h"

void repair(const Genes& x, const Tables& tables) {
    repair_vector(x, tables);
}

void draw(const Genes& x, const Hashes& state, const Tables& tables) {
    draw_vector(x, state, tables);
}

void mutate(const Genes& x, const Flags& stale, const Hashes& state, const Tables& tables) {
    mutate_vector(x, stale, state, tables);
}

void regroup(const Genes& x, const Flags& stale, const Hashes& state, const Tables& tables) {
    regroup_vector(x, stale, state, tables);
}

bool remember(const Genes& x, const Tables& tables, const Hashes& seen) {
    return insert_hash(hash_vector(x, tables), seen);
}

Int value(const Genes& x, const Flags& stale, const Tables& tables, const Room& room, const Parts& parts) {
    return value_plan(view(x, tables), stale, tables, room, parts);
}

Int value_task(Int task, const Genes& x, const Tables& tables, const Room& room, const Parts& parts) {
    return value_one_task(task, view(x, tables), tables, room, parts);
}

Int evolve(const Population& population, Int budget, double regrouped, double temperature, const Hashes& state,
           const Tables& tables, const Room& room, const Parts& parts, const Hashes& seen) {
    return evolve_population(population, budget, regrouped, temperature, state, tables, room, parts, seen);
}

Int value_options(Int task, const Genes& x, const Genes2& genes, const Ints& place, const Tables& tables,
                  const Room& room, const Parts& parts, const Array<double, 2>& out) {
    return value_all_options(task, view(x, tables), genes, place, tables, room, parts, out);
}

Int undominated(const Array<double, 2>& rows, const Ints& order, const Ints& places) {
    return keep_undominated(rows, order, places);
}

Int fill_states(const Array<double, 2>& numbers, const Ints& first, const Floats& own_least, const Floats& rest_least,
                const Fixed& fixed, const Array<double, 2>& pool, const Array<Int, 2>& trace, const Ints& starts) {
    return fill_pool(numbers, first, own_least, rest_least, fixed, pool, trace, starts);
}

Int choose_states(const Floats& rest_least, const Fixed& fixed, const Array<double, 2>& pool,
                  const Array<double, 2>& noticed, const Ints& order, const Ints& starts, const Ints& places) {
    return choose_from_pool(rest_least, fixed, pool, noticed, order, starts, places);
}
