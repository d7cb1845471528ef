"""Rewards by rule: a response is right, wrong, or cannot be scored, and the last is never taken for wrong.

Answers of GSM8K and MATH are scored in worker processes that are killed and replaced when an answer is too much for
them:

    score: find the final answer in the response -> the same text as the reference: right
           -> else ask a free worker: right, wrong, or unscorable with its cause
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hetrl.describe.experiment import Data, Overlong, Reward
from hetrl.errors import HetrlError
from hetrl.runtime.data.math_answer import has_box, last_boxed, marked, tidied, with_unit

RESPONSE_CHARACTERS = 65536  # an answer stands at the end: what comes before is not searched
ANSWER_CHARACTERS = 1000  # longer ones are not parsed: the time of the parser grows faster than its text
START_SECONDS = 120.0  # for importing sympy, on a file system that may be slow
# Deadlines are CPU seconds, which a busy machine does not change; a worker that does not even get to run is given up
# after so many times as long by the clock.
CLOCK_FACTOR, CLOCK_SECONDS = 5.0, 10.0


class Verdict(Enum):
    """What a rule says of a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNSCORABLE = "unscorable"


@dataclass(frozen=True)
class Judgement:
    """A verdict; `cause` says why a response could not be scored, and is empty otherwise."""

    verdict: Verdict
    cause: str = ""


RIGHT, WRONG = Judgement(Verdict.RIGHT), Judgement(Verdict.WRONG)


def unscorable(cause: str) -> Judgement:
    """Return the judgement of a response that could not be scored."""
    return Judgement(Verdict.UNSCORABLE, cause)


class Scorer(Protocol):
    """Compares a response with the accepted answer; many calls may be under way at once."""

    async def score(self, response: str, answer: str) -> Judgement:
        """Return what the rule says of a response."""
        ...


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, spaces around it aside, else 0.0."""
    return float(response.strip() == answer.strip())


class ExactScorer:
    """Accepts the answer itself, spaces around it aside."""

    async def score(self, response: str, answer: str) -> Judgement:
        """Return RIGHT or WRONG: every text can be compared."""
        return RIGHT if exact_match(response, answer) else WRONG


def final_answer(response: str) -> str | Judgement:
    r"""Return the answer that a response states: its last balanced `\boxed{..}`, else what follows its last `####`.

    Emphasis, a currency's sign and a full stop are not of it; behind `####` words after a number are a unit. A response
    that states none, or begins a box that never closes, cannot be scored.
    """
    text = response[-RESPONSE_CHARACTERS:]
    said = last_boxed(text)
    if said is None and has_box(text):
        return unscorable("unbalanced box")
    said = with_unit(tidied(marked(text) or "")) if said is None else tidied(said)
    if not said:
        return unscorable("no answer stated")
    return said if len(said) <= ANSWER_CHARACTERS else unscorable("answer too long")


class _WorkerEndedError(Exception):
    """A worker died over an answer, or was killed over it."""


class _Worker:
    """One process of hetrl.runtime.data.math_worker."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, cpu_seconds: float) -> _Worker:
        """Start a process and wait until it takes answers."""
        arguments = ("-m", "hetrl.runtime.data.math_worker", str(os.getpid()), str(cpu_seconds))
        pipe = asyncio.subprocess.PIPE
        worker = cls(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe))
        try:
            await worker._line(START_SECONDS)
        except _WorkerEndedError as error:
            raise HetrlError(
                f"reward: a math-verify worker {error} before it was ready (its error stands above); "
                "install the extra `runtime`"
            ) from None
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def check(self, said: str, answer: str, clock_seconds: float) -> Judgement:
        """Ask for one verdict; raises _WorkerEndedError, with the reason, where the process is no more."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"said": said, "answer": answer}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the read below says what became of the worker
            await self._process.stdin.drain()
        reply = json.loads(await self._line(clock_seconds))
        return Judgement(Verdict(reply["verdict"]), reply["cause"])

    async def _line(self, clock_seconds: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(clock_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            await self.kill()
            raise _WorkerEndedError("did not answer") from None
        if not line.endswith(b"\n"):
            await self.kill()
            by_deadline = self._process.returncode == -signal.SIGPROF
            raise _WorkerEndedError("deadline" if by_deadline else f"ended with status {self._process.returncode}")
        return line

    async def kill(self) -> None:
        """End the process now and wait until it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # Process.kill() may reap it before asyncio does
        await self._process.wait()


