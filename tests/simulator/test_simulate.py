from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.efficiency import calibrated
from hetrl.cost.generation import prompts_seconds, server_of, step_seconds
from hetrl.cost.iteration import predict
from hetrl.cost.model import CostModel
from hetrl.cost.stages import place
from hetrl.cost.training import forward_pass_seconds, micro_batch_times
from hetrl.cost.weight_sync import weight_routes
from hetrl.hardware import Node, Site, Topology
from hetrl.plan.plan import Group, Plan, Replica, Stage, TaskPlan
from hetrl.simulator import Simulated, chrome_trace, simulate
from hetrl.simulator.pipelines import BACKWARD, FORWARD, SCORE
from hetrl.simulator.trace import Span
from hetrl.workload import Lengths, Workload, architecture
from launch.cli import main
from tests.plan.plan_cases import plan as three_site_plan, topology as three_sites, workload as three_site_workload
from tests.simulator.simulate_cases import (
    ACROSS,
    ONE_STAGE,
    TWO_STAGES,
    one_device,
    plan_with_critic,
    small_plan,
    small_workload,
    stages_of,
    trained_seconds,
    two_sites,
)

ROOT = Path(__file__).parents[2]
_LONG = Lengths(1300, 1300)  # more than a stretch


def test_an_iteration_of_one_stage_is_the_sum_of_its_phases() -> None:
    workload, topology = small_workload(), two_sites()
    plan = small_plan(workload, ONE_STAGE)
    found = simulate(plan, CostModel(topology, workload))
    server = server_of(
        place("actor_generation", plan.tasks["actor_generation"].replicas[0], CostModel(topology, workload))
    )
    decoding = sum(16 * step_seconds(server, 8, 128 + 16 * chunk + 8) for chunk in range(4))
    generation = prompts_seconds(server, 2, 128) + decoding
    overhead = calibrated().rates("l40s").overhead
    size = workload.actor.parameters * 2
    a100, l40s = calibrated().rates("a100-80gb").host_bytes_per_s, calibrated().rates("l40s").host_bytes_per_s
    copied = size / 16 / a100  # the first of 16 chunks, before the link has anything to do
    transfer = copied + size * 8 / 1e9 + 0.02
    load = size / l40s + overhead.weight_version
    trained, _ = trained_seconds(plan, topology, workload)
    assert found.tasks["actor_generation"] == pytest.approx(overhead.generation_call + generation)
    assert found.tasks["actor_training"] == pytest.approx(trained)
    assert found.tasks["weight_sync"] == pytest.approx(transfer + load)
    expected = overhead.generation_call + generation + trained + transfer + load
    assert found.iteration_seconds == pytest.approx(expected)
    assert found.wan_gb == pytest.approx({"a-b": size / 1e9})


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_values_wait_for_the_critic_that_crosses_a_slow_link(staleness: int) -> None:
    mode = "async" if staleness else "sync"
    workload = small_workload(algorithm="ppo", critic=architecture("qwen3-1.7b"), mode=mode, max_staleness=staleness)
    model = CostModel(two_sites(), workload)
    plan = plan_with_critic(workload)
    predicted, found = predict(plan, model), simulate(plan, model)
    size = predicted.wan_gb_per_iteration["a-b"]
    assert size > 3
    assert found.wan_gb["a-b"] > size / 2  # the last versions are still on their way
    assert found.iteration_seconds > size * 8  # at 1 Gbps
    assert predicted.iteration_seconds == pytest.approx(found.iteration_seconds, rel=0.02)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_batch_is_scored_while_another_group_values_it(mode: str) -> None:
    workload = small_workload(algorithm="ppo", critic=architecture("qwen3-1.7b"), mode=mode, max_staleness=1)
    model = CostModel(two_sites(1000.0), workload)
    plan = plan_with_critic(workload)
    predicted, found = predict(plan, model), simulate(plan, model)
    scored = found.tasks["old_logprobs"]
    assert scored == pytest.approx(predicted.tasks["old_logprobs"], rel=0.01)
    assert predicted.iteration_seconds == pytest.approx(found.iteration_seconds, rel=0.02)
    if mode == "sync":
        phases = ("actor_generation", "critic_inference", "actor_training", "weight_sync")
        hidden = sum(found.tasks[name] for name in phases) - found.iteration_seconds
        assert hidden == pytest.approx(min(scored, found.tasks["critic_inference"]), rel=1e-6)


