"""Whole steps of GRPO that others published, predicted.

for each: the plan that its recipe describes, as one site of DGX-H100; predict it, and its tasks one by one

Source: NeMo RL v0.4, docs/about/performance-summary.md (on OpenMathInstruct-2; DGX-H100, BF16, Megatron-core, vLLM) and
the recipes under examples/configs/recipes/llm/performance at r0.4.0. The prompts' mean length follows from the page:
its tokens per second and GPU count prompts, its mean length does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from _results import write_result

from hetrl.cost.check import violations
from hetrl.cost.iteration import switch_seconds
from hetrl.cost.memory import with_server
from hetrl.cost.training import training_cost
from hetrl.errors import UsageError
from hetrl.hardware import Device, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, plan_of
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, OLD_LOGPROBS, REFERENCE_INFERENCE, Workload, architecture

SAMPLES, PER_PROMPT, MINIBATCHES, TOKENS = 2048, 32, 4, 4096  # 64 prompts a step; 512 samples an update; the longest
PACKED = 4096  # tokens of a micro-batch, which packs whole sequences
NODE_GPUS, NIC_GBPS, H100_GB = 8, 3200, 80  # DGX-H100: eight 400 Gbps cards
RUNNING = 1024  # vLLM's `max_num_seqs` on this GPU
CACHE_SHARE = 0.6  # of a GPU's memory that the server may fill, weights included (`gpu_memory_utilization`)


@dataclass(frozen=True)
class Published:
    """One row: `tensor` and `pipeline` of training; `servers` are the GPUs that only generate (0: all take turns)."""

    model: str
    gpus: int
    servers: int
    server_tensor: int
    tensor: int
    pipeline: int
    recompute: str
    prompt: int
    response: int
    seconds: float

    @property
    def mode(self) -> str:
        """Return the mode of the workload; one step off-policy is a staleness of one."""
        return "async" if self.servers else "sync"

    @property
    def name(self) -> str:
        """Return the row in one line."""
        where = f"{self.servers} of them generate" if self.servers else "all take turns"
        return f"{self.model}, {self.mode}, {self.gpus} GPUs, {where}"


ROWS = (
    Published("llama-3.1-8b", 16, 0, 1, 1, 2, "full", 132, 1060, 97.7),
    Published("llama-3.1-8b", 16, 8, 1, 1, 2, "full", 130, 1129, 74.6),
    Published("qwen3-32b", 32, 0, 4, 4, 4, "none", 110, 3206, 393.0),
)


def problem(row: Published) -> Problem:
    """Return what the recipe asks for, on its GPUs."""
    nodes = tuple(Node(f"n{index}", "h100", NODE_GPUS, nic_gbps=NIC_GBPS) for index in range(row.gpus // NODE_GPUS))
    model = architecture(row.model)
    workload = Workload(
        algorithm="grpo",
        mode=row.mode,
        max_staleness=1,
        samples=SAMPLES,
        samples_per_prompt=PER_PROMPT,
        prompt_tokens=row.prompt,
        response=Lengths(row.response, TOKENS - row.prompt, "lognormal"),
        optimizer_steps_per_iteration=MINIBATCHES,
        actor=model,
        reference=model,
        gradient_dtype="bf16",
    )
    return Problem(Topology((Site("dgx", nodes),)), workload)


def _chunks(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(names[start : start + size]) for start in range(0, len(names), size)]


def replicas(row: Published, devices: Sequence[Device], tensor: int, pipeline: int) -> tuple[Replica, ...]:
    """Return equal replicas over these devices; the stages of one are neighbours, with equal layers."""
    count = architecture(row.model).layers
    bounds = [count * index // pipeline for index in range(pipeline + 1)]
    found = []
    for own in _chunks([device.id for device in devices], tensor * pipeline):
        stages = zip(_chunks(own, tensor), pairwise(bounds), strict=True)
        found.append(Replica(SAMPLES * len(own) // len(devices), tuple(Stage(*one) for one in stages)))
    return tuple(found)


def plan(row: Published, asked: Problem) -> Plan:
    """Return the plan of the recipe."""
    devices, workload = list(asked.topology.devices), asked.workload
    serving, training = devices[: row.servers or None], devices[row.servers :]
    idle = "resident" if row.servers else "offload"
    cache_gb = CACHE_SHARE * H100_GB - workload.actor.parameters * workload.weight_bytes / row.server_tensor / 1e9
    servers = replicas(row, serving, row.server_tensor, 1)
    trained = replicas(row, training, row.tensor, row.pipeline)
    micro_batch = 2 ** round(log2(max(PACKED / workload.sequence_tokens, 1)))
    generation = TaskPlan("vllm", tuple(with_server(one, cache_gb, RUNNING, asked.model) for one in servers), idle)
    beside = {
        REFERENCE_INFERENCE: TaskPlan("megatron", trained, "offload", micro_batch),
        ACTOR_TRAINING: TaskPlan("megatron", trained, "offload", micro_batch, row.recompute, "bf16", "data_parallel"),
    }
    tasks = {ACTOR_GENERATION: generation}
    made = plan_of(asked, [tasks, beside] if row.servers else [tasks | beside], Made("hand", 0, {}))
    if found := violations(made, asked.model):
        raise UsageError(f"{row.name}: {found[0]}")
    return made


def parts(made: Plan, asked: Problem) -> dict[str, float]:
    """Return the seconds of each part of a step: the tasks, states that move to the host and back, the weights."""
    predicted, moved = made.predicted.tasks, 0.0
    for name, task in made.tasks.items():
        moved += switch_seconds(name, task, asked.model)
    scored = training_cost(ACTOR_TRAINING, made.tasks[ACTOR_TRAINING], asked.model, {}).parts[OLD_LOGPROBS]
    return {
        "generation": predicted[ACTOR_GENERATION],
        "reference": predicted[REFERENCE_INFERENCE],
        "old log-probs": scored,
        "training": predicted[ACTOR_TRAINING] - scored,
        "states to the host and back": moved,
        "weights": predicted["weight_sync"],
    }


def page(found: Sequence[tuple[Published, float, Mapping[str, float]]]) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        "Whole steps of GRPO published by NeMo RL (v0.4, DGX-H100, 2,048 samples of 64 prompts, four updates; "
        "Megatron-core and vLLM), and what the cost model says of the same plans: lengths lognormal with the published "
        f"mean, cut at {TOKENS:,} tokens. Where all take turns the parts follow one another, else the slower side "
        "decides.",
        "",
        "| step | published | predicted | difference | parts of the prediction |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row, seconds, its in found:
        text = ", ".join(f"{name} {part:.1f}" for name, part in its.items())
        figures = f"{row.seconds:.1f} s | {seconds:.1f} s | {seconds / row.seconds - 1:+.0%}"
        lines.append(f"| {row.name} | {figures} | {text} |")
    lines += [
        "",
        "Where generation has GPUs of its own, reference, old log-probs and training alone make the step. Where all "
        "take turns the published step is longer than the sum of the parts. Not in the prediction: rewards, the "
        "controller's work between tasks, engines that free and fill their memory, weights converted from one engine's "
        "layout to the other's, and prompts that are dealt to servers before anything is known of their lengths. The "
        "source does not divide its seconds among them.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Predict all rows, write the result."""
    found = []
    for row in ROWS:
        asked = problem(row)
        made = plan(row, asked)
        found.append((row, made.predicted.iteration_seconds, parts(made, asked)))
    table = page(found)
    steps = [
        {"step": row.name, "published_seconds": row.seconds, "predicted_seconds": seconds, "parts": its}
        for row, seconds, its in found
    ]
    write_result("steps", {"seed": None, "steps": steps}, table)
    print(table)


if __name__ == "__main__":
    main()
