"""Makespan of a batch of samples over replicas of unequal speed: hetrl's dispatch beside simpler ones.

for each size of a batch and each of some seeds: draw response lengths (lognormal, those of a prompt alike) and play the
batch on emulated replicas, whose speeds are those of the cost model, with
    equal         whole prompts, as many to each replica
    weighted      whole prompts, in proportion to the replicas' rates
    least loaded  whole prompts, the next one to whoever has room and the least to do for its rate
    dispatch      `hetrl.dispatch`
beside the bound: for every k the k longest samples take at least their tokens over the highest rate of k sequences
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from _emulated_replicas import Kind, Play, kind_of
from _results import write_result

from hetrl.dispatch import STRETCH_TOKENS, Begun, Capacity, Dispatch, Key
from hetrl.workload import architecture

MODEL, FLEET = "qwen3-8b", {"a100-40gb": 2, "l40s": 2, "l4": 4}
PROMPTS, SAMPLES = (64, 128, 256, 512), 8
PROMPT_TOKENS, MEAN, LONGEST = 512, 2048, 8192
SIGMA_PROMPT, SIGMA_SAMPLE = 0.8, 0.4  # of the logarithms of lengths, between prompts and inside one
GOALS = {"equal": 1.5, "weighted": 1.15, "least loaded": 1.15, "bound": 1.10}


def lengths_of(prompts: int, seed: int) -> dict[Key, int]:
    """Return the response lengths of a batch."""
    draws = random.Random(seed)
    middle = math.log(MEAN) - (SIGMA_PROMPT**2 + SIGMA_SAMPLE**2) / 2
    found = {}
    for prompt in range(prompts):
        centre = draws.gauss(middle, SIGMA_PROMPT)
        for number in range(SAMPLES):
            found[prompt, number] = min(LONGEST, max(1, round(math.exp(draws.gauss(centre, SIGMA_SAMPLE)))))
    return found


class Static:
    """Prompts given to replicas before any is drawn; each draws its own in their order."""

    def __init__(self, fleet: Mapping[str, Kind], parts: Mapping[str, Iterable[int]]) -> None:
        self._queues = {name: deque((one, k) for one in part for k in range(SAMPLES)) for name, part in parts.items()}
        self._free = {name: kind.sequences for name, kind in fleet.items()}

    def next(self, now: float) -> list[Begun]:
        """Return what begins: whatever has a place."""
        begun = []
        for name, queue in self._queues.items():
            while queue and self._free[name]:
                begun.append((name, queue.popleft()))
                self._free[name] -= 1
        return begun

    def late(self, now: float) -> list[Begun]:
        """Return nothing."""
        return []

    def advanced(self, name: str, key: Key, tokens: int, seconds: float, *, complete: bool) -> list[Begun]:
        """Free the place of a sample."""
        self._free[name] += 1
        return []


class LeastLoaded(Static):
    """Whole prompts in their order, each, as soon as one of its samples has a place, to the least loaded."""

    def __init__(self, fleet: Mapping[str, Kind], prompts: int) -> None:
        super().__init__(fleet, {name: () for name in fleet})  # noqa: C420 - each its own
        self._fleet, self._prompts = fleet, deque(range(prompts))

    def next(self, now: float) -> list[Begun]:
        """Return what begins, after prompts went to whoever has room."""
        begun = super().next(now)
        while self._prompts and (able := [n for n, queue in self._queues.items() if not queue and self._free[n]]):
            prompt = self._prompts.popleft()
            self._queues[min(able, key=self._load)].extend((prompt, k) for k in range(SAMPLES))
            begun += super().next(now)
        return begun

    def _load(self, name: str) -> float:
        kind = self._fleet[name]
        return (kind.sequences - self._free[name] + 1) / kind.rate(kind.sequences)


def shared(prompts: int, weights: Sequence[float]) -> list[int]:
    """Divide the prompts in proportion to weights, the largest remainders first."""
    exact = [prompts * weight / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    for index in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: prompts - sum(counts)]:
        counts[index] += 1
    return counts


def in_turn(names: Iterable[str], counts: Iterable[int]) -> dict[str, range]:
    """Return consecutive prompts for each replica."""
    found, first = {}, 0
    for name, count in zip(names, counts, strict=True):
        found[name] = range(first, first + count)
        first += count
    return found


def highest_rates(fleet: Mapping[str, Kind]) -> Iterator[float]:
    """Yield the highest rate of 1, 2, ... sequences: each goes where it adds most, and adds less than those before."""
    adds = [(-kind.rate(1), name, 1) for name, kind in fleet.items()]
    heapq.heapify(adds)
    rate = 0.0
    while adds:
        less, name, running = heapq.heappop(adds)
        rate -= less
        kind = fleet[name]
        if running < kind.sequences:
            heapq.heappush(adds, (kind.rate(running) - kind.rate(running + 1), name, running + 1))
        yield rate


def bound(fleet: Mapping[str, Kind], lengths: Mapping[Key, int]) -> float:
    """Return seconds that no schedule is shorter than, whatever it knows and however often it moves samples."""
    rates = [*highest_rates(fleet)]
    tokens, most = 0, 0.0
    for index, length in enumerate(sorted(lengths.values(), reverse=True)):
        tokens += length
        most = max(most, tokens / rates[min(index, len(rates) - 1)])
    return most


def measure(fleet: Mapping[str, Kind], prompts: int, seed: int) -> dict[str, float]:
    """Return the makespan of every policy, and the bound."""
    lengths = lengths_of(prompts, seed)
    rates = [kind.rate(kind.sequences) for kind in fleet.values()]
    parts = shared(prompts, rates)
    capacities = {n: Capacity(fleet[n].sequences, SAMPLES * part) for n, part in zip(fleet, parts, strict=True)}
    ours = Dispatch(capacities, LONGEST, STRETCH_TOKENS)
    for prompt in range(prompts):
        ours.add(prompt, 0, SAMPLES)
    whole = {
        "equal": Static(fleet, in_turn(fleet, shared(prompts, [1.0] * len(fleet)))),
        "weighted": Static(fleet, in_turn(fleet, parts)),
        "least loaded": LeastLoaded(fleet, prompts),
    }
    seconds = {name: Play(one, fleet, lengths, PROMPT_TOKENS, LONGEST).seconds() for name, one in whole.items()}
    seconds["dispatch"] = Play(ours, fleet, lengths, PROMPT_TOKENS, STRETCH_TOKENS).seconds()
    return {**seconds, "bound": bound(fleet, lengths)}


def ratios_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians over seeds: of the others over the dispatch, of the dispatch over the bound."""
    found = {name: statistics.median(row[name] / row["dispatch"] for row in rows) for name in GOALS if name != "bound"}
    return {**found, "bound": statistics.median(row["dispatch"] / row["bound"] for row in rows)}


