"""Worlds of processes in which the tests run the training engine.

The processes live as long as a test session and join one world after the other, so that megatron is imported once.
"""

from __future__ import annotations

import gc
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from hetrl.errors import HetrlError
from hetrl.runtime.garbage import uncollected
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.hf_weights import random_weights
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.optimizer import OptimizerSettings
from hetrl.runtime.wire import LossSettings
from launch.ports import free_ports

LARGEST_WORLD = 4
START_SECONDS, ANSWER_SECONDS = 240.0, 120.0
LAYERS = ((0, 4),)
UNEQUAL = ((0, 1), (1, 4))
LAYOUTS = {
    "one": Layout(1, LAYERS, (8,), 2),
    "tensor": Layout(2, LAYERS, (8,), 2),
    "pipeline": Layout(1, UNEQUAL, (8,), 2),
    "three-stages": Layout(1, ((0, 1), (1, 3), (3, 4)), (8,), 2),
    "data": Layout(1, LAYERS, (6, 2), 2),
    "tensor-pipeline": Layout(2, UNEQUAL, (8,), 2),
    "data-pipeline": Layout(1, UNEQUAL, (6, 2), 2),
    "tensor-data": Layout(2, LAYERS, (2, 6), 2),
    "micro-batch-1": Layout(1, LAYERS, (5, 3), 1),
    "micro-batch-4": Layout(1, UNEQUAL, (8,), 4),
}
# A large eps keeps Adam's first steps a smooth function of the gradient, so that rounding stays rounding.
ADAM = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, eps=1e-4, clip_grad=0.5)


