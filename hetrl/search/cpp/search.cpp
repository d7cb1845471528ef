// What Python calls: the functions that `hetrl.search.core.functions` declares, each defined under its name, and those
// of formulas.h. `hetrl.search.core.build` compiles this file; it writes records.h (named tuples, constants,
// prototypes) from the Python sources.

#include "evolve.h"
#include "ilp_space.h"
