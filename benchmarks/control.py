"""The control plane at growing numbers of ranks and sites, with emulated engines: what costs how much, of whom.

for each size: one site trains, the others draw samples, a replica on each GPU; four samples per replica and step
    gather    from the first process to GO; publish: a version to all replicas, its bytes next to none
    messages  through the gateway of the site that leads, and what each of its members takes of memory
    death     a site's processes are stopped: how long until each of its replicas is given up
    idle      what all processes take while engines work: that everybody lives, said again and again
    end       from the last step to the last process
with --profile the controller of the largest run is profiled, in a run of its own
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pstats
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from _emulated_run import Ran, run_emulated, with_experiment
from _results import write_result
from _watched_run import Idle, Watch

from hetrl.cost.check import check
from hetrl.cost.iteration import with_prediction
from hetrl.cost.memory import with_server
from hetrl.cost.weight_sync import weight_routes
from hetrl.describe.launching import Emulation
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Replica, Solver, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.runtime.run.membership import SILENCE_SECONDS
from hetrl.workload import Workload, architecture
from launch import render
from launch.rehearsal import Settings

SIZES = ((64, 4), (256, 4), (256, 16), (1024, 16))  # ranks and sites
LEAST_STEPS, STEPS_OF_RANKS = 8, 2048  # small runs are quick: more steps of them count
GPUS_PER_NODE, TENSOR = 8, 4
SAMPLES_PER_REPLICA, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 64, 128
SPEED = 1000.0  # engines take next to no time: the control plane is what is measured
IDLE_SPEED = 0.01  # the first samples take minutes
GOAL_GATHER_SECONDS = 60.0


@dataclass(frozen=True)
class Measured:
    """What one size showed; memory in MB, of each member (the control plane's share of it) and of three processes."""

    ranks: int
    sites: int
    members: int
    gather_seconds: float
    ready_seconds: float
    publish_seconds: float
    step_seconds: float
    gateway_messages_per_second: float
    controller_share: float
    cpu_seconds: float  # of all processes, in a step
    replicas_per_site: int
    site_mb: float
    controller_mb: float
    gateway_mb: float
    end_seconds: float
    death_seconds: float | None
    idle_share: float  # of a core, of all processes

    @property
    def replicas(self) -> int:
        """Return how many draw."""
        return self.replicas_per_site * (self.sites - 1)

    @property
    def replica_seconds(self) -> float:
        """Return the processor seconds of a replica's step, without what the run takes however little happens."""
        return (self.cpu_seconds - self.idle_share * self.step_seconds) / self.replicas


def problem_of(ranks: int, sites: int) -> Problem:
    """Return GRPO with a rule's rewards on sites of equal size, all linked."""
    per_site = ranks // sites
    made = tuple(
        Site(f"s{n:02}", tuple(Node(f"n{k}", "a100-80gb", GPUS_PER_NODE) for k in range(per_site // GPUS_PER_NODE)))
        for n in range(sites)
    )
    links = tuple(Link((a.name, b.name), 10.0, 5.0) for a, b in itertools.combinations(made, 2))
    workload = Workload(
        algorithm="grpo",
        mode="sync",
        max_staleness=0,
        optimizer_steps_per_iteration=1,
        samples=SAMPLES_PER_REPLICA * (ranks - per_site),
        samples_per_prompt=4,
        prompt_tokens=PROMPT_TOKENS,
        response=Lengths(RESPONSE_TOKENS, RESPONSE_TOKENS),
        actor=architecture("qwen3-1.7b"),
    )
    return Problem(Topology(made, links), workload)


def plan_of(problem: Problem) -> Plan:
    """Return the plan: the first site trains, data parallel with its nodes in halves; all others generate."""
    model, workload = problem.model, problem.workload
    layers = workload.actor.layers
    first = [device.id for device in problem.topology.devices if device.site == "s00"]
    others = [device.id for device in problem.topology.devices if device.site != "s00"]
    parts = [tuple(first[start : start + TENSOR]) for start in range(0, len(first), TENSOR)]
    even, left = divmod(workload.samples, len(parts))
    training = TaskPlan(
        "megatron",
        tuple(Replica(even + (n < left), (Stage(part, (0, layers)),)) for n, part in enumerate(parts)),
        micro_batch=1,
        recompute="full",
        optimizer_sharding="data_parallel",
    )
    servers = (Replica(SAMPLES_PER_REPLICA, (Stage((one,), (0, layers)),)) for one in others)
    generation = TaskPlan("vllm", tuple(with_server(one, 10.0, SAMPLES_PER_REPLICA, model) for one in servers))
    tasks = {"actor_generation": generation, "actor_training": training}
    plan = Plan(
        algorithm=Algorithm("grpo", "sync", 0, 1),
        groups=(Group(("actor_training",), tuple(first)), Group(("actor_generation",), tuple(others), "array")),
        tasks=tasks,
        weight_sync=weight_routes(tasks),
        site_order=tuple(site.name for site in problem.topology.sites),
        predicted=Predicted(0.0, 0.0, {}, {}, {}),
        solver=Solver("by-hand", 0, 0.0, 0),
        inputs={},
    )
    plan = with_prediction(plan, model)
    check(plan, model)
    return plan


def steps_of(ranks: int) -> int:
    """Return of how many steps a run of so many ranks is."""
    return max(LEAST_STEPS, STEPS_OF_RANKS // ranks)


def settings(steps: int, speed: float = SPEED) -> Settings:
    """Return how a run is emulated: with next to no bytes and, unless it shall idle, seconds."""
    return Settings(steps, steps - 1, Emulation(speed=speed, noise=0.1, bytes_share=1e-6))


def measure(ranks: int, sites: int) -> Measured:
    """Run one size to its end, then once more to stop a site, and once to see it idle."""
    problem = with_experiment(problem_of(ranks, sites), f"control-{ranks}-{sites}")
    plan = plan_of(problem)
    steps = steps_of(ranks)
    watch, dying, idle = Watch(steps, memory={}), Watch(None, memory={}), Idle()
    ran = run_emulated(problem, plan, settings(steps), watch)
    run_emulated(problem, plan, settings(10_000), dying, ends=False)
    run_emulated(problem, plan, settings(10_000, IDLE_SPEED), idle, ends=False)
    return measured_of(ranks, sites, plan, ran, watch, dying.death_seconds, idle.share)


def measured_of(
    ranks: int, sites: int, plan: Plan, ran: Ran, watch: Watch, death: float | None, idle_share: float
) -> Measured:
    """Return the figures of a run."""
    steps, go = ran.times("step"), ran.times("go")[0]
    links = ran.summary["transport"]["links"].values()
    messages = sum(link["messages_sent"] + link["messages_received"] for link in links)
    members = len(plan.tasks["actor_generation"].replicas)
    names = {name.rsplit(".", 1)[-1]: size for name, size in watch.memory.items()}
    return Measured(
        ranks,
        sites,
        members + 1 + len(plan.tasks["actor_training"].devices),
        go - ran.times("submitted")[0],
        go - min(ran.times("member_ready")),
        statistics.median(row["seconds"] for row in ran.events if row["kind"] == "weights_published"),
        statistics.median(row["seconds"]["iteration"] for row in ran.rows[1:]),
        messages / (steps[-1] - go),
        watch.controller_share,
        watch.cpu_seconds,
        members // (sites - 1),
        names["replicas"],
        names["controller"],
        names["gateway_process"],
        ran.events[-1]["time"] - steps[-1],
        death,
        idle_share,
    )


def profile(ranks: int, sites: int) -> str:
    """Return where the controller of a run spends its time: the functions that take the most themselves."""
    plain = render.argv_of
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "controller.profile"

        def profiled(process: render.Process) -> tuple[str, ...]:
            words = plain(process)
            return ("python", "-m", "cProfile", "-o", str(path), *words[1:]) if "controller" in words[2] else words

        render.argv_of = profiled
        try:
            problem = with_experiment(problem_of(ranks, sites), f"control-{ranks}-{sites}")
            run_emulated(problem, plan_of(problem), settings(steps_of(ranks)))
        finally:
            render.argv_of = plain
        text = io.StringIO()
        pstats.Stats(str(path), stream=text).strip_dirs().sort_stats("tottime").print_stats(12)
    return text.getvalue()


def member_mb(found: list[Measured]) -> float:
    """Return how much more memory a site's process takes for a replica more."""
    few, many = (pick(found, key=lambda one: one.replicas_per_site) for pick in (min, max))
    return (many.site_mb - few.site_mb) / max(many.replicas_per_site - few.replicas_per_site, 1)


def table_of(found: list[Measured]) -> str:
    """Return the part of the page."""
    lines = [
        f"| {one.ranks} | {one.sites} | {one.members} | {one.gather_seconds:.1f} s | {one.publish_seconds:.2f} s "
        f"| {one.step_seconds:.2f} s | {one.cpu_seconds:.1f} s | {one.idle_share:.2f} "
        f"| {one.replica_seconds * 1e3:.1f} ms | {one.gateway_messages_per_second:.0f} | {one.controller_share:.0%} "
        f"| {one.site_mb:.0f} MB ({one.replicas_per_site}) | {one.controller_mb:.0f}, {one.gateway_mb:.0f} MB "
        f"| {'' if one.death_seconds is None else f'{one.death_seconds:.1f} s'} | {one.end_seconds:.1f} s |"
        for one in found
    ]
    return "\n".join(
        [
            "Runs with emulated engines that take a thousandth of their time, on one machine, so that what is measured "
            "is everything else: one site trains, each GPU of the others is a replica; "
            f"{SAMPLES_PER_REPLICA} samples of {RESPONSE_TOKENS} tokens per replica and step, weights of some "
            "kilobytes. Gather: from the first process to GO, all processes' start on this machine's cores included. "
            "Publish: a version to every replica, and its digest back. Step: samples drawn, judged, trained on, and a "
            "version published. Cpu: processor seconds of all processes for a step; a step is longer than that on this "
            "machine's cores where each of them has its turn. Idle: cores of all processes while engines work, since "
            "members and gateways say every few seconds that they live: of a step as long as it lasts. Per replica: "
            "processor seconds of a step without that. "
            "Messages: of the leading site's gateway with other sites, per second. Controller: its "
            "share of a core. Memory: of a site's process with so many replicas, of the controller, of the leading "
            f"gateway; {member_mb(found):.2f} MB per replica. Death: until every replica "
            f"of a site whose process was stopped is given up; {SILENCE_SECONDS:.0f} s after its last heartbeat "
            "are allowed. "
            f"Goal: gather within {GOAL_GATHER_SECONDS:.0f} s, nothing grows faster than the ranks.",
            "",
            "| ranks | sites | members | gather | publish | step | cpu of a step | idle | per replica | messages/s "
            "| controller | site | controller, gateway | death | end |",
            "| --- " * 15 + "|",
            *lines,
        ]
    )


def main() -> None:
    """Run all sizes, profile the largest, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many, the smallest first")
    parser.add_argument("--profile", action="store_true", help="and print where the controller spends its time")
    arguments = parser.parse_args()
    sizes = SIZES[: arguments.sizes]
    found = []
    for ranks, sites in sizes:
        found.append(measure(ranks, sites))
        print(found[-1], flush=True)
    table = table_of(found)
    write_result("control", {"runs": [asdict(one) for one in found]}, table)
    print(table)
    if arguments.profile:
        print(profile(*sizes[-1]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