def model_config(kind: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """Return the configuration of a tiny model: 4 layers, 4 heads on 2 key-value heads, 128 tokens."""
    config = {
        "model_type": kind,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    return config | changes


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    """Fail unless both hold the same tensors up to an absolute difference."""
    assert left.keys() == right.keys()
    for name in left:
        assert float((left[name] - right[name]).abs().max()) <= tolerance, name


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the HetrlError that a call ends with."""
    try:
        call()
    except HetrlError as error:
        return str(error)
    return "no error"


def weights(config: dict[str, Any], seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights whose norms and biases are random too."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in random_weights(config, seed):
        noise = 0.1 * torch.randn(tensor.shape, generator=generator) if tensor.ndim == 1 else 0.0
        yield name, tensor + noise


def token_batch(samples: int = 8, width: int = 14, vocabulary: int = 128, seed: int = 0) -> TokenBatch:
    """Return random sequences of 6 to width - 2 tokens with 3 prompt tokens, as a policy step needs them."""
    random = numpy.random.default_rng(seed)
    lengths = random.integers(6, width - 1, samples)
    columns = numpy.arange(width)[None, :]
    mask = (columns >= 3) & (columns < lengths[:, None])
    extras = {
        "old_logprobs": -random.uniform(4.0, 6.0, mask.shape),
        "reference_logprobs": -random.uniform(4.0, 6.0, mask.shape),
        "advantages": random.normal(size=mask.shape),
    }
    tokens = random.integers(0, vocabulary, mask.shape)
    return TokenBatch(tokens, lengths, mask, {name: array.astype(numpy.float32) for name, array in extras.items()})


SETTINGS = LossSettings(kl_coefficient=0.1, clip_high=0.3)


@dataclass(frozen=True)
class Job:
    """What an engine does in one world: load, score, take the steps, export."""

    config: dict[str, Any]
    layout: Layout
    batch: TokenBatch
    settings: LossSettings = SETTINGS
    steps: int = 0
    optimizer: OptimizerSettings | None = None
    dtype: str = "float32"
    recompute: str = "none"
    recompute_layers: int | None = None
    temperature: float = 1.0


def step_job(
    config: dict[str, Any],
    layout: Layout,
    distributed: bool = True,
    bucket_parameters: int | None = None,
    **changes: Any,
) -> Job:
    """Return the job of two policy steps."""
    optimizer = replace(ADAM, distributed=distributed, bucket_parameters=bucket_parameters)
    return Job(config, layout, token_batch(), steps=2, optimizer=optimizer, **changes)


@dataclass(frozen=True)
class Outcome:
    """What rank 0 saw: scores before the steps, metrics of each step, the weights before and after.

    `gradients` are those of the first step, clipped; empty where none was taken.
    """

    scores: Any
    metrics: list[dict[str, float]]
    loaded: dict[str, torch.Tensor]
    exported: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    agreed: bool  # all ranks returned the same metrics


def run_job(rank: int, port: int, job: Job) -> Outcome:
    """Run a job on one rank."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    loaded = dict(engine.export())
    scores = engine.score(job.batch, job.temperature)
    metrics, gradients = [], {}
    for step in range(job.steps):
        metrics.append(engine.train_step(job.batch, job.settings))
        if step == 0:
            gradients = first_gradients(engine, rank)
    exported = dict(engine.export())
    everywhere: list[Any] = [None] * job.layout.world_size
    torch.distributed.all_gather_object(everywhere, metrics)
    agreed = all(other == metrics for other in everywhere)
    engine.close()
    return Outcome(scores, metrics, loaded, exported, gradients, agreed)


def first_gradients(engine: Any, rank: int) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step on rank 0: Adam's first moments are then (1 - beta1) of them."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "step-1"  # every rank has one; that of rank 0 counts
        engine.save(directory, {})
        engine.finish_save()
        moments = written(directory, "exp_avg") if rank == 0 else {}
    return {name: moment / (1.0 - engine.settings.beta1) for name, moment in moments.items()}


def written(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors that the ranks wrote in slices, each value once; NaN where nobody wrote."""
    model = {}
    for path in sorted(directory.glob("model-*.safetensors")):
        model |= load_file(path)
    result = {name: torch.full(tensor.shape, torch.nan) for name, tensor in model.items()}
    for path in sorted(directory.glob("optimizer-rank-*.safetensors")):
        for key, values in load_file(path).items():
            if not key.startswith(f"{kind}/"):
                continue
            name, box = key.removeprefix(f"{kind}/").removesuffix("]").split("[")
            place = tuple(slice(*map(int, part.split(":"))) for part in box.split(", "))
            assert result[name][place].isnan().all(), f"{key} of {path.name} was written before"
            result[name][place] = values
    return result


def store_at(rank: int, port: int) -> torch.distributed.Store:
    """Return a store that rank 0 holds."""
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


_started: list[Any] = []  # engines of the job that runs in this process


def let_go_later(engine: Any) -> Any:
    """Return an engine of a job, of which nothing is left when the job has ended, closed or not."""
    _started.append(engine)
    return engine


def start_engine(rank: int, port: int, job: Job) -> Any:
    """Join the world of a job and build its engine."""
    from hetrl.runtime.megatron.engine import MegatronEngine, start_world

    start_world(rank, job.layout.world_size, store_at(rank, port), 60.0, "cpu")
    engine = MegatronEngine(
        job.config,
        job.layout,
        rank=rank,
        dtype=job.dtype,
        optimizer=job.optimizer,
        seed=0,
        recompute=job.recompute,
        recompute_layers=job.recompute_layers,
        timeout_seconds=60.0,
    )
    return let_go_later(engine)


def _serve(rank: int, connection: Connection) -> None:
    """Run what arrives, in a world that is left afterwards, and answer with the result or with the error."""
    with uncollected():  # nor looked at behind each job: modules are a third of a second of that
        from hetrl.runtime.megatron.engine import stop_world

    torch.set_num_threads(1)
    connection.send("ready")
    while (work := connection.recv()) is not None:
        function, port, argument = work
        try:
            answer: Any = (True, function(rank, port, argument))
        except HetrlError as error:
            answer = (False, error)
        except Exception:
            answer = (False, AssertionError(traceback.format_exc()))
        finally:
            stop_world()
            _forget_groups()
        connection.send(answer)


def _forget_groups() -> None:
    """Drop megatron's groups: those of engines that no job closed have sixteen threads each, which look for peers."""
    from megatron.core import parallel_state

    from hetrl.runtime.megatron.optimizer import detach_hooks

    for engine in _started:
        if engine.model is not None:
            detach_hooks(engine.model)
    _started.clear()
    parallel_state.destroy_model_parallel()
    gc.collect()


class Worlds:
    """Processes that run a function as the ranks of a world."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.connections: list[Any] = []
        self.processes = []
        for rank in range(LARGEST_WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        for rank, connection in enumerate(self.connections):
            assert connection.poll(START_SECONDS), f"rank {rank} did not start in {START_SECONDS:g} s"
            assert connection.recv() == "ready"

    def run(self, function: Callable[[int, int, Any], Any], size: int, argument: Any) -> list[Any]:
        """Return what each rank returned; raise the first HetrlError of a rank, or every defect.

        Where one rank had a defect, as when the store ended with another rank while this one met the others, ranks may
        count their groups differently: the next world is one of other processes.
        """
        (port,) = free_ports(1)
        for rank in range(size):
            self.connections[rank].send((function, port, argument))
        answers = [*self._answers(size)]
        failed = {rank: result for rank, (good, result) in enumerate(answers) if not good}
        if any(isinstance(error, AssertionError) for error in failed.values()):
            for process in self.processes:
                process.kill()
            self._start()
        for error in failed.values():
            if isinstance(error, HetrlError):
                raise error
        assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
        return [result for _, result in answers]

    def outcome(self, job: Job) -> Outcome:
        """Run a job and return what rank 0 saw."""
        result: Outcome = self.run(run_job, job.layout.world_size, job)[0]
        return result

    def _answers(self, size: int) -> Iterator[tuple[bool, Any]]:
        """Yield what each rank answers; behind one that does not, nobody else is waited for."""
        patience_seconds = ANSWER_SECONDS
        for rank, connection in enumerate(self.connections[:size]):
            if connection.poll(patience_seconds):
                yield connection.recv()
            else:
                patience_seconds = 0.0
                yield False, AssertionError(f"rank {rank} did not answer in {ANSWER_SECONDS:g} s")

    def close(self) -> None:
        """End the processes."""
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join(10.0)
            process.kill()
