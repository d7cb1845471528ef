"""What the cost model says of a rank's memory against what the training engine holds on a fake device.

for each of some layouts of Qwen3 models, training and scoring: for the first and the last rank of every stage
    predicted    `hetrl.cost.memory`
    held         the most bytes of the engine's tensors in one step (`lab.fake_cuda`), sequences of the greatest length
    asleep       what stays on the device of a third of them, which are planned with `idle_state: offload`; on the host
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from _results import write_result

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import calibrated
from hetrl.cost.memory import Footprint, inference_footprint, training_footprint
from hetrl.lengths import Lengths
from hetrl.plan.plan import RECOMPUTES, Replica, Stage, TaskPlan
from hetrl.runtime.megatron.layout import Layout
from hetrl.workload import Workload, architecture
from lab.fake_cuda.engine_rank import EngineRank, play
from lab.fake_cuda.ranks import Played, Stage as Process

LAYOUTS, SEED, PROCESSES = 40, 0, 2
MEDIAN, WORST = 0.05, 0.15  # to reach
MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")


@dataclass(frozen=True)
class Case:
    """One rank of a layout: the first or the last of a stage."""

    rank: EngineRank
    stage: int

    @property
    def name(self) -> str:
        layout, rank = self.rank.layout, self.rank
        again = rank.recompute if rank.recompute_layers is None else f"full of {rank.recompute_layers} layers"
        what = f"train, {again}{', sharded' if rank.distributed else ''}" if rank.training else "score"
        what += ", offload" if rank.offload else ""
        shape = f"TP {layout.tensor}, PP {layout.pipeline}, DP {layout.data}, {layout.micro_batch} x {rank.tokens}"
        return f"{rank.model}, {shape}, {what}"


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield the first rank of every stage of some layouts."""
    chance = random.Random(seed)
    for number in range(count):
        model = MODELS[number % len(MODELS)]
        tensor, pipeline, data = (chance.choice(choices) for choices in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)))
        micro_batch, tokens = chance.choice((1, 2, 4)), chance.choice((1024, 2048, 4096))
        training, recompute = chance.random() < 0.75, chance.choice(RECOMPUTES)
        layers = architecture(model).layers
        stages = tuple((layers * i // pipeline, layers * (i + 1) // pipeline) for i in range(pipeline))
        layout = Layout(tensor, stages, (pipeline * micro_batch,) * data, micro_batch)
        distributed = data > 1 and chance.random() < 0.7
        part = chance.choice((None, 0.9, 0.5)) if recompute == "full" else None
        for stage, (first, end) in enumerate(stages):
            again = None if part is None else int(part * (end - first))
            rank = layout.rank_of(0, stage, 0)
            one = EngineRank(model, layout, rank, tokens, training, recompute, again, distributed, number % 3 == 2)
            yield Case(one, stage)


def predicted(case: Case) -> Footprint:
    """Return what the cost model says."""
    one, layout = case.rank, case.rank.layout
    model = architecture(one.model)
    workload = Workload(
        "grpo", "sync", 0, sum(layout.samples), 1, 1, Lengths(one.tokens - 1.0, one.tokens - 1), 1, actor=model
    )
    rates = calibrated().rates("h100")
    stages = tuple(Stage(("d",) * layout.tensor, span) for span in layout.stages)
    task = TaskPlan(
        "megatron",
        tuple(Replica(samples, stages) for samples in layout.samples),
        micro_batch=layout.micro_batch,
        recompute=one.recompute if one.training else "none",
        optimizer_sharding="data_parallel" if one.distributed else "none",
        idle_state="offload" if one.offload else "resident",
    )
    first, last = layout.stages[case.stage]
    ends = (case.stage == 0, case.stage == layout.pipeline - 1)
    again = one.recompute_layers
    shape = StageShape(model, last - first, *ends, True, layout.tensor, rates, recompute_layers=again)
    if one.training:
        return training_footprint(shape, task, case.stage, workload)
    return inference_footprint(shape, task, workload)


def held(found: list[Case]) -> list[Played]:
    """Play every case, in a few processes."""

    def share(number: int) -> list[Played]:
        with Process() as process:
            return [process.play(play, case.rank) for case in found[number::PROCESSES]]

    with ThreadPoolExecutor(PROCESSES) as pool:
        shares = [iter(one) for one in pool.map(share, range(PROCESSES))]
    return [next(shares[number % PROCESSES]) for number in range(len(found))]


def row_of(case: Case, played: Played) -> dict[str, Any]:
    """Return what was held beside what was predicted."""
    needs, held_gb = predicted(case), played.peak_bytes / 1e9
    row = {"case": case.name, "stage": case.stage, "held_gb": held_gb, "predicted_gb": needs.total_gb}
    row["error"] = needs.total_gb / held_gb - 1
    if played.result is not None:
        asleep = {"device_gb": played.result.device_bytes / 1e9, "host_gb": played.result.host_bytes / 1e9}
        row["asleep"] = {**asleep, "predicted_host_gb": needs.host_gb}
    return row


def main() -> None:
    """Play all cases, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=LAYOUTS)
    arguments = parser.parse_args()
    found = list(cases(arguments.layouts, SEED))
    rows = [row_of(case, played) for case, played in zip(found, held(found), strict=True)]
    asleep = [row["asleep"] for row in rows if "asleep" in row]
    left = max(one["device_gb"] for one in asleep)
    host = max(abs(one["predicted_host_gb"] / one["host_gb"] - 1) for one in asleep)
    errors = [abs(row["error"]) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    verdict = "reached" if median <= MEDIAN and worst <= WORST else "not reached"
    table = "\n".join(
        [
            f"The memory of {len(rows)} ranks of {arguments.layouts} layouts, predicted, and held by the engine on a "
            f"fake device: median error {median:.1%}, worst {worst:.1%} (to reach: {MEDIAN:.0%} and {WORST:.0%}; "
            f"{verdict}). {len(asleep)} ranks were put to sleep with all they had: at most {left:.2f} GB stayed on the "
            f"device, and what the host got was predicted to within {host:.1%}.",
            "",
            "| layout | stage | held, GB | predicted, GB | error |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {row['case']} | {row['stage']} | {row['held_gb']:.2f} | {row['predicted_gb']:.2f} "
                f"| {row['error']:+.1%} |"
                for row in rows
            ),
        ]
    )
    write_result("memory", {"seed": SEED, "median": median, "worst": worst, "ranks": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
