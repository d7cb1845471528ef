"""Each formula of the cost model in Python against its twin in the compiled core, with the same numbers."""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.search.core.build import SOURCES
from hetrl.search.core.functions import FORMULAS, library
from hetrl.search.core.records import SCALARS, SEQUENCES, array_struct, hints_of

Formula = Callable[..., Any]

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
positive = st.floats(1e-6, 1e6)
moved = st.one_of(st.just(0.0), st.floats(1.0, 1e12))
counts = st.integers(1, 4096)
flags = st.booleans()
leads = st.one_of(seconds, seconds.map(operator.neg))
rollouts = st.lists(positive, min_size=7, max_size=7)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Any, ...]:
    """Stages, some of them alike, their hops with and without delays, and micro-batches."""
    few = draw(st.lists(positive, min_size=1, max_size=3))
    both = draw(st.lists(st.sampled_from(few), min_size=1, max_size=8))
    hops = draw(st.lists(seconds, min_size=len(both) - 1, max_size=len(both) - 1))
    transfers = [*draw(st.lists(seconds, min_size=len(hops), max_size=len(hops))), 0.0]
    back = [stage * draw(st.floats(0.1, 0.9)) for stage in both]
    return both, back, [*hops, 0.0], transfers, draw(st.integers(1, 64))


@st.composite
def stages(draw: st.DrawFn) -> tuple[Any, ...]:
    """Seconds per layer and beside the layers, room, and layers that may be too many."""
    count = draw(st.integers(1, 8))
    few = st.sampled_from(draw(st.lists(positive, min_size=1, max_size=3)))
    room = [float(most) for most in draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))]
    layer, beside = (draw(st.lists(few, min_size=count, max_size=count)) for _ in range(2))
    return layer, beside, room, draw(st.integers(count, 100))


@st.composite
def windows(draw: st.DrawFn) -> tuple[Any, ...]:
    """A window of the stages of a pipeline, what is behind it, and micro-batches."""
    stages, alone, micro_batches = draw(st.integers(1, 8)), draw(st.integers(0, 7)), draw(st.integers(1, 1024))
    trip, slowest, forward, back, rest = (draw(seconds) for _ in range(5))
    return trip, stages, slowest, forward, back, alone, rest, micro_batches


@st.composite
def forwards(draw: st.DrawFn) -> tuple[Any, ...]:
    """Stages of a forward pass, their hops with and without delays, micro-batches; sometimes over a missing link."""
    forward = draw(st.lists(positive, min_size=1, max_size=8))
    sizes = {"min_size": len(forward) - 1, "max_size": len(forward) - 1}
    transfers = [*draw(st.lists(st.one_of(seconds, st.just(float("inf"))), **sizes)), 0.0]
    delays = [*draw(st.lists(seconds, **sizes)), 0.0]
    hops = [transfer + delay for transfer, delay in zip(transfers, delays, strict=True)]
    return forward, hops, transfers, draw(st.integers(1, 1024)), draw(seconds)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Any, ...]:
    """What an iteration is put together from, of one to six groups; sometimes over a link that is missing."""
    count = draw(st.integers(1, 6))
    inferences, trainings = (draw(st.lists(seconds, min_size=count, max_size=count)) for _ in range(2))
    own, transfer = draw(st.integers(0, count - 1)), draw(st.one_of(seconds, st.just(float("inf"))))
    rest = (draw(seconds), transfer, *(draw(seconds) for _ in range(4)), draw(st.integers(0, 8)))
    return draw(positive), inferences, trainings, own, draw(rollouts), *rest


@st.composite
def periods(draw: st.DrawFn) -> tuple[Any, ...]:
    """What a period must hold: generation runs in it for longer than samples share."""
    stopped, shared = draw(seconds), draw(seconds)
    least, regular = stopped + shared + draw(positive), draw(seconds)
    way = (draw(st.integers(2, 9)), *(draw(seconds) for _ in range(7)))
    return least, regular, stopped, *way, draw(positive), draw(positive), shared, draw(seconds)


@st.composite
def yields(draw: st.DrawFn) -> tuple[Any, ...]:
    """A transfer, and stretches of others, apart and in order, some of which take all of the wire."""
    now, begins, lasts, taken = 0.0, [], [], []
    for _ in range(draw(st.integers(1, 3))):
        begins.append(now + draw(seconds))
        lasts.append(draw(seconds))
        taken.append(lasts[-1] * draw(st.floats(0, 1)))
        now = begins[-1] + lasts[-1]
    return draw(seconds), begins, lasts, taken


@st.composite
def remainders(draw: st.DrawFn) -> tuple[Any, ...]:
    """Remainders of groups in nodes of a size, and how many nodes there are for them."""
    size = draw(st.integers(1, 16))
    return draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)), size, draw(st.integers(0, 8))


