"""Verdicts: right, wrong, unscorable; and no answer that hangs, crashes or fills the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.describe.experiment import Data, Overlong, Reward
from hetrl.errors import HetrlError
from hetrl.runtime.data.math_answer import last_boxed, marked
from hetrl.runtime.data.rewards import (
    ANSWER_CHARACTERS,
    RIGHT,
    WRONG,
    Judgement,
    MathScorer,
    Verdict,
    exact_match,
    final_answer,
    open_scorer,
    overlong_penalty,
    reward_of,
    rule_of,
    tally,
    unscorable,
)

Check = Callable[[str, str], Judgement]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def check(loop: asyncio.AbstractEventLoop) -> Iterator[Check]:
    """Compare one stated answer with the accepted one, in a worker that has 1 s of CPU time for each."""
    scorer = MathScorer(workers=1, deadline_seconds=1.0)
    loop.run_until_complete(scorer.__aenter__())
    yield lambda said, answer: loop.run_until_complete(scorer.score(f"So it is \\boxed{{{said}}}.", answer))
    loop.run_until_complete(scorer.__aexit__())


# --- exact match ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "reward"), [("7", "7", 1.0), (" 7\n", "7", 1.0), ("77", "7", 0.0), ("", "7", 0.0)]
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert exact_match(response, answer) == reward


# --- where the answer stands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{4}$", "4"),
        (r"\boxed{3} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3} no, \boxed{4", "3"),
        (r"\boxed{\left\{ x \mid x > 2 \right.}", r"\left\{ x \mid x > 2 \right."),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"it is $\boxed 7$ then", "7"),
        (r"\boxed{ }", ""),
        (r"} \boxed{5}", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{{5}", None),
        (r"\boxedx{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


balanced = st.recursive(
    st.text(st.characters(blacklist_characters="{}\\"), max_size=5),
    lambda inner: st.builds("{}{{{}}}{}".format, inner, inner, inner),
    max_leaves=6,
)


@given(
    balanced, st.text(st.characters(blacklist_characters="{}\\")), st.text(st.characters(blacklist_characters="{}\\"))
)
def test_a_balanced_box_is_found_whole(inside: str, before: str, after: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{inside}}}{after}") == inside.strip()


@given(st.text("\\boxed{} a$#1\n", max_size=60))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    found = last_boxed(text)
    assert found is None or found in text


@pytest.mark.parametrize(
    ("text", "answer"), [("48\n#### 17", "17"), ("#### 1\n#### 2 \nmore", "2"), ("####", None), ("17", None)]
)
def test_marked(text: str, answer: str | None) -> None:
    assert marked(text) == answer


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (r"#### 3 and \boxed{4}", "4"),
        ("48 - 31 = 17\n#### 17", "17"),
        ("so she has #### 18.", "18"),
        ("**#### 18**", "18"),
        ("#### €18", "18"),
        ("#### 18 dollars", r"18\text{ dollars}"),
        ("#### **18** dollars", r"18\text{ dollars}"),
        ("#### 18 (dollars)", r"18\text{ dollars}"),
        ("#### 18 km/h", r"18\text{ km/h}"),
        ("#### 18 cm^2.", r"18\text{ cm}"),
        ("#### 2 ab^2", "2 ab^2"),
        ("#### 18 ####", "18"),
        ("#### 18 pi", "18 pi"),
        (r"\boxed{18.}", "18"),
        (r"\boxed{2 pi}", "2 pi"),
        (r"\boxed{\left\{ x \mid x > 2 \right.}", r"\left\{ x \mid x > 2 \right."),
        ("#### .", unscorable("no answer stated")),
        (r"\boxed{4 #### 4", unscorable("unbalanced box")),
        ("it is 4", unscorable("no answer stated")),
        ("", unscorable("no answer stated")),
        (r"\boxed{}", unscorable("no answer stated")),
        ("\\boxed{" + "1" * ANSWER_CHARACTERS + "2}", unscorable("answer too long")),
    ],
)
def test_final_answer(response: str, said: str | Judgement) -> None:
    assert final_answer(response) == said


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("42", "42"),
        ("42.0", "42"),
        ("1,080", "1080"),
        (r"\$1{,}080.00", "1080"),
        (r"18\text{ dollars}", "18"),
        (r"50\%", "0.5"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac12", "1/2"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        (r"\{3, -3\}", r"\left\{-3, 3\right\}"),
        ("x=5", "5"),
        ("(x-1)(x+1)", "x^2-1"),
        (r"\text{(A)}", "A"),
        ("100000000000000000001", "100000000000000000001"),
        ("10^{10^{10}}", "10^{10^{10}}"),
    ],
)
def test_right(check: Check, said: str, answer: str) -> None:
    assert check(said, answer) == RIGHT


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("41", "42"),
        ("-42", "42"),
        ("100000000000000000000", "100000000000000000001"),
        (r"\frac{1}{3}", r"\frac{1}{2}"),
        ("(2, 1)", "(1, 2)"),
        (r"\text{Monday}", r"\text{Tuesday}"),
        (r"\pi", "3"),
    ],
)
def test_wrong(check: Check, said: str, answer: str) -> None:
    assert check(said, answer) == WRONG


@pytest.mark.parametrize(
    ("said", "answer", "cause"),
    [
        (r"\frac{1}{", "42", "unbalanced box"),
        (r"\frac{1}{}", "42", "answer not readable"),
        ("1" * 900, r"\begin{tabular}{c}x\end{tabular}", "reference answer not readable"),
        ("10^{10^{10}}", "42", "deadline"),
        ("9^{9^{9^{9}}}", "42", "deadline"),
        ("100000000!", "42", "deadline"),
        ("7" * 5000, "42", "answer too long"),
        ("7" * 1_000_000, "42", "no answer stated"),  # what stands before the last 64 kB is not searched
        ("7", "42" * ANSWER_CHARACTERS, "reference answer too long"),
    ],
)
def test_unscorable_with_its_cause(check: Check, said: str, answer: str, cause: str) -> None:
    assert check(said, answer) == unscorable(cause)
    assert check("2", "2.0") == RIGHT  # the next answer finds a worker


def test_deep_nesting_is_unscorable(check: Check) -> None:
    """Whether the parser gives up or the deadline ends it is a matter of the machine."""
    for deep in ("(" * 490 + "1" + ")" * 490, "{" * 490 + "1" + "}" * 490, "\\sqrt{" * 160 + "2" + "}" * 160):
        assert check(deep, "42").verdict is Verdict.UNSCORABLE


def test_an_answer_after_a_megabyte_of_text_is_found(check: Check) -> None:
    assert check("3}" + "{ \\frac \\boxed{ $ " * 60_000 + "\\boxed{42.0", "42") == RIGHT


@pytest.mark.parametrize("said", ["\x00", "42\x00", "{}" * 200, "\\" * 99, "\ud800", "$$", "%" * 50, "\\left(" * 50])
def test_no_text_breaks_the_scorer(check: Check, said: str) -> None:
    assert check(said, "42").verdict in Verdict
    assert check("2", "2.0") == RIGHT


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**25), 10**25), st.integers(-(10**25), 10**25))
def test_integers_are_compared_exactly(check: Check, one: int, other: int) -> None:
    expected = RIGHT if one == other else WRONG
    assert check(f"{one:,}", str(other)) == check(str(other), f"{one}") == expected
    assert check(f"{one:,}", str(one)) == check(str(one), f"{one:,}") == RIGHT


@settings(max_examples=40, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=100), st.integers(2, 9))
def test_equal_fractions_are_right_both_ways(check: Check, value: Fraction, factor: int) -> None:
    sign = "-" if value < 0 else ""
    plain = f"{value.numerator}/{value.denominator}"
    latex = f"{sign}\\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"
    assert check(plain, latex) == check(latex, plain) == RIGHT
    assert check(plain, f"{value.numerator + value.denominator}/{value.denominator}") == WRONG


# --- the pool ---------------------------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "hetrl.runtime.data.math_worker" in p.cmdline()]


def run(work: Callable[[MathScorer], Awaitable[None]], workers: int = 2) -> None:
    async def inside() -> None:
        async with MathScorer(workers, deadline_seconds=1.0) as scorer:
            await work(scorer)

    before = len(children())
    asyncio.run(inside())
    assert len(children()) == before


def test_many_answers_at_once_with_hostile_ones_among_them() -> None:
    async def work(scorer: MathScorer) -> None:
        responses = [f"\\boxed{{{n}}}" if n % 6 else r"\boxed{9^{9^{9^{9}}}}" for n in range(12)]
        scores = await asyncio.gather(*(scorer.score(response, "7.0") for response in responses))
        expected = [RIGHT if n == 7 else WRONG if n % 6 else unscorable("deadline") for n in range(12)]
        assert scores == expected

    run(work)


def test_a_cancelled_answer_does_not_reach_another_caller() -> None:
    async def work(scorer: MathScorer) -> None:
        hostile = asyncio.create_task(scorer.score(r"\boxed{9^{9^{9^{9}}}}", "1"))
        await asyncio.sleep(0.1)
        hostile.cancel()
        assert await scorer.score(r"\boxed{2}", "2.0") == RIGHT
        assert await scorer.score(r"\boxed{3}", "2.0") == WRONG

    run(work, workers=1)


def test_a_worker_that_is_killed_costs_its_answer_alone() -> None:
    before = set(children())

    async def work(scorer: MathScorer) -> None:
        for child in set(children()) - before:
            child.kill()
        assert await scorer.score(r"\boxed{2}", "2.0") == unscorable("ended with status -9")
        assert await scorer.score(r"\boxed{2}", "2.0") == RIGHT

    run(work, workers=1)


def test_memory_is_limited() -> None:
    program = (
        "import os, sys; from hetrl.runtime.data import math_worker as w; w._bind_to(os.getppid());"
        "w.check = lambda said, answer: bytearray(2 * w.MEMORY_BYTES) and ('right', '');"
        'print(w.answer_line(b\'{"said": "1", "answer": "1"}\', 60.0))'
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{'verdict': 'unscorable', 'cause': 'memory'}\n"


PARENT = """
import asyncio, os
from hetrl.runtime.data.rewards import MathScorer