@pytest.mark.parametrize("gbps", [10.0, 50.0])
def test_versions_of_actor_and_critic_hold_each_other_up_on_a_link(gbps: float) -> None:
    """Both leave their trainings at a for b; at 50 Gbps the next batch waits for the actor's, not for the link."""
    workload = small_workload(algorithm="ppo", critic=architecture("qwen3-1.7b"), mode="async", max_staleness=1)
    model = CostModel(two_sites(gbps), workload)
    plan = plan_with_critic(workload)
    tasks = plan.tasks | {"actor_generation": small_plan(workload, ONE_STAGE).tasks["actor_generation"]}
    groups = tuple(Group((name,), task.devices) for name, task in tasks.items())
    both = replace(plan, tasks=tasks, groups=groups, weight_sync=weight_routes(tasks))
    predicted, found = predict(both, model), simulate(both, model)
    assert predicted.iteration_seconds == pytest.approx(found.iteration_seconds, rel=0.02)


def test_a_batch_is_scored_behind_the_values_where_both_are_made_on_the_same_devices() -> None:
    """Critic's training and weights take as long: values, and what their devices do behind them, lengthen the cycle."""
    critic, length = architecture("qwen3-1.7b"), Lengths(512, 512)
    ppo: dict[str, Any] = {"algorithm": "ppo", "critic": critic, "kl_in_reward": True}
    workload = small_workload(**ppo, mode="async", max_staleness=1, samples=768, response=length)
    topology = two_sites(1.1)
    node = Node("n0", "l40s", 8)
    model = CostModel(replace(topology, sites=(topology.sites[0], Site("b", (node,)))), workload)
    plan = plan_with_critic(workload)
    first, then = ([Replica(192, (Stage((f"b/n0/{i}",), (0, 28)),), 20.0, 64) for i in range(k, k + 4)] for k in (0, 4))
    both = {name: TaskPlan("megatron", tuple(first), micro_batch=2) for name in ("critic_inference", "actor_training")}
    tasks = plan.tasks | both | {"actor_generation": TaskPlan("vllm", tuple(then))}
    names = (tuple(both), ("actor_generation",), ("critic_training",))
    groups = tuple(Group(group, tasks[group[0]].devices) for group in names)
    plan = replace(plan, tasks=tasks, groups=groups, weight_sync=weight_routes(tasks))
    predicted, found = predict(plan, model), simulate(plan, model)
    assert found.tasks["old_logprobs"] > 0.05 * found.iteration_seconds
    assert predicted.iteration_seconds == pytest.approx(found.iteration_seconds, rel=0.01)


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_the_critic_waits_for_the_trainers_scores_if_they_are_in_its_rewards(kl_in_reward: bool) -> None:
    """The trainer scores a batch once all else is there, since generation shares its devices."""
    critic = architecture("qwen3-1.7b")
    ppo: dict[str, Any] = {"algorithm": "ppo", "critic": critic, "kl_in_reward": kl_in_reward}
    workload = small_workload(**ppo, mode="async", max_staleness=1, samples=64)
    model = CostModel(two_sites(1000.0), workload)
    plan = plan_with_critic(workload)
    slower = replace(one_device("b/n0/1", workload), recompute="full")  # than the actor's training
    tasks = plan.tasks | {"critic_training": slower}
    both = ("actor_generation", "actor_training")
    shared = Group(both, tuple(device for name in both for device in tasks[name].devices))
    alone = [Group((name,), tasks[name].devices) for name in ("critic_training", "critic_inference")]
    plan = replace(plan, tasks=tasks, groups=(shared, *alone), weight_sync=weight_routes(tasks))
    predicted, found = predict(plan, model), simulate(plan, model)
    scored = [span for span in found.spans if span.category == "actor_training" and span.name.startswith(SCORE)]
    trained = min(span.start for span in found.spans if span.category == "critic_training")
    assert (trained > scored[-1 + 64 // 4].start) == kl_in_reward
    assert predicted.iteration_seconds == pytest.approx(found.iteration_seconds, rel=0.02)


def test_staleness_zero_equals_sync() -> None:
    sync = small_workload(response=Lengths(64, 96, "uniform"))
    asynchronous = replace(sync, mode="async")
    first, second = (simulate(small_plan(w, ACROSS), CostModel(two_sites(), w), seed=5) for w in (sync, asynchronous))
    assert first == second


def test_running_ahead_hides_generation_behind_the_weights_and_never_slows_down() -> None:
    found = []
    for staleness in (0, 1, 3):
        workload = small_workload(mode="async", max_staleness=staleness)
        found.append(simulate(small_plan(workload, ONE_STAGE), CostModel(two_sites(), workload)))
    assert found[0].iteration_seconds > found[1].iteration_seconds >= found[2].iteration_seconds * (1 - 1e-9)
    size = architecture("qwen3-1.7b").parameters * 2
    assert found[2].iteration_seconds == pytest.approx(size * 8 / 1e9, rel=0.02)  # the link carries every version


def _with_rollouts(plan: Plan, *parts: int, sequences: int) -> Plan:
    """Return the plan with these parts of generation, and so many sequences at once at each replica."""
    task = plan.tasks["actor_generation"]
    shares = zip(task.replicas, parts, strict=True)
    replicas = tuple(replace(one, samples=samples, max_sequences=sequences) for one, samples in shares)
    return replace(plan, tasks={**plan.tasks, "actor_generation": replace(task, replicas=replicas)})


def test_samples_are_drawn_by_whoever_has_room_whatever_parts_were_expected() -> None:
    workload = small_workload(samples=48)
    model, plan = CostModel(two_sites(), workload), small_plan(workload, ONE_STAGE)
    found = [
        simulate(_with_rollouts(plan, *parts, sequences=4), model).tasks["actor_generation"]
        for parts in ((24, 24), (40, 8), (8, 40))
    ]
    assert found[1:] == pytest.approx([found[0]] * 2, rel=0.02)


def test_parts_are_the_weights_of_the_dispatch_while_all_replicas_have_room() -> None:
    workload = small_workload(samples=48)
    model, plan = CostModel(two_sites(), workload), small_plan(workload, ONE_STAGE)
    found = simulate(_with_rollouts(plan, 40, 8, sequences=64), model, iterations=1)
    batches = {span.thread: span.name for span in found.spans if span.name.startswith("decode")}
    assert batches == {"b/n0/2": "decode 40", "b/n0/3": "decode 8"}


def test_a_sample_that_goes_on_elsewhere_has_its_keys_and_values_made_again() -> None:
    """Of two long samples one begins at the slow replica and goes on at the fast one, which then has a free place."""
    workload = small_workload(samples=2, samples_per_prompt=2, optimizer_steps_per_iteration=1, response=_LONG)
    plan = small_plan(workload, ONE_STAGE)
    task = plan.tasks["actor_generation"]
    fast = Replica(1, (Stage(("a/n0/1",), (0, 28)),), 20.0, 1)
    slow = replace(task.replicas[0], samples=1, max_sequences=1)
    plan = replace(plan, tasks={**plan.tasks, "actor_generation": replace(task, replicas=(fast, slow))})
    found = simulate(plan, CostModel(two_sites(), workload), iterations=1)
    work = [(span.thread, span.name) for span in found.spans if span.category == "actor_generation"]
    assert [name for name in work if name[1].startswith("prefill")] == [
        ("a/n0/1", "prefill 1"),
        ("b/n0/2", "prefill 1"),
        ("a/n0/1", "prefill 1"),
    ]


def test_the_same_seed_gives_the_same_play_and_another_one_another() -> None:
    workload = small_workload(mode="async", max_staleness=1, response=Lengths(64, 256, "lognormal"))
    plan = small_plan(workload, ACROSS)
    first, again, other = (simulate(plan, CostModel(two_sites(), workload), seed) for seed in (3, 3, 4))
    assert first == again
    assert first.spans != other.spans


def test_a_version_has_contexts_computed_anew_where_the_job_says_so() -> None:
    for renews in (True, False):
        workload = small_workload(
            mode="async", max_staleness=1, response=Lengths(2048, 8192, "lognormal"), renews_contexts=renews
        )
        spans = simulate(small_plan(workload, ACROSS), CostModel(two_sites(), workload), iterations=4).spans
        loads = [span.start + span.seconds for span in spans if span.name == "load weights"]
        anew = [span.start for span in spans if span.name.endswith(" again")]
        assert bool(anew) == renews
        assert {round(start, 6) for start in anew} <= {round(end, 6) for end in loads}


def test_tasks_of_one_group_take_turns_and_pay_for_their_switches() -> None:
    workload, topology = small_workload(), two_sites()
    plan = small_plan(workload, ONE_STAGE)
    trainer = replace(plan.tasks["actor_training"], idle_state="offload")
    generator = TaskPlan("vllm", (Replica(16, ONE_STAGE, 10.0, 16),), "sleep")
    together = replace(
        plan,
        groups=(Group(("actor_generation", "actor_training"), ("a/n0/0",)),),
        tasks={"actor_generation": generator, "actor_training": trainer},
    )
    found = simulate(together, CostModel(topology, workload), iterations=3)
    _assert_trace_is_sound(found)
    moved = [span for span in found.spans if span.name in ("reload", "offload")]
    state = workload.actor.parameters * (2 + 12)  # weights and optimiser, one way
    for span in moved:
        assert span.seconds == pytest.approx(state / calibrated().rates("a100-80gb").host_bytes_per_s)
    assert [span.name for span in moved[:5]] == ["reload", "offload"] * 2 + ["reload"]
    work = [span for span in found.spans if span.thread == "a/n0/0"]
    assert [span.category for span in work if span.start < moved[0].start] == ["actor_generation"] * 5
    assert all(span.category == "actor_training" for span in work if moved[0].start <= span.start <= moved[1].start)


# --- the trace ---


def _assert_trace_is_sound(found: Simulated) -> None:
    """No thread does two things at once, nothing has a negative duration."""
    threads: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in found.spans:
        assert span.seconds >= 0 and span.start >= 0
        threads[span.site, span.thread].append(span)
    for spans in threads.values():
        for before, after in pairwise(spans):
            assert before.start + before.seconds <= after.start + 1e-9 * max(after.start, 1.0)


def test_passes_in_the_trace_sum_up_to_the_work() -> None:
    workload, topology = small_workload(), two_sites()
    plan = small_plan(workload, TWO_STAGES)
    found = simulate(plan, CostModel(topology, workload), iterations=3)
    for stage in stages_of(plan, topology, workload):
        times = micro_batch_times(stage, 384, "none", 192)
        own = [span for span in found.spans if span.thread == stage.devices[0].id]
        score = forward_pass_seconds(stage, 384, 192)
        for kind, seconds in ((SCORE, score), (FORWARD, times.forward), (BACKWARD, times.backward)):
            passes = [span.seconds for span in own if span.name.startswith(kind)]
            assert len(passes) == 3 * 8
            assert sum(passes) == pytest.approx(3 * 8 * seconds)


EVENT_KEYS = {"X": {"ph", "pid", "tid", "name", "cat", "ts", "dur"}, "M": {"ph", "pid", "tid", "name", "args"}}


def test_the_chrome_trace_names_every_thread_and_counts_in_microseconds() -> None:
    found = simulate(three_site_plan(), CostModel(three_sites(), three_site_workload()), iterations=2)
    document = json.loads(json.dumps(chrome_trace(found.spans, three_site_plan().site_order), allow_nan=False))
    events = document["traceEvents"]
    assert all(set(event) == EVENT_KEYS[event["ph"]] for event in events)
    named = [event for event in events if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in named] == [(1, "alps"), (2, "jsc"), (3, "lab")]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == set(threads)
    assert {"a100-0/0", "to jsc", "to lab"} <= set(threads.values())
    assert len(complete) == len(found.spans)
    last = max(event["ts"] + event["dur"] for event in complete)
    assert last == pytest.approx(max(span.start + span.seconds for span in found.spans) * 1e6)


# --- random small plans ---


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Plan, Topology, Workload]:
    staleness = draw(st.integers(0, 3))
    mean = draw(st.integers(4, 40))
    response = draw(
        st.sampled_from(
            [Lengths(mean, mean), Lengths(mean, mean * 3 // 2, "uniform"), Lengths(mean, 4 * mean, "lognormal")]
        )
    )
    workload = small_workload(
        mode="async" if staleness else "sync",
        max_staleness=staleness,
        response=response,
        samples=draw(st.sampled_from([16, 24])),
        optimizer_steps_per_iteration=draw(st.integers(1, 3)),
    )
    topology = two_sites(draw(st.sampled_from([0.5, 10.0, 100.0])), draw(st.floats(0, 100)))
    stages = draw(st.sampled_from([ONE_STAGE, TWO_STAGES, ACROSS]))
    plan = small_plan(workload, stages, draw(st.integers(1, 4)))
    if draw(st.booleans()):
        halves = [tuple(Stage((f"{'ab'[r]}/n0/{i}",), s.layers) for i, s in enumerate(TWO_STAGES)) for r in range(2)]
        trainer = TaskPlan("megatron", tuple(Replica(workload.samples // 2, half) for half in halves), micro_batch=2)
        plan = replace(plan, tasks={**plan.tasks, "actor_training": trainer})
    if draw(st.booleans()):
        devices = tuple(dict.fromkeys(d for task in plan.tasks.values() for d in task.devices))
        generator = replace(
            plan.tasks["actor_generation"], idle_state=draw(st.sampled_from(["resident", "sleep", "offload"]))
        )
        plan = replace(
            plan,
            groups=(Group(("actor_generation", "actor_training"), devices),),
            tasks={**plan.tasks, "actor_generation": generator},
        )
    return plan, topology, workload


@settings(max_examples=40, deadline=None)
@given(_cases(), st.integers(0, 3))
def test_every_sample_is_trained_once_and_never_too_old(case: tuple[Plan, Topology, Workload], seed: int) -> None:
    plan, topology, workload = case
    found = simulate(plan, CostModel(topology, workload), seed, iterations=4)
    numbers = [number for iteration in found.trained for number in iteration]
    assert [len(iteration) for iteration in found.trained] == [workload.samples // workload.samples_per_prompt] * 4
    assert len(numbers) == len(set(numbers))
    if found.dropped == 0 and workload.max_staleness == 0:
        assert numbers == list(range(len(numbers)))
    assert found.iterations == 4
    assert all(seconds > 0 for seconds in found.tasks.values())
    _assert_trace_is_sound(found)


# --- the command ---


def test_the_command_prints_both_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, plan, trace = str(ROOT / "configs/quickstart.yaml"), str(tmp_path / "plan.json"), tmp_path / "trace.json"
    assert main(["plan", config, "-o", plan, "--solver", "verl"]) == 0
    capsys.readouterr()
    assert main(["simulate", plan, "--config", config, "--trace", str(trace), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steady"] is True
    assert set(document["tasks"]) == {"actor_generation", "actor_training", "weight_sync"}
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["simulate", plan, "--config", config, "--noise", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration_seconds"] != document["iteration_seconds"]
    assert main(["simulate", plan, "--config", config, "--trace", str(tmp_path / "no" / "where.json")]) == 1
    assert "cannot write the trace" in capsys.readouterr().err


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_batch_overtakes_a_prompt_for_good(staleness: int) -> None:
    lengths = Lengths(256, 2048, "lognormal")
    workload = small_workload(mode="async", max_staleness=staleness, samples=64, response=lengths)
    plan = small_plan(workload, ONE_STAGE)
    found = simulate(plan, CostModel(two_sites(gbps=100.0), workload), iterations=20)
    trained = [number for batch in found.trained for number in batch]
    assert found.dropped <= len(trained) // 50
    late = (1 + staleness) * len(found.trained[0])  # as many may be under way at the end
    missing = set(range(max(trained) - late)) - set(trained)
    assert len(missing) <= found.dropped
