"""From a plan to the jobs of every site: one pure function.

    for each site, the lead site first:
        gang   = the gateway, the controller (lead site), every rank of the Megatron tasks there,
                 and the generation replicas of groups that share devices with them
        arrays = the generation replicas of array groups, one array per GPU type and number of GPUs

A process starts in its site's directory, which it names as `.`; an executor replaces the word `python` by the site's
interpreter. Everything else that a process needs lies in that directory or in its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetrl.errors import UsageError
from hetrl.plan.plan import Plan, Replica, TaskPlan, node_of, site_of

CPU = "cpu"
GATEWAY = "gateway"
CONTROLLER = "controller"


@dataclass(frozen=True)
class Process:
    """One process: its name within the site, what it runs, what it adds to the environment, and its node (a slot)."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    node: str


@dataclass(frozen=True)
class Job:
    """What a site starts at once (`kind` gang) or task by task (`kind` array)."""

    site: str
    name: str
    kind: str
    tasks: tuple[Process, ...]


@dataclass(frozen=True)
class Store:
    """Where rank 0 of a task serves the store of its world."""

    host: str
    port: int


def render(plan: Plan, gpu_by_device: Mapping[str, str], run: str, stores: Mapping[str, Store]) -> tuple[Job, ...]:
    """Return the jobs of all sites, the lead site's first.

    `stores` has the tasks of `tasks_with_store` whose address is known beforehand; the ranks of another one agree on it
    when they start (`hetrl.runtime.run.step`). Raises UsageError for what cannot be started (`check_startable`).
    """
    check_startable(plan)
    gangs: dict[str, list[Process]] = {site: _site_processes(plan, site, run) for site in plan.site_order}
    arrays: dict[tuple[str, str], list[Process]] = {}
    for name in tasks_with_store(plan):
        task = plan.tasks[name]
        gangs[site_of(task.devices[0])] += _ranks(name, task, gpu_by_device, run, stores.get(name))
    array_devices = {device for group in plan.groups if group.job == "array" for device in group.devices}
    for replica, process in _replicas(plan, gpu_by_device, run):
        site = site_of(replica.devices[0])
        if array_devices.issuperset(replica.devices):
            shape = _array_name(gpu_by_device[replica.devices[0]], len(replica.devices))
            arrays.setdefault((site, shape), []).append(process)
        else:
            gangs[site].append(process)
    jobs = [Job(site, "gang", "gang", tuple(processes)) for site, processes in gangs.items()]
    jobs += [Job(site, name, "array", tuple(processes)) for (site, name), processes in arrays.items()]
    return tuple(jobs)


def tasks_with_store(plan: Plan) -> tuple[str, ...]:
    """Return the tasks that are a torch world each: those of the Megatron engine, in the plan's order."""
    return tuple(name for name, task in plan.tasks.items() if task.engine == "megatron")


def check_startable(plan: Plan) -> None:
    """Raise UsageError for a legal plan that cannot be started.

    That is a Megatron task over several sites, a generation replica over several nodes, or a site without devices.
    """
    for name, task in plan.tasks.items():
        sites = sorted({site_of(device) for device in task.devices})
        if task.engine == "megatron" and len(sites) > 1:
            raise UsageError(
                f"plan: {name} has devices in {' and '.join(sites)}; a task that spans sites cannot be started yet: "
                "list megatron under `engines` in the file of one site only, and plan again"
            )
        for index, replica in enumerate(task.replicas):
            nodes = sorted({node_of(device) for device in replica.devices})
            if task.engine == "vllm" and len(nodes) > 1:
                raise UsageError(
                    f"plan: {name} replica {index} spans the nodes {', '.join(nodes)}; "
                    "a replica that starts must lie in one node: plan again with more, smaller replicas"
                )
    used = {site_of(device) for task in plan.tasks.values() for device in task.devices}
    for site in plan.site_order:
        if site not in used:
            raise UsageError(f'plan: site_order names "{site}", but no task has a device there; take it out')


def spoken(process: str) -> str:
    """Return a process name as messages say it: `actor_training-1` is `actor_training rank 1`."""
    name, dash, number = process.rpartition("-")
    if not dash or not number.isdigit():
        return process
    return f"{name} {'replica' if name == 'actor_generation' else 'rank'} {number}"


def _site_processes(plan: Plan, site: str, run: str) -> list[Process]:
    """Return the gateway of a site and, at the lead site, the controller; neither owns a device."""
    nodes = [node_of(device) for task in plan.tasks.values() for device in task.devices if site_of(device) == site]
    environment = {"HETRL_RUN": run, "OMP_NUM_THREADS": "1"}
    gateway = ("python", "-m", "hetrl.runtime.gateway.gateway_process", "--member", "gateway.json")
    processes = [Process(GATEWAY, gateway, environment, nodes[0])]
    if site == plan.lead_site:
        controller = ("python", "-m", "hetrl.runtime.run.controller", ".")
        processes.append(Process(CONTROLLER, controller, environment, nodes[0]))
    return processes


def _ranks(
    name: str, task: TaskPlan, gpu_by_device: Mapping[str, str], run: str, store: Store | None
) -> Iterator[Process]:
    """Yield the processes of a Megatron task in rank order; rank r uses device HETRL_LOCAL_RANK of those it sees."""
    devices = task.rank_order()
    by_node: dict[str, list[str]] = {}
    for device in devices:
        by_node.setdefault(node_of(device), []).append(device)
    for rank, device in enumerate(devices):
        node = node_of(device)
        environment = {
            "HETRL_RUN": run,
            "HETRL_RANK": str(rank),
            "HETRL_WORLD_SIZE": str(len(devices)),
            "HETRL_LOCAL_RANK": str(by_node[node].index(device)),
            **({"HETRL_STORE_HOST": store.host, "HETRL_STORE_PORT": str(store.port)} if store else {}),
            **_compute_environment(by_node[node], gpu_by_device),
        }
        argv = ("python", "-m", "hetrl.runtime.run.trainer", ".", "--task", name)
        yield Process(f"{name}-{rank}", argv, environment, node)


def _replicas(plan: Plan, gpu_by_device: Mapping[str, str], run: str) -> Iterator[tuple[Replica, Process]]:
    """Yield each generation replica with its process."""
    for name, task in plan.tasks.items():
        if task.engine != "vllm":
            continue
        for index, replica in enumerate(task.replicas):
            argv = ("python", "-m", "hetrl.runtime.run.rollout", ".", "--replica", str(index))
            environment = {"HETRL_RUN": run, **_compute_environment(replica.devices, gpu_by_device)}
            yield replica, Process(f"{name}-{index}", argv, environment, node_of(replica.devices[0]))


def _compute_environment(devices: list[str] | tuple[str, ...], gpu_by_device: Mapping[str, str]) -> dict[str, str]:
    """Return what makes a process see these devices of one node, in this order."""
    if all(gpu_by_device[device] == CPU for device in devices):
        return {"OMP_NUM_THREADS": "1"}  # a `cpu` device is one core's share of a machine
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.rsplit("/", 1)[1] for device in devices)}


def _array_name(gpu: str, devices: int) -> str:
    """Return the name of an array: tasks of one array ask for the same resources."""
    return f"array-{gpu}" if devices == 1 else f"array-{gpu}-x{devices}"