async def main():
    async with MathScorer(1, 60.0) as scorer:
        hostile = asyncio.create_task(scorer.score(r"\\boxed{9^{9^{9^{9}}}}", "1"))
        await asyncio.sleep(0.2)
        print(*(worker._process.pid for worker in scorer._alive), flush=True)
        await hostile

asyncio.run(main())
"""


def test_no_worker_outlives_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    limit = time.monotonic() + 10  # the worker itself would compute for minutes
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(HetrlError, match="a math-verify worker ended with status 1 before it was ready"):
        run(lambda scorer: scorer.score("", ""))


# --- what an experiment says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        ("gsm8k", "auto", "math"),
        ("math", "auto", "math"),
        ("jsonl", "auto", "exact"),
        ("arithmetic", "auto", "exact"),
        ("jsonl", "math", "math"),
        ("math", "exact", "exact"),
    ],
)
def test_the_rule_follows_the_data_unless_it_is_named(kind: str, rule: str, expected: str) -> None:
    assert rule_of(Reward(rule=rule), Data(kind=kind)) == expected


def test_an_experiment_opens_its_scorer() -> None:
    async def scores(reward: Reward, data: Data) -> list[Judgement]:
        async with open_scorer(reward, data) as scorer:
            return [await scorer.score(response, "7") for response in (r"\boxed{7.0}", "7")]

    assert asyncio.run(scores(Reward(), Data(kind="arithmetic"))) == [WRONG, RIGHT]
    math = asyncio.run(scores(Reward(workers=1), Data(kind="gsm8k", path="/data")))
    assert math == [RIGHT, unscorable("no answer stated")]


def test_rewards_and_counts() -> None:
    scores = [RIGHT, WRONG, WRONG, unscorable("deadline"), unscorable("deadline"), unscorable("memory")]
    assert [reward_of(score, Reward(unscorable=-0.5)) for score in scores] == [1, 0, 0, -0.5, -0.5, -0.5]
    assert reward_of(scores[-1], Reward()) == 0
    counts = {"right": 1, "wrong": 2, "unscorable": 3, "unscorable_causes": {"deadline": 2, "memory": 1}}
    assert tally(scores) == counts
    assert tally([]) == {"right": 0, "wrong": 0, "unscorable": 0, "unscorable_causes": {}}


def test_the_overlong_penalty_grows_evenly_over_the_buffer() -> None:
    # DAPO (arXiv 2503.14476), equation 13, with L_max 100 and L_cache 20: (80 - length) / 20 between 80 and 100.
    plain, twice = Overlong(buffer_tokens=20), Overlong(buffer_tokens=20, penalty=2.0)
    assert [overlong_penalty(tokens, 100, plain) for tokens in (1, 80, 81, 90, 100)] == [0, 0, 0.05, 0.5, 1]
    assert [overlong_penalty(tokens, 100, twice) for tokens in (80, 90, 100)] == [0, 1, 2]
    assert overlong_penalty(100, 100, None) == 0