def pairs(one: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw two lists of one length."""
    both = st.lists(st.tuples(one, other), min_size=1, max_size=8)
    return both.map(lambda drawn: tuple(map(list, zip(*drawn, strict=True))))


CASES: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "window_seconds": windows(),
    "following_seconds": pipelines(),
    "pipeline_seconds": pipelines(),
    "overlapped": st.tuples(seconds, seconds),
    "forward_seconds": forwards(),
    "micro_batch_count": st.tuples(st.floats(0.1, 1e5), st.floats(0.01, 1)),
    "micro_batch_tokens": st.tuples(positive, counts, st.integers(1, 8), st.floats(1, 4)),
    "uneven": st.tuples(positive, positive),
    "split_layers": stages(),
    "ring_reduce_bytes": st.tuples(counts, moved, flags),
    "ring_gather_bytes": st.tuples(counts, moved, flags),
    "wan_reduce_bytes": st.tuples(counts, counts, counts, moved, flags),
    "wan_gather_bytes": st.tuples(counts, counts, moved, flags),
    "ring_latency": st.builds(lambda some, between: (*some, between), pairs(counts, seconds), seconds),
    "rings_seconds": st.tuples(seconds, seconds, seconds, seconds),
    "exposed_seconds": st.tuples(seconds, seconds, st.floats(1, 1e3)),
    "shared_seconds": st.tuples(positive, positive, seconds),
    "bucket_count": st.tuples(st.floats(0, 1e12), counts),
    "steady_seconds": pairs(counts, positive),
    "interface_bytes": st.tuples(moved, moved, flags, counts),
    "behind_seconds": st.tuples(seconds, seconds, leads),
    "shared_transfer_seconds": st.tuples(seconds, seconds, seconds, leads),
    "yielding_seconds": yields(),
    "settled_seconds": st.builds(lambda a, b, c: (a, a + b, max(a + b - c, 0.0)), positive, positive, seconds),
    "transfer_seconds": st.tuples(seconds, seconds, seconds),
    "overlap": st.tuples(seconds, seconds, seconds, seconds),
    "held_up": st.tuples(positive, seconds, seconds, seconds),
    "running_seconds": st.tuples(positive, st.integers(1, 9), *[seconds] * 7),
    "evenness": st.tuples(positive, seconds),
    "others_share": st.tuples(st.floats(0, 1), st.integers(2, 9)),
    "batch_seconds": periods().map(lambda drawn: (*drawn[:1], drawn[2], drawn[1], drawn[3], *drawn[-4:])),
    "least_period": periods(),
    "iteration_seconds": groups(),
    "deal_remainders": remainders(),
    "held_devices": st.tuples(counts, counts, counts, flags),
    "price_per_hour": pairs(st.integers(0, 4096), seconds),
    "price_of": st.tuples(seconds, seconds),
    "price_value": st.tuples(seconds, seconds),
    "result_seconds": st.tuples(seconds, counts, positive),
    "gpu_hours": st.tuples(counts, seconds, positive),
    "share_beyond": st.tuples(seconds, st.one_of(positive, st.just(float("inf")))),
}


def compiled(formula: Formula, *arguments: Any) -> Any:
    """Return what the compiled twin of a formula says."""
    hints = dict(hints_of(formula))
    returned = hints.pop("return")
    if returned in SEQUENCES:
        hints["found"], arguments = returned, (*arguments, [0] * len(arguments[0]))
    found = getattr(library(), formula.__name__)
    found.restype = SCALARS[int if returned in SEQUENCES else returned][1]
    kept = []  # the arrays must outlive the call
    passed = []
    for hint, argument in zip(hints.values(), arguments, strict=True):
        if hint in SEQUENCES:
            kept.append(np.array(argument, np.float64 if hint == Sequence[float] else np.int64))
            passed.append(ctypes.byref(array_struct(SEQUENCES[hint])(kept[-1])))
        else:
            passed.append(SCALARS[hint][1](argument))
    value = found(*passed)
    return kept[-1][:value].tolist() if returned in SEQUENCES else value


@pytest.mark.parametrize("formula", [*chain(*FORMULAS.values())], ids=lambda formula: formula.__name__)
def test_both_languages_say_the_same(formula: Formula) -> None:
    @settings(max_examples=300)
    @given(CASES[formula.__name__])
    def same(arguments: tuple[Any, ...]) -> None:
        expected = formula(*arguments)
        # a compiler may contract a product and a sum, which rounds once instead of twice
        assert compiled(formula, *arguments) == pytest.approx(expected, rel=1e-12, abs=0.0), formula.__name__

    same()


@pytest.mark.parametrize("module", FORMULAS)
def test_both_files_define_the_same_formulas_in_one_order_with_the_same_arguments(module: str) -> None:
    header = (SOURCES / f"{module}.h").read_text()
    found = re.findall(r"^(?:inline )?\w+ (\w+)\(([^)]*)\) \{", header, re.MULTILINE)
    theirs = [(name, [part.split()[-1].lstrip("&") for part in given.split(",")]) for name, given in found]
    assert theirs == [(formula.__name__, _arguments(formula)) for formula in FORMULAS[module]]


def _arguments(formula: Formula) -> list[str]:
    returns_list = hints_of(formula)["return"] in SEQUENCES
    return [*signature(formula).parameters, *(["found"] if returns_list else [])]
