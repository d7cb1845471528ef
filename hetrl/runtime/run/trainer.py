"""One rank of a Megatron task: `python -m hetrl.runtime.run.trainer SITE_DIRECTORY --task actor_training --rank 0`.

Rank 0 of its world is the world's member in the run. It shares each request with the other ranks, all of them execute
it, and rank 0 answers:

    Score    log-probs of sequences under the current weights
    Train    one optimiser step on one minibatch
    Save     copy the state, which is then written to the site's disk beside what follows; FinishSave makes it whole
    Restore  take up a state that was saved, by this run or by one that it goes on from
    Publish  copy the weights and stream them to the generation replicas beside what follows; FinishPublish waits until
             all of them serve them; CatchUp brings those that are behind to the newest
    Sleep    leave the devices to another task, as the plan's idle state says, until Wake
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hetrl.runtime.garbage import uncollected

with uncollected():
    import torch

    from hetrl.describe.models import model_of
    from hetrl.errors import HetrlError
    from hetrl.gpus import is_cpu
    from hetrl.runtime import wire
    from hetrl.runtime.checkpoints.files import SAMPLES, keep_last
    from hetrl.runtime.checkpoints.places import CheckpointPlaces, places_of
    from hetrl.runtime.hang import HangWatch
    from hetrl.runtime.megatron.engine import MegatronEngine
    from hetrl.runtime.megatron.model import kernels
    from hetrl.runtime.run.context import Context, answer_requests, exit_with, log_to_stderr, read_context
    from hetrl.runtime.run.engines import build_engine
    from hetrl.runtime.run.world import execute, follow, following, share, share_tensors
    from hetrl.runtime.transport.member import Envelope, Member
    from hetrl.runtime.vllm.loading import tensors_of
    from hetrl.runtime.wan.world import start_wan_world, stop_wan_world
    from hetrl.runtime.weights import safetensors_file
    from hetrl.runtime.weights.intake import Intake
    from hetrl.runtime.weights.publications import Publications
    from hetrl.runtime.weights.publisher import Publisher
    from hetrl.runtime.weights.weight_file import WeightFile, most_bytes
    from hetrl.runtime.wire.arrays import pack
    from hetrl.runtime.wire.members import World
    from hetrl.workload import architecture


def join_world(context: Context, world: World, rank: int, device: int) -> None:
    """Meet the other ranks of the world; `device` is this rank's among the GPUs that it sees."""
    if not is_cpu(context.gpus[world.plan.rank_order()[rank]]):
        torch.cuda.set_device(device)
    launch = context.experiment.launch
    start_wan_world(
        context.member(world.task + wire.RANK, world.first + rank),
        world.ranks,
        rank,
        timeout_seconds=launch.start_seconds,
        collective_seconds=launch.walltime_seconds,  # the other ranks wait for rank 0's next request in one
        watcher=context.controller,
    )


