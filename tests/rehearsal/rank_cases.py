"""One rank of a GPU run, from its start to its end, on the fake device: what `hetrl.runtime.run.trainer` does there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import yaml

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints import files as checkpoint_files
from hetrl.runtime.checkpoints.places import places_of
from hetrl.runtime.hang import HangWatch
from hetrl.runtime.megatron.engine import MegatronEngine
from hetrl.runtime.run import engines, trainer
from hetrl.runtime.run.context import read_context
from hetrl.runtime.run.world import execute, share, share_tensors
from hetrl.runtime.wan.world import stop_wan_world
from hetrl.runtime.wire.arrays import pack
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from lab.fake_cuda.device import FakeCuda
from lab.quick import quick_plan

SITE, WIDTH = "alpha", 14
ASLEEP_BYTES = 2**14  # sines and cosines, generators
TRAINING, REFERENCE = "actor_training", "reference_inference"
CRITIC, VALUES, REWARD = "critic_training", "critic_inference", "reward_inference"
WHAT = {TRAINING: "logprobs", REFERENCE: "logprobs", CRITIC: "values", VALUES: "values", REWARD: "rewards"}
LOSSES = {
    TRAINING: wire.LossSettings(kl_coefficient=0.1),
    CRITIC: wire.LossSettings(loss="value", value_clip=0.2),
}
EXPERIMENT = {
    "name": "rehearsal",
    "model": {"architecture": "tiny-qwen3", "dtype": "bf16"},
    "data": {"kind": "larger-digit"},
    "algorithm": {"kind": "ppo", "kl_coefficient": 0.1},
    "reward": {"kind": "model", "architecture": "tiny-qwen3"},
    "batch": {"samples": 16, "prompt_tokens": 4, "response_tokens": 10},
    "steps": 2,
    "topology": {"scenario": "none.yaml"},
}


@dataclass(frozen=True)
class Case:
    """A rank of a task; `settings` are more keys of the task in the plan.

    The stages of the last replica have `wider` times the devices of the others.
    """

    task: str
    rank: int
    tensor: int = 1
    stages: tuple[tuple[int, int], ...] = ((0, 2),)
    samples: tuple[int, ...] = (16,)
    settings: tuple[tuple[str, Any], ...] = ()
    wider: int = 1

    @property
    def leads(self) -> tuple[int, ...]:
        """Return the ranks that speak for their world: replicas of the reference are worlds of their own."""
        replica = self.tensor * len(self.stages)
        return (0,) if self.task in LOSSES else tuple(replica * number for number in range(len(self.samples)))

    def __str__(self) -> str:
        shape = f"tp{self.tensor}-pp{len(self.stages)}-dp{len(self.samples)}"
        shape += f"-wider{self.wider}" if self.wider > 1 else ""
        return "-".join([self.task, shape, *(str(value) for _, value in self.settings), f"rank{self.rank}"])


def write_site(directory: Path, case: Case) -> None:
    """Write what the launcher stages for the site of a case: all devices on one node of H100s."""
    (directory / "config.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    devices = iter(f"{SITE}/node/{number}" for number in range(64))
    tensors = [*[case.tensor] * (len(case.samples) - 1), case.tensor * case.wider]
    replicas = [
        {
            "samples": samples,
            "stages": [
                {"devices": [next(devices) for _ in range(tensor)], "layers": list(layers)} for layers in case.stages
            ],
        }
        for samples, tensor in zip(case.samples, tensors, strict=True)
    ]
    plan = quick_plan().to_json()
    task = {**plan["tasks"][TRAINING], "replicas": replicas, "micro_batch": 2, **dict(case.settings)}
    plan["tasks"] = {**plan["tasks"], case.task: task}
    (directory / "plan.json").write_text(json.dumps(plan))
    gpus = {f"{SITE}/node/{number}": "h100" for number in range(64)}
    site = {"run": "r", "site": SITE, "lead_site": SITE, "bind": "tcp://127.0.0.1:9", "gpus": gpus, "held": {SITE: 64}}
    (directory / "site.json").write_text(json.dumps({**site, "continues": [], "goes_on": False}))
    write_keys(directory / "keys.json", make_run_keys([SITE])[SITE])


def live(case: Case, directory: Path, defect: str | None = None, written: Path | None = None) -> dict[str, Any]:
    """Do what a rank does in a run of two steps, and return what it saw; at its end it takes up `written`.

    That is a checkpoint of any layout; without it, the one that the rank wrote, if it is a world of its own.
    """
    write_site(directory, case)
    with _defect(defect):
        context = read_context(directory)
        world, rank = context.place(case.task, case.rank)
        trainer.join_world(context, world, rank, device=0)
        engine = engines.build_engine(context, world, rank)
        seen = _drive(engine, trainer.watch_of(context, world, rank), case.task, directory, written)
        engine.close()
        stop_wan_world()
    return seen


def _drive(
    engine: MegatronEngine, watch: HangWatch, task: str, directory: Path, written: Path | None
) -> dict[str, Any]:
    seen: dict[str, Any] = {"devices": {str(parameter.device) for parameter in engine.parameters.values()}}
    places = places_of(task)
    if engine.rank == 0:
        share(wire.Score(step=1, what=WHAT[task], arrays=()), ())  # the others would hear garbage: nobody is there
        assert [name for name, _ in share_tensors(iter([("a", torch.ones(3))]))] == ["a"]
    with _packed(engine):
        scores = execute(engine, *_request(wire.Score(step=1, what=WHAT[task], arrays=())), places, watch)
    seen["scores"] = None if scores is None else scores.shape
    _sleep(engine)
    execute(engine, *_request(wire.Score(step=1, what=WHAT[task], arrays=())), places, watch)
    if task in LOSSES:
        settings = LOSSES[task]
        for _ in range(2):
            request = _request(wire.Train(step=1, arrays=(), settings=settings))
            seen["metrics"] = sorted(execute(engine, *request, places, watch))
            _sleep(engine)
        seen["exported"] = [name for name, tensor in engine.export() if tensor.device.type == "cpu"]
        checkpoint = checkpoint_files.path_of(directory / "checkpoints", 1)
        engine.save(checkpoint, {"step": 1})
        try:
            engine.finish_save()
        except HetrlError as error:  # where the other ranks are to write, nobody is there
            seen["not whole"] = str(error)
        seen["restored"] = engine.restore(written or checkpoint)
    return seen


@contextmanager
def _packed(engine: MegatronEngine) -> Iterator[None]:
    """See that a model on one rank computes for the tokens of the batch and for no padding."""
    counts: list[int] = []
    hook = engine.model.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].numel()))
    yield
    hook.remove()
    computed, tokens = sum(counts), int(_lengths().sum())
    assert engine.layout.world_size > 1 or computed == tokens, f"computed for {computed} tokens of {tokens}"


def _sleep(engine: MegatronEngine) -> None:
    """Sleep once, with next to nothing on the device."""
    engine.sleep(offload=True)
    held = FakeCuda.active.held_bytes
    assert held < ASLEEP_BYTES, f"asleep, and {held} bytes are on the device"
    engine.wake()


def _request(message: Any) -> tuple[Any, list[bytes]]:
    """Return a request with a batch of 16 sequences."""
    random, lengths = numpy.random.default_rng(0), _lengths()
    columns = numpy.arange(WIDTH)[None, :]
    mask = (columns >= 3) & (columns < lengths[:, None])
    arrays: dict[str, Any] = {"tokens": random.integers(0, 20, (16, WIDTH)), "lengths": lengths}
    if isinstance(message, wire.Train):
        floats = ("advantages", "old_logprobs", "reference_logprobs", "old_values", "returns")
        arrays |= {"mask": mask, **{name: random.normal(size=mask.shape).astype(numpy.float32) for name in floats}}
    specs, buffers = pack(arrays)
    return msgspec.structs.replace(message, arrays=specs), [bytes(buffer) for buffer in buffers]


def _lengths() -> Any:
    return numpy.random.default_rng(1).integers(6, WIDTH + 1, 16)


@contextmanager
def _defect(name: str | None) -> Iterator[None]:
    """Put a defect in, by its name."""
    if name is None:
        yield
        return
    owner, attribute, broken = DEFECTS[name]()
    sound = getattr(owner, attribute)
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, sound)


def _nccl_only() -> tuple[Any, str, Any]:
    """A world of NCCL alone."""
    import torch.distributed as dist

    from hetrl.runtime.wan import world

    def inside(options: Any, store: Any) -> Any:
        group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        kinds = dist.ProcessGroup.BackendType
        group._set_default_backend(kinds.NCCL)
        nccl = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        return group

    return world, "_inside", inside


def _batch_on_the_host() -> tuple[Any, str, Any]:
    """Micro-batches that stay where they came from."""
    from hetrl.runtime.megatron import passes

    sound, host = passes.cut, torch.device("cpu")
    return passes, "cut", lambda batch, parts, _, **how: sound(batch, parts, host, **how)


def _gradients_stay() -> tuple[Any, str, Any]:
    """Gradients that stay on the device while others have it."""
    from hetrl.runtime.megatron import offload

    return offload, "_gradients", lambda model: []


def _padded() -> tuple[Any, str, Any]:
    """Sequences that are padded to the longest of the batch."""
    from hetrl.runtime.megatron import passes

    sound = passes.cut

    def cut(batch: Any, *arguments: Any, **how: Any) -> Any:
        longest = numpy.full_like(batch.lengths, batch.lengths.max())
        return sound(replace(batch, lengths=longest), *arguments, **how)

    return passes, "cut", cut


def _one_world() -> tuple[Any, str, Any]:
    """All replicas of an inference in one world."""
    from hetrl.runtime.wire import members

    return members, "worlds", lambda name, task: (task,)


DEFECTS: Mapping[str, Callable[[], tuple[Any, str, Any]]] = {
    "a world without gloo": _nccl_only,
    "a batch on the host": _batch_on_the_host,
    "gradients that stay": _gradients_stay,
    "padded sequences": _padded,
    "one world for unequal replicas": _one_world,
}
