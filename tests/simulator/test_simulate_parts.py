from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.compute import optimizer_seconds
from hetrl.cost.model import CostModel
from hetrl.cost.network import NO_PATH, gateway_path, gateways_of
from hetrl.cost.training import forward_pass_seconds, micro_batch_times, training_cost
from hetrl.errors import HetrlError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.simulator.events import Clock, Process, Signal, Turn
from hetrl.simulator.pipelines import deal, one_forward_one_backward
from hetrl.simulator.wires import Channel, fair_rates, gateway, route
from tests.plan.plan_cases import plan as three_site_plan
from tests.simulator.simulate_cases import (
    ACROSS,
    ONE_STAGE,
    TWO_STAGES,
    setting_of,
    small_plan,
    small_workload,
    stages_of,
    trained_seconds,
    two_sites,
)

# --- clock, turns, wires ---


def test_processes_meet_at_signals_in_the_order_of_time() -> None:
    clock, ready, seen = Clock(), Signal(), []

    def waits(name: str) -> Process:
        yield ready
        seen.append((name, clock.now))
        yield 1.0
        seen.append((name, clock.now))

    def fires() -> Process:
        yield 2.5
        ready.fire()

    first, second = clock.start(waits("first")), clock.start(waits("second"))
    clock.start(fires())
    clock.run(second)
    assert seen == [("first", 2.5), ("second", 2.5), ("first", 3.5), ("second", 3.5)]
    assert first.done


def test_a_simulation_that_nothing_can_end_says_so() -> None:
    with pytest.raises(RuntimeError, match="stands still at 0 s"):
        Clock().run(Signal())


def test_a_turn_goes_to_the_first_who_asked_and_last_to_those_who_ask_for_later() -> None:
    turn = Turn()
    first, later, second, third = turn.take(), turn.take(later=True), turn.take(), turn.take()
    assert first.done and turn.wanted.done
    for following in (second, third, later):
        assert not following.done
        turn.give()
        assert following.done
    assert not turn.wanted.done


def test_two_flows_halve_a_link_and_the_rest_goes_to_the_one_that_stays() -> None:
    setting = setting_of(two_sites(gbps=8.0, delay_ms=100.0), small_workload())  # 1 GB/s
    devices = setting.model.topology.device_by_id
    large = setting.network.send(devices["a/n0/0"], devices["b/n0/0"], 3e9, "large")
    small = setting.network.send(devices["a/n0/1"], devices["b/n0/1"], 1e9, "small")
    back = setting.network.send(devices["b/n0/0"], devices["a/n0/0"], 1e9, "the other direction is free")
    ends = []
    for transfer in (back, small, large):
        setting.clock.run(transfer.arrived)
        ends.append(setting.clock.now)
    assert ends == pytest.approx([1.1, 2.1, 4.1])
    assert dict(setting.network.carried) == {("a", "b"): 4e9, ("b", "a"): 1e9}
    lanes = {span.thread: span.seconds for span in setting.recorder.spans()}
    assert sorted(lanes) == ["to a", "to b", "to b #2"]
    assert sorted(lanes.values()) == pytest.approx([1.0, 2.0, 4.0])


def test_rates_are_max_min_fair() -> None:
    x, y = ("x",), ("y",)
    assert fair_rates([[x], [x, y], [y]], {x: 10.0, y: 4.0}) == [8.0, 2.0, 2.0]
    assert fair_rates([[x], [x], [x, y]], {x: 9.0, y: 1.0}) == [4.0, 4.0, 1.0]


