"""The functions of the compiled core, `hetrl/search/cpp`: their types here are those of the C++ prototypes.

Arrays are changed in place. `state` is that of `workspace.seeded`. Where a row of `ServingTables.seconds` is missing
its index is returned instead of `VALUED`: fill it and call again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, wraps
from inspect import isfunction
from itertools import chain
from typing import Annotated, Any, TypeVar, get_origin

from hetrl.cost import cycle, formulas, objective
from hetrl.search.core import build, encoding, ilp_states, tables_serving, workspace
from hetrl.search.core.ilp_states import Fixed
from hetrl.search.core.records import (
    SCALARS,
    SEQUENCES,
    Flags1,
    Floats1,
    Floats2,
    Genes1,
    Genes2,
    Ints1,
    Ints2,
    Packed,
    Words1,
    array_struct,
    cpp_type,
    declare,
    hints_of,
    records_in,
)
from hetrl.search.core.tables import MAX_STAGES, Tables
from hetrl.search.core.workspace import Parts, Population, Room

Function = TypeVar("Function", bound=Callable[..., Any])

_functions: dict[str, Any] = {}
FORMULAS = {  # each function has its twin in formulas.h or cycle.h
    module.__name__.split(".")[-1]: tuple(one for one in vars(module).values() if isfunction(one))
    for module in (formulas, cycle)
}


def _compiled(function: Function) -> Function:
    """Let a function without a body be the core's of the same name."""
    _functions[function.__name__] = function

    @cache
    def prepared() -> tuple[Any, list[Callable[[Any], Any]]]:
        hints = dict(hints_of(function))
        found = getattr(library(), function.__name__)
        _, found.restype = SCALARS[hints.pop("return")]
        return found, [_converter(hint) for hint in hints.values()]

    @wraps(function)
    def call(*arguments: Any) -> Any:
        found, converters = prepared()
        return found(*[convert(argument) for convert, argument in zip(converters, arguments, strict=True)])

    return call  # type: ignore[return-value]


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return what turns an argument of this annotation into what ctypes passes on."""
    if get_origin(hint) is Annotated:
        make = array_struct(hint)
        return lambda array: ctypes.byref(make(array))
    if get_origin(hint) is Packed:
        return lambda packed: ctypes.byref(packed.struct)
    return SCALARS[hint][1]  # type: ignore[no-any-return]


@_compiled
def repair(x: Genes1, tables: Packed[Tables]) -> None:
    """Make a vector legal: every gene in its range, groups numbered in order, devices within the classes.

    A legal vector is left as it is.
    """


@_compiled
def draw(x: Genes1, state: Words1, tables: Packed[Tables]) -> None:
    """Draw all but the grouping of a vector."""


@_compiled
def mutate(x: Genes1, stale: Flags1, state: Words1, tables: Packed[Tables]) -> None:
    """Change a vector once, sometimes twice or more, but not its grouping; flag the touched tasks as stale."""


@_compiled
def regroup(x: Genes1, stale: Flags1, state: Words1, tables: Packed[Tables]) -> None:
    """Move a task to another group, or to one of its own with some of its group's devices; flag both groups' tasks."""


@_compiled
def remember(x: Genes1, tables: Packed[Tables], seen: Words1) -> bool:
    """Insert a vector into the set of those met; False where it, or one that says the same, was there."""


@_compiled
def value_task(task: int, x: Genes1, tables: Packed[Tables], room: Packed[Room], parts: Packed[Parts]) -> int:
    """Fill the parts of one task, and its cohorts or shares in the workspace.

    Return a training's number of cohorts; for another task `VALUED` or a missing row.
    """


@_compiled
def value(x: Genes1, stale: Flags1, tables: Packed[Tables], room: Packed[Room], parts: Packed[Parts]) -> int:
    """Set `room.result` to what the objective wants least and the seconds of an iteration.

    A plan that breaks a bound has the value `INFEASIBLE` and more, one that does not fit `UNFIT` and more (and infinite
    seconds): the farther from feasible the more. `stale` flags the tasks whose parts do not belong to the vector yet.
    Return `VALUED` or a missing row.
    """


@_compiled
def evolve(
    population: Packed[Population],
    budget: int,
    regrouped: float,
    temperature: float,
    state: Words1,
    tables: Packed[Tables],
    room: Packed[Room],
    parts: Packed[Parts],
    seen: Words1,
) -> int:
    """Value `budget` children, drawn at random until the population is full; return `VALUED` or a missing row.

    A share `regrouped` of the children change the grouping. With a temperature (a share of the value) the candidates
    are annealed. `population.counters[1]` counts the children. After a missing row call again with the same budget:
    the waiting child comes first.
    """


@_compiled
def exchange(population: Packed[Population], temperature: float, state: Words1) -> None:
    """Let chains that `evolve` anneals change places with their neighbours: the better one comes to the colder place.

    A worse one does so with the probability of replica exchange.
    """


@_compiled
def value_options(
    task: int,
    x: Genes1,
    genes: Genes2,
    place: Ints1,
    tables: Packed[Tables],
    room: Packed[Room],
    parts: Packed[Parts],
    out: Floats2,
) -> int:
    """Fill the numbers of a task's options (`ilp_states`) from row `place[0]` on, which counts them.

    Seconds are infinite where the devices do not carry the task. Return `VALUED` or a missing row.
    """


@_compiled
def undominated(rows: Floats2, order: Ints1, places: Ints1) -> int:
    """Set `places` to the rows, of those in `order`, that none before it is nowhere larger than; return how many."""


@_compiled
def fill_states(
    numbers: Floats2,
    first: Ints1,
    own_least: Floats1,
    rest_least: Floats1,
    fixed: Packed[Fixed],
    pool: Floats2,
    trace: Ints2,
    starts: Ints1,
) -> int:
    """Fill the pool with the states of every set of tasks on one allotment; return how many there are.

    `trace` has each state's parent and option; the states of set S are the rows `starts[S]` to `starts[S + 1]`.
    """


@_compiled
def choose_states(
    rest_least: Floats1,
    fixed: Packed[Fixed],
    pool: Floats2,
    noticed: Floats2,
    order: Ints1,
    starts: Ints1,
    places: Ints1,
) -> int:
    """Set `places` to the states that are columns, those of each set of tasks in a row; return how many there are.

    `noticed` has what other groups notice of each state, `order` the states of each set in the order to look at them.
    """


def _constants() -> dict[str, int | float]:
    """Return the numbers that both languages know by the same name."""
    named: dict[str, Any] = {}
    for module in (formulas, cycle, encoding, ilp_states, tables_serving, workspace):
        named |= {name: number for name, number in vars(module).items() if type(number) in (int, float)}
    named["MAX_STAGES"] = MAX_STAGES
    for kind in (objective.THROUGHPUT, objective.COST):
        named[f"FOR_{kind.upper()}"] = objective.KINDS.index(kind)
    return {name: number for name, number in named.items() if name.isupper()}


def _prototype(function: Any) -> str:
    hints = dict(hints_of(function))
    returned = hints.pop("return")
    if returned in SEQUENCES:  # written into a last argument
        hints["found"], returned = returned, int
    parameters = []
    for parameter, hint in hints.items():
        inner = hint.__args__[0] if get_origin(hint) is Packed else SEQUENCES.get(hint, hint)
        kind = cpp_type(inner) if inner in SCALARS else f"const {cpp_type(inner)}&"
        parameters.append(f"{kind} {parameter}")
    return f"{cpp_type(returned)} {function.__name__}({', '.join(parameters)});\n"


def header() -> str:
    """Return records.h: the constants, structs and prototypes of the core."""
    constants = [
        f"constexpr {'Int' if isinstance(number, int) else 'double'} {name} = {number!r};\n"
        for name, number in _constants().items()
    ]
    structs = dict.fromkeys(part for record in (Tables, Room, Parts, Population, Fixed) for part in records_in(record))
    prototypes = [_prototype(function) for function in (*_functions.values(), *chain(*FORMULAS.values()))]
    return "\n".join(
        [
            '// Written by `functions.py` from the Python sources.\n#pragma once\n\n#include "array.h"\n',
            "".join(constants),
            *map(declare, structs),
            '#pragma GCC visibility push(default)\nextern "C" {\n'
            + "".join(prototypes)
            + "}\n#pragma GCC visibility pop\n",
        ]
    )


@cache
def library() -> ctypes.CDLL:
    """Return the core, compiled if it is not yet (seconds). Raises HetrlError where there is no compiler."""
    return build.load(header())