class Lead:
    """Rank 0: the member of the run that speaks for the world; engine calls run in one thread beside the event loop."""

    def __init__(
        self,
        member: Member,
        engine: MegatronEngine,
        thread: ThreadPoolExecutor,
        weights: Intake,
        places: CheckpointPlaces,
        watch: HangWatch,
    ) -> None:
        self._member, self._engine, self._thread, self._incoming = member, engine, thread, weights
        self._places, self._watch = places, watch
        self._version = 0  # of the weights that arrived and are loaded
        self._publications = Publications(member)

    async def serve(self) -> None:
        """Answer requests until the run finishes or is aborted; a request that fails is answered with its cause."""
        try:
            await answer_requests(self._member, self._answer)
        finally:
            await self._publications.close()
        await self._in_thread(share, wire.Finish())

    async def _answer(self, envelope: Envelope) -> None:
        message, start = envelope.message, time.monotonic()
        match message:
            case wire.Score(step=step):
                scores = await self._execute(message, envelope.buffers)
                specs, buffers = pack({"scores": scores})
                seconds = time.monotonic() - start
                scored = wire.Scored(step=step, arrays=specs, seconds=seconds, version=self._version)
                await self._member.reply(envelope, scored, buffers)
            case wire.Train(step=step):
                metrics = await self._execute(message, envelope.buffers)
                trained = wire.Trained(step=step, metrics=metrics, seconds=time.monotonic() - start)
                await self._member.reply(envelope, trained)
            case wire.Save() | wire.FinishSave() | wire.Restore():
                await self._member.reply(envelope, *await self._checkpoint(message, envelope.buffers))
            case wire.Publish():
                exported = await self._publications.begin(message, partial(self._in_thread, self._export, message))
                await self._member.reply(envelope, exported)
            case wire.FinishPublish():
                self._publications.finish(envelope, message)
            case wire.CatchUp():
                self._publications.catch_up(envelope, message)
            case wire.WeightsBegin():
                await self._incoming.begin(message)
            case wire.WeightsTensor():
                await self._incoming.add(message, envelope.buffers[0])
            case wire.WeightsEnd(version=version):
                try:
                    path, digest = await self._incoming.end(message)
                except HetrlError as error:
                    await self._member.reply(envelope, wire.WeightsRejected(version=version, cause=str(error)))
                    return
                await self._in_thread(self._load, message, path)
                self._version = version
                seconds = time.monotonic() - start
                applied = wire.WeightsApplied(version=version, digest=digest, seconds=seconds)
                await self._member.reply(envelope, applied)
            case wire.Sleep() | wire.Wake():
                await self._execute(message, ())
                await self._member.reply(envelope, wire.Done())
            case _:
                raise HetrlError(f"a Megatron task cannot do {type(message).__name__}")

    async def _checkpoint(
        self, message: wire.Save | wire.FinishSave | wire.Restore, buffers: Sequence[memoryview]
    ) -> tuple[wire.Saved | wire.Restored, list[bytes]]:
        """Do what a request about checkpoints asks for, and return the answer."""
        start = time.monotonic()
        if isinstance(message, wire.Restore):
            self._publications.forget()
            kept = await self._execute(message, ())
            samples = await self._in_thread(self._places.read, message.step, SAMPLES)
            restored = wire.Restored(step=message.step, version=kept["version"], progress=kept.get("progress", ""))
            return restored, [samples]
        whole = bool(await self._execute(message, buffers))
        if isinstance(message, wire.FinishSave) and whole:
            await self._in_thread(keep_last, self._places.own, message.keep, message.keep_gb, message.spared)
        directory, seconds = str(self._places.written(message.step)), time.monotonic() - start
        return wire.Saved(step=message.step, directory=directory, seconds=seconds, whole=whole), []

    async def _execute(self, message: wire.Message, buffers: Iterable[bytes | memoryview]) -> Any:
        def shared() -> Any:
            return execute(self._engine, *share(message, list(buffers)), places=self._places, watch=self._watch)

        return await self._in_thread(shared)

    def _export(self, message: wire.Publish, publisher: Publisher) -> None:
        share(message)
        publisher.take(self._engine.export())

    def _load(self, message: wire.WeightsEnd, path: Path) -> None:
        share(message)
        self._engine.load(share_tensors(tensors_of(path, safetensors_file.places_of(path), torch.device("cpu"))))

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def watch_of(context: Context, world: World, rank: int) -> HangWatch:
    """Return what ends this rank when it hangs."""
    seconds = context.experiment.launch.hang_timeout_seconds
    return HangWatch(seconds, f"{context.site}: {world.task} rank {world.first + rank}")


async def lead(context: Context, world: World, device: int) -> None:
    """Join the run as rank 0 of a world: meet the other ranks, build the engine, say READY, serve."""
    async with context.joined(world.task, world.number) as member:
        # One thread: collectives have one order on all ranks.
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(thread, join_world, context, world, 0, device)
            turn = await context.first_turn(member, world.task)
            if turn is not None:
                await loop.run_in_executor(thread, share, wire.Wake())
            engine = await loop.run_in_executor(thread, build_engine, context, world, 0)
            logging.getLogger(__name__).info("%s", kernels(engine.optimizer))
            engines = {"megatron-core": importlib.metadata.version("megatron-core"), "torch": str(torch.__version__)}
            ready = wire.Join(
                ranks=engine.layout.world_size, host=socket.gethostname(), pid=os.getpid(), engines=engines
            )
            await member.send(context.controller, ready)
            if turn is not None:
                await member.reply(turn, wire.Done())
            most = most_bytes(architecture(model_of(context.experiment, world.task).architecture))
            places = places_of(world.task, context.continues, world.beside(0))
            with context.versions_of(world) as directory:
                weights = Intake(WeightFile(directory, most))
                await Lead(member, engine, thread, weights, places, watch_of(context, world, 0)).serve()
            await loop.run_in_executor(thread, engine.close)


def main() -> int:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.run.trainer")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--task", required=True)
    parser.add_argument("--rank", type=int, required=True, help="counted through all worlds of the task")
    parser.add_argument("--device", type=int, default=0, help="this rank's among the GPUs that it sees")
    arguments = parser.parse_args()
    log_to_stderr()
    # What torch and megatron deprecate among themselves would bury a run's own words in its log.
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
    try:
        context = read_context(arguments.directory)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        world, rank = context.place(arguments.task, arguments.rank)
        if rank == 0:
            asyncio.run(lead(context, world, arguments.device))
        else:
            join_world(context, world, rank, arguments.device)
            with following(rank):
                if context.takes_turns(world.task):
                    share(None)  # rank 0 was told that the devices are ours
                engine = build_engine(context, world, rank)
                places = places_of(world.task, context.continues, world.beside(rank))
                follow(engine, places, watch_of(context, world, rank))
                engine.close()
    except HetrlError as error:
        return exit_with(error)
    finally:
        stop_wan_world()
    return 0


if __name__ == "__main__":
    sys.exit(main())
