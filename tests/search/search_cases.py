"""Random jobs, topologies and feasible vectors for the tests of the compiled evaluation."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, strategies as st

from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.search.assemble import Made
from hetrl.search.evaluate import Evaluator
from hetrl.workload import Workload, architecture

MADE = Made("test", 0, {})
GPUS = ("a100-80gb", "a100-40gb", "l40s", "h100")


def job(
    model: str = "qwen3-1.7b",
    algorithm: str = "ppo",
    staleness: int = 0,
    kind: str = "fixed",
    gradient_dtype: str = "fp32",
    steps: int = 2,
    kl_in_reward: bool = False,
) -> Workload:
    """PPO or GRPO with one model in all roles; `kind` is that of the response lengths, `steps` optimiser steps."""
    size = architecture(model)
    return Workload(
        algorithm=algorithm,
        mode="async" if staleness else "sync",
        max_staleness=staleness,
        samples=128,
        samples_per_prompt=4,
        prompt_tokens=256,
        response=Lengths(256, 256) if kind == "fixed" else Lengths(256, 768, kind),
        optimizer_steps_per_iteration=steps,
        kl_in_reward=kl_in_reward,
        actor=size,
        critic=size if algorithm == "ppo" else None,
        reference=size,
        reward=size,
        gradient_dtype=gradient_dtype,
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Draw up to four linked sites of one kind of node each."""
    sites = []
    for index in range(draw(st.integers(1, 4))):
        gpu, gpus = draw(st.sampled_from(GPUS)), draw(st.sampled_from([2, 3, 4, 8]))
        nodes = [
            Node(
                f"n{number}",
                gpu,
                gpus,
                nic_gbps=draw(st.sampled_from([25.0, 100.0, 400.0])),
                host_memory_gb=draw(st.sampled_from([256.0, 2048.0])),
                wan_gbps=draw(st.sampled_from([None, 2.0])),
            )
            for number in range(draw(st.integers(1, 3)))
        ]
        sites.append(Site(f"s{index}", tuple(nodes), delay_ms=draw(st.sampled_from([0.05, 0.5]))))
    names = [site.name for site in sites]
    pairs = [(a, b) for position, a in enumerate(names) for b in names[position + 1 :]]
    return Topology(tuple(sites), tuple(Link(p, draw(st.floats(1, 60)), draw(st.floats(0.3, 10))) for p in pairs))


jobs = st.builds(
    job,
    st.sampled_from(["qwen3-0.6b", "qwen3-1.7b", "qwen2.5-1.5b"]),  # 8 key-value heads, and 2
    st.sampled_from(["ppo", "grpo"]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["fixed", "uniform"]),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
seeds = st.integers(0, 2**31)


def feasible(evaluator: Evaluator, seed: int) -> np.ndarray:
    """A random vector, changed at random until it is feasible; skips the example if that takes long."""
    best = evaluator.random(seed)
    for step in range(300):
        if evaluator.parts(best)[0] < np.inf:
            break
        child = evaluator.mutate(best, seed + step)
        best = child if evaluator.graded(child) <= evaluator.graded(best) else best
    assume(evaluator.parts(best)[0] < np.inf)
    for step in range(seed % 20):  # and some way on, so that not all are what draws give
        child = evaluator.mutate(best, seed - step)
        best = child if evaluator.parts(child)[0] < np.inf else best
    return best
