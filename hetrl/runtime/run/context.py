"""What a process of a run knows at its start: the files that were staged in its site's own directory.

config.yaml   the experiment          plan.json   the plan
site.json     run, site, lead_site, bind (the gateway's endpoint; none: it is in gateway.endpoint), gpus, held,
              goes_on (whether this run does so from another one), continues (this site's directories of those, the
              latest first)
keys.json     the site's CURVE keys (0600)
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hetrl.describe.experiment import Experiment
from hetrl.describe.models import model_of
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError
from hetrl.plan.document import read_plan
from hetrl.plan.plan import Plan
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.keeper import Keeper, room_of
from hetrl.runtime.checkpoints.places import EarlierRun, places_of
from hetrl.runtime.garbage import collect_rarely
from hetrl.runtime.rl.turns import Party
from hetrl.runtime.transport.member import Envelope, Member, RunAborted
from hetrl.runtime.transport.rendezvous import GATEWAY_ENDPOINT, wait_for_endpoint
from hetrl.runtime.wire.keys import read_keys
from hetrl.runtime.wire.members import World, addresses_of, keepers_of, worlds_of
from hetrl.workload import ACTOR_GENERATION, TRAININGS, Architecture, architecture

HEARTBEAT_SECONDS = 5.0
WORD_SECONDS = 10.0  # between two of the controller's to a member
GENERATION = ACTOR_GENERATION


@dataclass(frozen=True)
class Context:
    """One site's view of the run."""

    directory: Path
    run: str
    site: str
    lead_site: str
    gateway: str
    gpus: Mapping[str, str]  # device of the plan -> catalogue GPU
    held: Mapping[str, int]  # site -> devices that the jobs hold there, the idle ones of granted nodes too
    experiment: Experiment
    plan: Plan
    continues: tuple[EarlierRun, ...] = ()
    goes_on: bool = False

    @property
    def controller(self) -> str:
        """Return the controller's address."""
        return wire.address(self.lead_site, wire.CONTROLLER)

    @cached_property
    def architecture(self) -> Architecture:
        """Return the policy's shape."""
        return architecture(self.experiment.model.architecture)

    def member(self, role: str, instance: int = 0) -> Member:
        """Return the member of this role at this site, not yet connected."""
        keys = read_keys(self.directory / "keys.json")
        return Member(wire.address(self.site, role, instance), self.run, self.gateway, keys, self.directory)

    @asynccontextmanager
    async def joined(self, role: str, instance: int = 0) -> AsyncIterator[Member]:
        """Connect a member that says to the controller that it lives and, should it fail, why.

        It ends where the controller says nothing for `launch.orphan_timeout`, behind the start of the gang at first.
        """
        launch = self.experiment.launch
        async with self.member(role, instance) as member, self._keeping(member.address):
            member.start_heartbeat(lambda: (self.controller,), HEARTBEAT_SECONDS)
            orphan_seconds = launch.orphan_timeout_seconds
            member.expect_word_of(self.controller, orphan_seconds, launch.start_seconds + orphan_seconds)
            try:
                yield member
            except RunAborted:
                raise
            except HetrlError as error:
                await member.send(self.controller, wire.Failed(cause=str(error), exit_code=error.exit_code))
                raise

    @asynccontextmanager
    async def _keeping(self, address: str) -> AsyncIterator[None]:
        """Have a keeper of this site's checkpoints beside a member, where some may move; its end ends nothing."""
        settings = self.experiment.checkpoints
        if not (settings.copy_to or self.goes_on):
            yield
            return
        keeper = keepers_of(self.plan)[address]
        trained = (model_of(self.experiment, task) for task in TRAININGS if task in self.plan.tasks)
        parameters = max(architecture(model.architecture).parameters for model in trained)
        room = room_of(parameters, settings.keep, settings.keep_gb)
        async with self.member(wire.role_of(keeper), int(keeper.rpartition("/")[2])) as member:
            task = asyncio.create_task(Keeper(member, partial(places_of, earlier=self.continues), room).serve())
            task.add_done_callback(_say_why)
            try:
                yield
            finally:
                task.cancel()

    def planned_seconds(self, task: str) -> float:
        """Return what the plan counts on for a task, in seconds of this run: emulated engines have their own time."""
        return self.plan.predicted.tasks.get(task, 0.0) / self.experiment.launch.emulation.speed

    @contextmanager
    def versions_of(self, world: World) -> Iterator[Path]:
        """Give the directory in which rank 0 of a world has weight versions; at the end it is removed."""
        directory = self.directory / f"weights-{world.task}-{world.number}"
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def worlds(self, task: str) -> tuple[World, ...]:
        """Return the worlds of a Megatron task."""
        return worlds_of(self.plan, task)

    def place(self, task: str, rank: int) -> tuple[World, int]:
        """Return the world of a rank of a Megatron task, and its rank there."""
        world = next(world for world in reversed(self.worlds(task)) if world.first <= rank)
        return world, rank - world.first

    async def first_turn(self, member: Member, task: str) -> Envelope | None:
        """Wait, before a task starts, until its devices are its own; returns what is to be answered then, if any."""
        if not self.takes_turns(task):
            return None
        while True:
            envelope = await member.receive()
            if isinstance(envelope.message, wire.Wake):
                return envelope

    @cached_property
    def replicas(self) -> tuple[str, ...]:
        """Return the addresses of the generation replicas, in the plan's order."""
        return self.addresses(GENERATION)

    @property
    def start_with(self) -> int:
        """Return how many generation replicas are enough for the run to begin."""
        enough = self.experiment.launch.start_with
        return len(self.replicas) if enough == "all" or self.takes_turns(GENERATION) else enough

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Return everyone that takes part in the run."""
        return tuple(address for task in self.plan.tasks for address in self.addresses(task))

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Return the addresses of all ranks of the Megatron tasks."""
        tasks = (task for task in self.plan.tasks if task != GENERATION)
        return tuple(rank for task in tasks for world in self.worlds(task) for rank in world.ranks)

    def takes_turns(self, task: str) -> bool:
        """Return whether other tasks of the plan compute on the devices of this one."""
        return any(task in group for group in self.shared_groups)

    def in_array(self, task: str) -> bool:
        """Return whether each replica of a task is started, and started again, apart from all others."""
        return any(task in group.tasks and group.job == "array" for group in self.plan.groups)

    @cached_property
    def shared_groups(self) -> tuple[dict[str, Party], ...]:
        """Return the groups whose tasks take turns."""
        idle_states = {name: task.idle_state for name, task in self.plan.tasks.items()}
        return tuple(
            {name: Party(self.addresses(name), idle_states[name]) for name in group.tasks}
            for group in self.plan.groups
            if len(group.tasks) > 1
        )

    def addresses(self, task: str) -> tuple[str, ...]:
        """Return the members of a task: the replicas of generation, the worlds of a Megatron task."""
        return addresses_of(self.plan, task)