def table_of(kinds: Mapping[str, Kind], runs: Mapping[int, Sequence[Mapping[str, float]]], seeds: int) -> str:
    """Return the part of the page."""
    fleet = ", ".join(
        f"{FLEET[gpu]} {gpu} ({kind.sequences} sequences at {1 / kind.step(kind.sequences):.0f} tokens/s each)"
        for gpu, kind in kinds.items()
    )
    goals = ", ".join(f"{name} {'at most' if name == 'bound' else 'at least'} {goal}" for name, goal in GOALS.items())
    lines = [
        f"| {prompts * SAMPLES} | {statistics.median(row['dispatch'] for row in rows):.0f} s "
        f"| {' | '.join(f'{ratio:.2f}' for ratio in ratios_of(rows).values())} |"
        for prompts, rows in runs.items()
    ]
    return "\n".join(
        [
            f"Emulated replicas of {MODEL}, their speeds those of the cost model: {fleet}. {SAMPLES} samples per "
            f"prompt, {PROMPT_TOKENS} tokens and responses of {MEAN} on average, {LONGEST} at most, lognormal "
            f"(deviation of the logarithm {SIGMA_PROMPT} between prompts, {SIGMA_SAMPLE} inside one). Medians over "
            f"{seeds} seeds; the first three say how many times longer than the dispatch the others take, the last how "
            f"many times the bound the dispatch takes. Goals: {goals}.",
            "",
            "| samples | dispatch | equal | weighted | least loaded | over the bound |",
            "| --- | --- | --- | --- | --- | --- |",
            *lines,
        ]
    )


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    kinds = {gpu: kind_of(gpu, architecture(MODEL), PROMPT_TOKENS, MEAN) for gpu in FLEET}
    fleet = {f"{gpu}/{n}": kinds[gpu] for gpu, count in FLEET.items() for n in range(count)}
    runs = {prompts: [measure(fleet, prompts, seed) for seed in range(seeds)] for prompts in PROMPTS}
    ratios = {str(prompts * SAMPLES): ratios_of(rows) for prompts, rows in runs.items()}
    table = table_of(kinds, runs, seeds)
    write_result("balance", {"seeds": seeds, "goals": GOALS, "ratios": ratios, "runs": runs}, table)
    print(table)


if __name__ == "__main__":
    main()