@given(
    st.lists(st.sets(st.sampled_from("uvwxyz"), min_size=1), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_no_wire_carries_more_than_it_can_and_every_flow_has_a_full_one(
    paths: list[set[str]], rng: random.Random
) -> None:
    capacity = {(name,): rng.uniform(1, 10) for name in "uvwxyz"}
    wires = [tuple((name,) for name in sorted(path)) for path in paths]
    found = fair_rates(wires, capacity)
    load = {wire: sum(rate for rate, path in zip(found, wires, strict=True) if wire in path) for wire in capacity}
    assert all(load[wire] <= capacity[wire] * (1 + 1e-9) for wire in capacity)
    flows = list(zip(found, wires, strict=True))
    most = {wire: max((rate for rate, path in flows if wire in path), default=0.0) for wire in capacity}
    for rate, path in flows:
        full = [wire for wire in path if load[wire] == pytest.approx(capacity[wire])]
        assert any(rate == pytest.approx(most[wire]) for wire in full), "on one of them nobody has more"


@given(st.data())
def test_gateways_are_the_best_connected_nodes_of_two_sites(data: st.DataObject) -> None:
    """Against all pairs."""
    nics = data.draw(st.lists(st.sampled_from([1.0, 5.0, 10.0, 40.0]), min_size=2, max_size=6))
    cut = data.draw(st.integers(1, len(nics) - 1))
    sites = tuple(
        Site(name, tuple(Node(f"n{n}", "l4", 2, nic_gbps=gbps) for n, gbps in enumerate(part)))
        for name, part in (("a", nics[:cut]), ("b", nics[cut:]))
    )
    topology = Topology(sites, (Link(("a", "b"), 30.0, data.draw(st.sampled_from([0.5, 5.0, 100.0]))),))
    sides = [[device for device in topology.devices if device.site == name] for name in ("a", "b")]
    found = [path for pair in product(*sides) if (path := topology.path(*pair))]
    ends = [gateway(topology, side) for side in sides]
    assert topology.path(*ends) == max(found, key=lambda path: path.gbps)
    both = gateways_of(topology, topology.devices)
    assert gateway_path(topology, both, ("a", "b")) == topology.path(*ends)
    assert gateway_path(topology, {"a": both["a"]}, ("a", "b")) == gateway_path(topology, both, ("a", "c")) == NO_PATH


def test_messages_of_a_channel_follow_each_other_and_their_delays_overlap() -> None:
    setting = setting_of(two_sites(gbps=8.0, delay_ms=500.0), small_workload())
    ends = setting.model.topology.device_by_id["a/n0/0"], setting.model.topology.device_by_id["b/n0/0"]
    channel, times = Channel(setting.network, *ends, "messages"), []
    for arrived in [channel.send(1e9) for _ in range(3)]:
        setting.clock.run(arrived)
        times.append(setting.clock.now)
    assert times == pytest.approx([1.5, 2.5, 3.5])


def test_what_leaves_a_site_passes_nic_cap_and_link() -> None:
    capped = Site("a", (Node("n0", "l4", 1, nic_gbps=50, wan_gbps=2), Node("n1", "l4", 1, nic_gbps=50)))
    topology = Topology((capped, Site("b", (Node("n0", "l4", 1),))), (Link(("a", "b"), 30.0, 5.0),))
    slow, fast, far = topology.devices
    way = route(topology, slow, far)
    assert {wire[0]: rate * 8 / 1e9 for wire, rate in way.wires.items()} == pytest.approx(
        {"nic out": 50, "nic in": 100, "wan out": 2, "link": 5}
    )
    assert (way.delay_seconds, way.link) == (0.03, ("a", "b"))
    assert gateway(topology, [slow, fast]) == fast
    with pytest.raises(HetrlError, match="no link between a and b"):
        route(replace(topology, links=()), slow, far)


# --- pipelines ---


def test_the_order_of_passes_is_one_forward_one_backward() -> None:
    def order(stage: int, count: int) -> str:
        return " ".join(f"{kind[0]}{j}" for kind, j in one_forward_one_backward(3, stage, count))

    assert order(0, 4) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert order(2, 4) == "f0 b0 f1 b1 f2 b2 f3 b3"
    assert order(0, 1) == "f0 b0"
    assert order(1, 0) == ""


def test_one_stage_takes_the_sum_of_its_passes_and_updates() -> None:
    workload, topology = small_workload(), two_sites()
    plan = small_plan(workload, ONE_STAGE)
    (stage,) = stages_of(plan, topology, workload)
    times = micro_batch_times(stage, 2 * 192, "none", 192)
    steps = 8 * (times.forward + times.backward) + 2 * optimizer_seconds(stage.shape, 1)
    scored = stage.shape.rates.overhead.inference_call + 8 * forward_pass_seconds(stage, 2 * 192, 192)
    assert trained_seconds(plan, topology, workload)[0] == pytest.approx(scored + steps)
    to_sampler = replace(workload, ratio_to_sampler=True)
    assert trained_seconds(plan, topology, to_sampler)[0] == pytest.approx(steps)


@pytest.mark.parametrize(("stages", "gbps"), [(TWO_STAGES, 1.0), (ACROSS, 0.05), (ACROSS, 10.0)])
def test_scoring_a_batch_is_played_as_it_is_predicted(stages: tuple[Stage, ...], gbps: float) -> None:
    workload, topology = small_workload(optimizer_steps_per_iteration=1), two_sites(gbps)
    plan = small_plan(workload, stages)
    played, predicted = [], []
    for job in (workload, replace(workload, kl_in_reward=True)):
        played.append(trained_seconds(plan, topology, job))
        model = CostModel(topology, job)
        predicted.append(training_cost("actor_training", plan.tasks["actor_training"], model, {}))
    assert played[1][0] - played[0][0] == pytest.approx(predicted[1].parts["old_logprobs"], rel=1e-6)
    once = workload.samples * 192 * workload.actor.hidden * 2
    carried = [sum(setting.network.carried.values()) for _, setting in played]
    assert carried[1] - carried[0] == pytest.approx(once if stages is ACROSS else 0)
    assert sum(predicted[1].wan_bytes.values()) == pytest.approx(carried[1])


@pytest.mark.parametrize(("stages", "gbps"), [(TWO_STAGES, 1.0), (ACROSS, 0.05), (ACROSS, 10.0)])
def test_two_unequal_stages_match_a_hand_drawn_schedule(stages: tuple[Stage, ...], gbps: float) -> None:
    """The recurrence of each pass: after the pass before it on its stage, and after what it needs has arrived."""
    workload, topology = small_workload(optimizer_steps_per_iteration=1, samples=8), two_sites(gbps)
    plan = small_plan(workload, stages)
    first, last = (stage for stage in stages_of(plan, topology, workload))
    (f0, b0), (f1, b1) = (
        (t.forward, t.backward) for t in (micro_batch_times(s, 384, "none", 192) for s in (first, last))
    )
    way = route(topology, first.devices[0], last.devices[0])
    wire, size = min(way.wires.values()), 384 * workload.actor.hidden * 2
    down = up = 0.0  # when the wire is free
    ends = {}
    at0 = at1 = 0.0  # when the stage is free

    at0 = f0  # f0 of micro-batch 0, then f1, b0, f2, b1, f3, b2, b3
    order0 = [("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)]
    down = at0 + size / wire
    ends["f", 0] = down + way.delay_seconds
    for kind, j in order0:
        if kind == "f":
            at0 += f0
            down = max(at0, down) + size / wire
            ends["f", j] = down + way.delay_seconds
        else:
            at1 = max(at1, ends["f", j]) + f1 + b1
            up = max(at1, up) + size / wire
            at0 = max(at0, up + way.delay_seconds) + b0
    seconds, setting = trained_seconds(plan, topology, workload)
    update = max(optimizer_seconds(stage.shape, 1) for stage in (first, last))
    assert seconds == pytest.approx(at0 + update, rel=1e-9)
    assert sum(setting.network.carried.values()) == (8 * size if stages is ACROSS else 0)


def test_a_slow_hop_in_a_deep_pipeline_costs_half_of_each_round_trip_over_it() -> None:
    """Every other micro-batch waits for a round trip between the two stages, whatever is in flight before them.

    Of the strict order: B(k) at stage i+1, its hop, B(k) and a forward at stage i, the hop, that forward and two
    backwards later again stage i+1; so a period is at least (f + b of both stages + 2 hops) / 2.
    """
    workload = small_workload(optimizer_steps_per_iteration=1, samples=128)
    sites = tuple(Site(name, (Node("n0", "a100-80gb", 4),)) for name in "ab")
    topology = Topology(sites, (Link(("a", "b"), 200.0, 100.0),))
    devices = ("a/n0/0", "a/n0/1", "b/n0/0", "b/n0/1", "b/n0/2", "b/n0/3")
    stages = tuple(Stage((device,), (4 * index, 4 * index + 4)) for index, device in enumerate(devices))
    plan = small_plan(workload, stages, micro_batch=1)
    half = small_plan(replace(workload, samples=64), stages, micro_batch=1)
    seconds = trained_seconds(plan, topology, workload)[0]
    before = trained_seconds(half, topology, replace(workload, samples=64))[0]
    times = [micro_batch_times(stage, 192, "none", 192) for stage in stages_of(plan, topology, workload)[1:3]]
    hop = 0.2 + 192 * workload.actor.hidden * 2 * 8 / 100e9
    assert (seconds - before) / 64 == pytest.approx((sum(t.both for t in times) + 2 * hop) / 2, rel=0.01)


def one_replica(micro_batch: int, stages: int) -> TaskPlan:
    """Return a training by one replica of so many stages."""
    made = tuple(Stage((f"a/n/{index}",), (index, index + 1)) for index in range(stages))
    return TaskPlan("megatron", (Replica(1, made),), micro_batch=micro_batch)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 7))
def test_micro_batches_hold_every_token_once(responses: list[int], size: int) -> None:
    (cut,) = deal(responses, one_replica(size, 1), 10)
    assert sum(micro.tokens for micro in cut) == sum(responses) + 10 * len(responses)
    assert len(cut) <= -(-len(responses) // size)
    assert all(11 <= micro.sequence <= 60 for micro in cut)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 7))
def test_those_of_a_pipeline_are_filled_up_to_the_longest(responses: list[int], size: int) -> None:
    (cut,), (filled,) = (deal(responses, one_replica(size, stages), 10) for stages in (1, 2))
    assert [micro.tokens for micro in filled] == [max(micro.tokens for micro in cut)] * len(cut)


def test_a_batch_is_dealt_as_the_plan_divides_it() -> None:
    task = replace(three_site_plan().tasks["actor_training"], micro_batch=2)
    assert [len(micro) for micro in deal([7] * 64, task, 10)] == [20, 12]