class MathScorer:
    """A pool of workers; one that dies over an answer is replaced when it is needed.

    `deadline_seconds` is the CPU time that comparing one answer may take. Leaving the context kills every worker.
    """

    def __init__(self, workers: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._clock_seconds = CLOCK_FACTOR * deadline_seconds + CLOCK_SECONDS
        self._size = workers
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: a place whose worker is not started
        self._alive: set[_Worker] = set()
        self._closed = False

    async def __aenter__(self) -> MathScorer:
        for _ in range(self._size - 1):
            self._free.put_nowait(None)
        self._free.put_nowait(await self._start())  # a worker that cannot start is found out before the run begins
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await asyncio.gather(*(self._discard(worker) for worker in list(self._alive)))

    async def score(self, response: str, answer: str) -> Judgement:
        """Return what the rule says of a response; raises HetrlError only when no worker can be started."""
        said = final_answer(response)
        if isinstance(said, Judgement):
            return said
        if said == answer.strip():
            return RIGHT
        if len(answer) > ANSWER_CHARACTERS:
            return unscorable("reference answer too long")
        return await self._ask(said, answer)

    async def _ask(self, said: str, answer: str) -> Judgement:
        worker = await self._free.get()
        healthy = False
        try:
            worker = worker or await self._start()
            judgement = await worker.check(said, answer, self._clock_seconds)
            healthy = True
            return judgement
        except _WorkerEndedError as ended:
            return unscorable(str(ended))
        finally:  # also when the caller is cancelled: a worker with an answer under way takes no other
            self._free.put_nowait(worker if healthy else None)
            if worker is not None and not healthy:
                await self._discard(worker)

    async def _start(self) -> _Worker:
        if self._closed:
            raise HetrlError("reward: the scorer is closed")
        worker = await _Worker.start(self._deadline_seconds)
        self._alive.add(worker)
        return worker

    async def _discard(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        await worker.kill()


def rule_of(reward: Reward, data: Data) -> str:
    """Return `exact` or `math`: what `reward.rule` says, else math for gsm8k and math, exact for the other kinds."""
    if reward.rule != "auto":
        return reward.rule
    return "math" if data.kind in ("gsm8k", "math") else "exact"


@asynccontextmanager
async def open_scorer(reward: Reward, data: Data) -> AsyncIterator[Scorer]:
    """Open the scorer of an experiment; on the way out its worker processes are gone.

    Raises HetrlError when a worker cannot start (math-verify is not installed).
    """
    if rule_of(reward, data) == "exact":
        yield ExactScorer()
        return
    async with MathScorer(reward.workers, reward.deadline_seconds) as scorer:
        yield scorer


def reward_of(judgement: Judgement, reward: Reward) -> float:
    """Return 1 for a right response, 0 for a wrong one, and `reward.unscorable` for one that cannot be scored."""
    return {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: reward.unscorable}[judgement.verdict]


def overlong_penalty(tokens: int, longest: int, overlong: Overlong | None) -> float:
    """Return what a response of so many tokens loses for its length; `longest` is the most that a response may have.

    With b = buffer_tokens: 0 up to longest - b tokens, then penalty x (tokens - (longest - b)) / b, the whole penalty
    at `longest`; nothing is longer. Source: soft overlong punishment, DAPO (arXiv 2503.14476, equation 13), where the
    penalty is 1.
    """
    if overlong is None:
        return 0.0
    over = tokens - (longest - overlong.buffer_tokens)
    return overlong.penalty * max(0, over) / overlong.buffer_tokens


def tally(judgements: Sequence[Judgement]) -> dict[str, object]:
    """Return the counts of right, wrong and unscorable, and of the causes of the last, as metrics show them."""
    verdicts = Counter(judgement.verdict for judgement in judgements)
    causes = Counter(judgement.cause for judgement in judgements if judgement.verdict is Verdict.UNSCORABLE)
    return {**{verdict.value: verdicts[verdict] for verdict in Verdict}, "unscorable_causes": dict(causes)}
