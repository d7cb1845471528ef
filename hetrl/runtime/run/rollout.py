"""One generation replica: `python -m hetrl.runtime.run.rollout SITE_DIRECTORY --replica 0`.

The agent starts a vLLM server on its devices, joins the run and passes on what arrives:

    Generate, Withdraw          sample continuations of one prompt (many at a time), or give that up
    WeightsBegin/Tensor/End     write a version to a file on this node, check it, let vLLM load it
    Sleep, Wake                 leave the devices to other tasks of the group, as the plan's idle state says
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from hetrl.errors import HetrlError
from hetrl.gpus import is_cpu
from hetrl.runtime import wire
from hetrl.runtime.run.context import GENERATION, Context, log_to_stderr, run_members
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.vllm.idle import Idle
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.runtime.weights.node_directory import name_for, node_directory
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES
from hetrl.runtime.weights.weight_file import WeightFile, most_bytes

UPDATE_SECONDS = 600.0
LOG_LINES = 60


def settings_of(context: Context, replica: int, scratch: Path) -> VllmSettings:
    """Return how this replica's server is started, from the plan and the experiment."""
    experiment, planned = context.experiment, context.plan.tasks[GENERATION].replicas[replica]
    directory = ensure_model_directory(experiment.model, context.architecture, scratch / "model")
    return VllmSettings(
        model_directory=directory.path,
        dtype="float32" if experiment.model.dtype == "fp32" else "bfloat16",
        tensor_parallel=len(planned.stages[0].devices),
        stage_layers=tuple(last - first for first, last in (stage.layers for stage in planned.stages)),
        kv_cache_bytes=planned.kv_cache_bytes,
        max_sequences=planned.max_sequences,
        max_model_tokens=experiment.batch.prompt_tokens + experiment.batch.response_tokens,
        load_format="auto" if directory.weights else "dummy",
        device="cpu" if is_cpu(context.gpus[planned.devices[0]]) else "cuda",
        seed=experiment.seed,
        hang_seconds=experiment.launch.hang_timeout_seconds,
        idle_state=context.plan.tasks[GENERATION].idle_state if context.takes_turns(GENERATION) else "resident",
    )


@dataclass(frozen=True)
class _Version:
    """A version of the weights in a file on this node, whose digest is proven."""

    number: int
    path: Path


class Server(Protocol):
    """What an agent needs of a server that draws samples; `VllmServer` says what each does."""

    @property
    def versions(self) -> dict[str, str]:
        """The engine and its version."""

    @property
    def ended(self) -> bool:
        """Return whether it ended by itself, so that nothing more can be asked of it."""

    async def generate(
        self, prompt: Sequence[int], sampling: wire.Sampling, timeout_seconds: float, since: int | None
    ) -> tuple[wire.Sample, ...]:
        """Return continuations of a prompt of token ids, of which some were drawn `since` a version."""

    async def update_weights(self, version: int, path: Path, timeout_seconds: float, *, recompute: bool) -> None:
        """Load a version while requests are held, then serve it."""

    async def pause(self, *, forget: bool) -> None:
        """Hold all requests where they are; with `forget` the keys and values of all contexts are dropped."""

    async def load_weights(self, version: int, path: Path, timeout_seconds: float) -> None:
        """Load a version into a server that is paused."""


class Rest(Protocol):
    """What a server does while other tasks have its devices; `Idle` says what each does."""

    @property
    def asleep(self) -> bool:
        """Return whether the server sleeps."""

    async def sleep(self, idle_state: str, *, keep_weights: bool) -> bool:
        """Free what `idle_state` says; return whether the server still has its weights."""

    async def wake(self, load: Callable[[], Awaitable[None]]) -> None:
        """Take the devices back and let requests continue."""


class ServerEndedError(HetrlError):
    """A server ended while its agent served, which ends like a process that is killed: it is started again."""

    exit_code = 128 + signal.SIGKILL


