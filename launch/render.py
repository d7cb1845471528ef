"""From a plan to the jobs of every site: one pure function.

    for each site, the lead site first:
        gang   = the gateway, the controller (lead site), every rank of the Megatron tasks there,
                 and the generation replicas of groups that share devices with them
        arrays = the generation replicas of array groups, one array per GPU type and number of GPUs

    with emulated engines, a site's gang has one process in the place of all ranks and replicas, and there are no arrays

A process starts in its site's directory, which it names as `.`; an executor replaces the word `python` by the site's
interpreter. Everything else that a process needs lies in that directory or in its environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from hetrl.errors import UsageError
from hetrl.gpus import is_cpu
from hetrl.plan.plan import Plan, TaskPlan, node_of, site_of, worlds
from hetrl.runtime.wire import CONTROLLER, GATEWAY
from hetrl.workload import ACTOR_GENERATION

EMULATED = "emulated"  # the role of the process that has all ranks and replicas of a site
GANG = "gang"
ARRAY = "array"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOOPBACK = "lo"  # what all processes of one Linux machine share, and nobody else


@dataclass(frozen=True)
class Process:
    """One process: GATEWAY, CONTROLLER, EMULATED, or by the task that is its role a rank or a generation replica.

    `rank` counts through all worlds of the task, or is the number of the replica; `devices` are those that it computes
    on, at the slot `node`. `world` are the devices of all ranks of its world, in rank order; empty where it is none.
    """

    role: str
    rank: int | None
    devices: tuple[str, ...]
    world: tuple[str, ...]
    node: str

    @property
    def name(self) -> str:
        """Return the name within the site: `actor_training-1`."""
        return self.role if self.rank is None else f"{self.role}-{self.rank}"

    @property
    def spoken(self) -> str:
        """Return the name as messages say it: `actor_training rank 1`."""
        return self.role if self.rank is None else f"{self.role} {'rank' if self.world else 'replica'} {self.rank}"

    @property
    def visible(self) -> tuple[str, ...]:
        """Return the devices that it sees: a rank also those of its world's other ranks on the node."""
        return tuple(device for device in self.world if node_of(device) == self.node) or self.devices


