"""Random search: the best of as many random legal plans as the budget allows. The floor under every search.

until the time or the evaluations are spent
    draw a vector (`Evaluator.random`: legal; memory and links may still forbid it), value it, keep the best
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from hetrl.search import sha_ea
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import SEEDS_APART, Best, Limits, Progress

TUNING = "nothing: the best of independent random plans, in the encoding of sha-ea"


def search(evaluator: Evaluator, limits: Limits, seed: int, report: Callable[[Progress], None] | None = None) -> Best:
    """Return the best plan drawn; its seconds are infinite where none is feasible.

    An interrupt (Ctrl-C) ends the search early.
    """
    best, numbers = Best(), count(seed * SEEDS_APART)
    try:
        while left := limits.left(evaluator.evaluations):
            for _ in range(left):
                x = evaluator.random(next(numbers))
                best.offer(evaluator.graded(x), x, evaluator)
            if report is not None:
                report(Progress(best.seconds, evaluator.evaluations, 1))
    except KeyboardInterrupt:
        best.interrupted = True
    return best


plan = partial(sha_ea.plan, method=search)