async def answer_requests(member: Member, answer: Callable[[Envelope], Awaitable[None]]) -> None:
    """Answer a world's requests until the run finishes or is aborted; one that fails is answered with its cause."""
    while True:
        envelope = await member.receive()
        match envelope.message:
            case wire.Finish():
                return
            case wire.Go() | wire.Done() | wire.Undeliverable():  # the last: who waited for it was told
                continue
        try:
            await answer(envelope)
        except HetrlError as error:
            await member.reply(envelope, wire.Failed(cause=str(error), exit_code=error.exit_code))


def _say_why(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        logging.getLogger(__name__).warning("the keeper of checkpoints ended", exc_info=error)


def read_context(directory: Path) -> Context:
    """Read a site's directory; where the gateway's address is not known beforehand, wait until the gateway says it.

    Raises GangTimeoutError where it does not.
    """
    site = json.loads((directory / "site.json").read_text())
    experiment = read_yaml(directory / "config.yaml", Experiment)
    gateway = site["bind"]
    if gateway is None:
        timeout_seconds = experiment.launch.start_seconds
        gateway = wait_for_endpoint(directory / GATEWAY_ENDPOINT, timeout_seconds, f"the gateway of {site['site']}")
    return Context(
        directory=directory,
        run=site["run"],
        site=site["site"],
        lead_site=site["lead_site"],
        gateway=gateway,
        gpus=site["gpus"],
        held=site["held"],
        experiment=experiment,
        plan=read_plan(directory / "plan.json"),
        continues=tuple(map(EarlierRun.from_json, site["continues"])),
        goes_on=site["goes_on"],
    )


def log_to_stderr() -> None:
    """Log with time and level to stderr, which the launcher keeps as the process's log."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def exit_with(error: HetrlError) -> int:
    """Print an error as the last line of the log and return its exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def run_members(directory: Path, serve: Callable[[Context], Coroutine[Any, Any, None]]) -> int:
    """Let a process of a site serve to its end, several members side by side or one; return its exit code."""
    collect_rarely()
    try:
        asyncio.run(serve(read_context(directory)))
    except HetrlError as error:
        return exit_with(error)
    except ExceptionGroup as group:
        return exit_with(_first_error(group))
    return 0


def _first_error(group: BaseException) -> HetrlError:
    """Return the first error inside an exception group; anything but a HetrlError is a defect and raised."""
    error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, HetrlError):
        raise error
    return error