@dataclass(frozen=True)
class Command:
    """What starts a process: its words, and what it adds to the environment."""

    process: Process
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `scripts/<site>/*.json`."""
        process = self.process
        return {"name": process.name, "argv": self.argv, "environment": self.environment, "node": process.node}


_Task = TypeVar("_Task", Process, Command)


@dataclass(frozen=True)
class Job(Generic[_Task]):
    """What a site starts at once (`kind` GANG) or task by task (`kind` ARRAY): processes, or their commands."""

    site: str
    name: str
    kind: str
    tasks: tuple[_Task, ...]


def render(plan: Plan, gpu_by_device: Mapping[str, str], *, emulates: bool = False) -> tuple[Job[Process], ...]:
    """Return the jobs of all sites, the lead site's first; with emulated engines where `emulates`.

    Raises UsageError for what cannot be started (`check_startable`).
    """
    check_startable(plan)
    gangs = {site: _site_processes(plan, site) for site in plan.site_order}
    if emulates:
        return tuple(
            Job(site, GANG, GANG, (*processes, replace(processes[0], role=EMULATED)))
            for site, processes in gangs.items()
        )
    arrays: dict[tuple[str, str], list[Process]] = {}
    for name, task in plan.tasks.items():
        for process in _ranks(name, task) if task.engine == "megatron" else ():
            gangs[site_of(process.node)].append(process)
    array_devices = {device for group in plan.groups if group.job == ARRAY for device in group.devices}
    for replica in _replicas(plan):
        site = site_of(replica.node)
        if array_devices.issuperset(replica.devices):
            shape = array_name(gpu_by_device[replica.devices[0]], len(replica.devices))
            arrays.setdefault((site, shape), []).append(replica)
        else:
            gangs[site].append(replica)
    jobs = [Job(site, GANG, GANG, tuple(processes)) for site, processes in gangs.items()]
    jobs += [Job(site, name, ARRAY, tuple(processes)) for (site, name), processes in arrays.items()]
    return tuple(jobs)


def commands(
    jobs: Iterable[Job[Process]], run: str, gpu_by_device: Mapping[str, str], prefixes: Mapping[str, Sequence[str]]
) -> tuple[Job[Command], ...]:
    """Return the jobs with what starts their processes, all of a site on one machine.

    `prefixes` has, by site, the words before every command.
    """
    found = []
    for job in jobs:
        prefix = prefixes[job.site]
        tasks = [
            Command(one, (*prefix, *argv_of(one)), environment_of(one, run, gpu_by_device, interface=LOOPBACK))
            for one in job.tasks
        ]
        found.append(Job(job.site, job.name, job.kind, tuple(tasks)))
    return tuple(found)


def argv_of(process: Process) -> tuple[str, ...]:
    """Return the words that a process runs."""
    if process.role == GATEWAY:
        return ("python", "-m", "hetrl.runtime.gateway.gateway_process", "--member", "gateway.json")
    if process.role == CONTROLLER:
        return ("python", "-m", "hetrl.runtime.run.controller", ".")
    if process.role == EMULATED:
        return ("python", "-m", "hetrl.runtime.emulated.site", ".")
    if process.world:
        device = process.visible.index(process.devices[0])
        words = ("--task", process.role, "--rank", str(process.rank), "--device", str(device))
        return ("python", "-m", "hetrl.runtime.run.trainer", ".", *words)
    return ("python", "-m", "hetrl.runtime.run.rollout", ".", "--replica", str(process.rank))


def environment_of(
    process: Process,
    run: str,
    gpu_by_device: Mapping[str, str],
    positions: Mapping[str, int] | None = None,
    interface: str | None = None,
) -> dict[str, str]:
    """Return what a process adds to the environment.

    `positions` counts the devices that it is granted on its node, by id; without them they are counted as in the plan.
    The ranks of a world listen for each other on the network interface `interface` (None: their backend's choice).
    """
    environment, seen = {"HETRL_RUN": run}, process.visible
    if process.world and interface:
        environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if all(is_cpu(gpu_by_device[device]) for device in seen):
        # A CPU device is one core's share of a machine, whose GPUs are not the plan's: engines take those they see.
        # Nothing is compiled for it, and a rank that does not load torch's compiler starts faster.
        return {**environment, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", VISIBLE: ""}
    numbers = (index_of(device) if positions is None else positions[device] for device in seen)
    return {**environment, VISIBLE: ",".join(map(str, numbers))}


def index_of(device: str) -> int:
    """Return the number of a device on its node."""
    return int(device.rsplit("/", 1)[1])


def check_startable(plan: Plan, start_with: Literal["all"] | int = "all") -> None:
    """Raise UsageError for a legal plan that cannot be started: a site without devices, too few rollouts to begin."""
    used = {site_of(device) for task in plan.tasks.values() for device in task.devices}
    for site in plan.site_order:
        if site not in used:
            raise UsageError(f'plan: site_order names "{site}", but no task has a device there; take it out')
    if start_with == "all":
        return
    replicas = len(plan.tasks[ACTOR_GENERATION].replicas)
    if start_with > replicas:
        raise UsageError(f"launch.start_with: {start_with} rollouts, but the plan has {replicas}; say fewer, or all")
    if any(ACTOR_GENERATION in group.tasks and len(group.tasks) > 1 for group in plan.groups):
        raise UsageError(
            "launch.start_with: in this plan generation takes turns with other tasks on their devices, so that all "
            "rollouts have to be there; set it to all, or give a plan whose rollouts have devices of their own"
        )


def _site_processes(plan: Plan, site: str) -> list[Process]:
    """Return the gateway of a site and, at the lead site, the controller; neither owns a device."""
    node = next(node_of(device) for task in plan.tasks.values() for device in task.devices if site_of(device) == site)
    roles = (GATEWAY, CONTROLLER) if site == plan.lead_site else (GATEWAY,)
    return [Process(role, None, (), (), node) for role in roles]


def _ranks(name: str, task: TaskPlan) -> Iterator[Process]:
    """Yield each rank of a Megatron task, world by world."""
    orders = [world.rank_order() for world in worlds(name, task)]
    devices = [(device, order) for order in orders for device in order]
    yield from (Process(name, rank, (one,), order, node_of(one)) for rank, (one, order) in enumerate(devices))


def _replicas(plan: Plan) -> Iterator[Process]:
    """Yield each generation replica."""
    for name, task in plan.tasks.items():
        for number, replica in enumerate(task.replicas) if task.engine == "vllm" else ():
            yield Process(name, number, replica.devices, (), node_of(replica.devices[0]))


def array_name(gpu: str, devices: int) -> str:
    """Return the name of an array of replicas on so many GPUs each, `array-l4-x2`: its tasks ask for the same."""
    return f"{ARRAY}-{gpu}" + (f"-x{devices}" if devices > 1 else "")
