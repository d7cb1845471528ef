"""An engine that sleeps has nothing on its device, and goes on as if it had not slept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import snapshot
from tests.engines.megatron.megatron_worlds import LAYOUTS, Job, Worlds, model_config, start_engine, step_job, weights


@dataclass(frozen=True)
class Seen:
    """What a rank saw of steps with a sleep between them, and of the same steps without."""

    metrics: list[dict[str, float]]
    exported: dict[str, torch.Tensor]
    asleep_bytes: list[int]
    refused: list[str]


def slept(rank: int, port: int, work: tuple[Job, bool]) -> Seen:
    job, sleeps = work
    snapshot.CHUNK_BYTES = 1 << 14  # several chunks even of a tiny model, and storages that cross their borders
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    seen = Seen([], {}, [], [])
    for _ in range(3):
        if sleeps:
            engine.sleep(offload=True)
            seen.asleep_bytes.append(held_bytes(engine))
            seen.refused.append(refusal(engine, job))
            engine.wake()
        if job.optimizer is not None:
            seen.metrics.append(engine.train_step(job.batch, job.settings))
    seen.exported.update(engine.export())
    engine.close()
    return seen


def held_bytes(engine: Any) -> int:
    """Return the bytes of the storages of parameters, gradients and optimiser."""
    tensors = [parameter.data for parameter in engine.parameters.values()]
    tensors += [parameter.main_grad for parameter in engine.parameters.values() if hasattr(parameter, "main_grad")]
    for part in engine.optimizer.chained_optimizers if engine.optimizer is not None else ():
        tensors += [main for group in part.optimizer.param_groups for main in group["params"]]
        tensors += [value for state in part.optimizer.state.values() for value in state.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if torch.is_tensor(tensor))


def refusal(engine: Any, job: Job) -> str:
    with pytest.raises(HetrlError) as error:
        engine.score(job.batch)
    return str(error.value)


CASES = {
    "fp32": step_job(model_config(), LAYOUTS["data"]),
    "fp32-unsharded": step_job(model_config(), LAYOUTS["data"], distributed=False),
    "bf16": step_job(model_config(), LAYOUTS["data"], dtype="bfloat16"),
    "bf16-unsharded": step_job(model_config(), LAYOUTS["data"], distributed=False, dtype="bfloat16"),
    "tensor-pipeline-tied": step_job(model_config(tie_word_embeddings=True), LAYOUTS["tensor-pipeline"]),
    "scoring": Job(model_config(), LAYOUTS["tensor"], step_job(model_config(), LAYOUTS["tensor"]).batch),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_with_a_sleep_before_each(worlds: Worlds, name: str) -> None:
    job = CASES[name]
    through = worlds.run(slept, job.layout.world_size, (job, True))
    without = worlds.run(slept, job.layout.world_size, (job, False))
    for one, other in zip(through, without, strict=True):
        assert one.metrics == other.metrics
        assert one.exported.keys() == other.exported.keys()
        assert all(torch.equal(one.exported[key], other.exported[key]) for key in one.exported)
        assert one.asleep_bytes == [0, 0, 0]
        assert all("asleep" in text for text in one.refused)


def kept(rank: int, port: int, job: Job) -> tuple[int, int]:
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    engine.train_step(job.batch, job.settings)
    before = held_bytes(engine)
    engine.sleep(offload=False)
    after = held_bytes(engine)
    engine.wake()
    engine.train_step(job.batch, job.settings)
    engine.close()
    return before, after


def test_what_is_resident_stays(worlds: Worlds) -> None:
    ((before, after),) = worlds.run(kept, 1, step_job(model_config(), LAYOUTS["one"]))
    assert before == after > 0


def scored(rank: int, port: int, work: tuple[Job, bool]) -> Any:
    """Load two sets of weights, the second one asleep or awake, and score."""
    job, sleeps = work
    snapshot.CHUNK_BYTES = 1 << 14
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    if sleeps:
        engine.sleep(offload=True)
    engine.load(weights(job.config, seed=1))
    if sleeps:
        assert held_bytes(engine) == 0
        engine.wake()
    scores = engine.score(job.batch)
    engine.close()
    return scores


@pytest.mark.parametrize("layout", ["tensor", "tensor-pipeline"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_scores_takes_other_weights_asleep(worlds: Worlds, layout: str, tied: bool) -> None:
    config = model_config(tie_word_embeddings=tied)
    job = Job(config, LAYOUTS[layout], step_job(config, LAYOUTS[layout]).batch)
    asleep, awake = (worlds.run(scored, job.layout.world_size, (job, sleeps)) for sleeps in (True, False))
    assert (asleep[0] == awake[0]).all()


def refused_asleep(rank: int, port: int, job: Job) -> str:
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    engine.sleep(offload=True)
    with pytest.raises(HetrlError) as error:
        engine.load(weights(job.config, seed=1))
    engine.wake()
    engine.train_step(job.batch, job.settings)
    engine.close()
    return str(error.value)


def test_what_trains_takes_none(worlds: Worlds) -> None:
    (said,) = worlds.run(refused_asleep, 1, step_job(model_config(), LAYOUTS["one"]))
    assert "wake it first" in said