class Agent:
    """Answers the run for one server; `goes_with_it`: raises ServerEndedError, having said so, where that has ended."""

    def __init__(
        self, member: Member, server: Server, idle: Rest, weights: Intake, *, recompute: bool, goes_with_it: bool
    ) -> None:
        self._member, self._server, self._idle = member, server, idle
        self._weights, self._recompute, self._goes_with_it = weights, recompute, goes_with_it
        self._newest: _Version | None = None
        self._current = True  # the server has the newest version
        self._keeps_contexts = False  # through the sleep that it is in, or was
        self._drawing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer until the run finishes or is aborted; generations run concurrently, weights come in order."""
        async with asyncio.TaskGroup() as generations:
            while True:
                envelope = await self._member.receive()
                match envelope.message:
                    case wire.Finish():
                        for task in self._drawing.values():
                            task.cancel()
                        return
                    case wire.Generate(draw=draw):
                        task = self._drawing[draw] = generations.create_task(self._answer(envelope))
                        task.add_done_callback(partial(self._drawn, draw))
                    case wire.Withdraw(draw=draw) if draw in self._drawing:
                        self._drawing[draw].cancel()  # which closes its connection, and so ends it at the server
                    case wire.WeightsBegin() | wire.WeightsTensor() | wire.WeightsEnd() | wire.Sleep() | wire.Wake():
                        await self._answer(envelope)

    def _drawn(self, draw: int, _: asyncio.Task[None]) -> None:
        del self._drawing[draw]

    async def _answer(self, envelope: Envelope) -> None:
        """Do one thing; its failure is an answer, not the end of the agent."""
        try:
            match envelope.message:
                case wire.Generate():
                    await self._generate(envelope, envelope.message)
                case wire.WeightsBegin():
                    await self._weights.begin(envelope.message)
                case wire.WeightsTensor():
                    await self._weights.add(envelope.message, envelope.buffers[0])
                case wire.WeightsEnd():
                    await self._apply(envelope, envelope.message)
                case wire.Sleep(idle_state=state, keep_weights=keep):
                    self._keeps_contexts = state == "resident"
                    self._current = await self._idle.sleep(state, keep_weights=keep) and self._current
                    await self._member.reply(envelope, wire.Done())
                case wire.Wake():
                    await self._idle.wake(self._load)
                    await self._member.reply(envelope, wire.Done())
        except HetrlError as error:
            await self._member.reply(envelope, wire.Failed(cause=str(error), exit_code=error.exit_code))
            if self._goes_with_it and self._server.ended:
                raise ServerEndedError(str(error)) from None

    async def _generate(self, envelope: Envelope, request: wire.Generate) -> None:
        start = time.monotonic()
        samples = await self._server.generate(request.prompt, request.sampling, wire.WORK_SECONDS, request.since)
        answer = wire.Generated(samples=samples, seconds=time.monotonic() - start)
        await self._member.reply(envelope, answer)

    async def _apply(self, envelope: Envelope, end: wire.WeightsEnd) -> None:
        start = time.monotonic()
        try:
            path, digest = await self._weights.end(end)
        except HetrlError as error:
            await self._member.reply(envelope, wire.WeightsRejected(version=end.version, cause=str(error)))
            return
        self._newest, self._current = _Version(end.version, path), end.load and not self._idle.asleep
        if self._current:
            await self._server.update_weights(end.version, path, UPDATE_SECONDS, recompute=self._recompute)
        seconds = time.monotonic() - start
        applied = wire.WeightsApplied(
            version=end.version,
            digest=digest,
            seconds=seconds,
            node=self._weights.node,
            follows=self._weights.follows,
        )
        await self._member.reply(envelope, applied)

    async def _load(self) -> None:
        """Give a server that was asleep the newest version, where it does not have it, as `update_weights` does."""
        if self._newest is not None and not self._current:
            version = self._newest
            if self._keeps_contexts and self._recompute:
                await self._server.pause(forget=True)
            await self._server.load_weights(version.number, version.path, UPDATE_SECONDS)
        self._current = True


async def serve_replica(context: Context, replica: int) -> None:
    """Join the run as one replica: start the server, say READY, serve; the server is stopped on every way out."""
    scratch = scratch_of(context, replica)
    settings = settings_of(context, replica, scratch)
    server = VllmServer(settings, scratch, scratch / "vllm.log")
    size = context.architecture.parameters * (4 if context.experiment.model.dtype == "fp32" else 2)
    async with context.joined(GENERATION, replica) as member:
        try:
            turn = await context.first_turn(member, GENERATION)
            await start(server, context.experiment.launch.gang_timeout_seconds, scratch / "vllm.log")
            await serve(context, replica, member, turn, server, Idle(server, settings.device), size)
        finally:
            await server.stop()


def scratch_of(context: Context, replica: int) -> Path:
    """Return the directory of a replica, made."""
    scratch = context.directory / f"{GENERATION}-{replica}"
    scratch.mkdir(mode=0o700, exist_ok=True)
    return scratch


async def serve(
    context: Context,
    replica: int,
    member: Member,
    turn: Envelope | None,
    server: Server,
    idle: Rest,
    version_bytes: int,
) -> None:
    """Say that a replica is READY, and serve until the run ends; versions of its weights have so many bytes."""
    ready = wire.Join(
        ranks=len(context.plan.tasks[GENERATION].replicas[replica].devices),
        host=socket.gethostname(),
        pid=os.getpid(),
        engines=server.versions,
    )
    await member.send(context.controller, ready)
    if turn is not None:
        await member.reply(turn, wire.Done())
    name, size = name_for(context.directory), version_bytes + HEADER_BYTES
    with node_directory(name, size, replica, scratch_of(context, replica)) as (directory, share):
        weights = Intake(WeightFile(directory, most_bytes(context.architecture)), share)
        recompute = context.experiment.algorithm.renews_contexts
        alone = context.in_array(GENERATION)
        await Agent(member, server, idle, weights, recompute=recompute, goes_with_it=alone).serve()


async def start(server: VllmServer, timeout_seconds: float, log: Path) -> None:
    """Start the server; when it fails, the end of its log goes to ours, which the launcher shows."""
    try:
        await server.start(timeout_seconds)
    except HetrlError:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        print(f"the end of {log.name}:", *lines, sep="\n", file=sys.stderr)
        raise


def main() -> int:
    """Run one replica."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.run.rollout")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--replica", type=int, required=True)
    arguments = parser.parse_args()
    log_to_stderr()
    return run_members(arguments.directory, lambda context: serve_replica(context, arguments.replica))


if __name__ == "__main__":
    sys.exit(main())
