from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.compute import (
    StageShape,
    decode_seconds,
    forward_flops,
    layer_activation_bytes,
    pass_seconds,
    prefill_seconds,
    prompt_seconds,
    training_seconds,
    weight_seconds,
)
from hetrl.cost.cycle import batch_seconds, behind_seconds, shared_transfer_seconds
from hetrl.cost.efficiency import calibrated
from hetrl.cost.generation import (
    ReplicaSeconds,
    dealt_prompts,
    generation_seconds,
    prompts_seconds,
    replica_seconds,
    step_seconds,
)
from hetrl.cost.iteration import GroupTimes, iteration_seconds, predict, with_prediction
from hetrl.cost.memory import (
    inference_active_bytes,
    peak_memory_gb,
    training_active_bytes,
    training_footprint,
    training_state_bytes,
    update_bytes,
)
from hetrl.cost.model import CostModel
from hetrl.cost.network import Reduction, Ring, all_reduce_seconds, reduction_of, wan_reduction_bytes
from hetrl.cost.stages import Placed, place_all
from hetrl.cost.training import (
    Times,
    forward_pass_seconds,
    gradient_rings,
    micro_batch_times,
    micro_batches_of,
    pipeline_seconds,
    uneven,
)
from hetrl.cost.weight_sync import Versions, critic_behind, delta_share, held_bytes, weight_routes, weight_sync_cost
from hetrl.errors import UsageError
from hetrl.gpus import gpu_catalogue
from hetrl.hardware import Device, Link, Node, Path, Site, Topology
from hetrl.plan.plan import Plan, Replica, Route, Stage, TaskPlan
from hetrl.workload import Lengths, Workload, architecture
from tests.plan.plan_cases import plan as whole_plan, topology as three_sites, workload as grpo

EIGHT_B = architecture("qwen3-8b")
rates, efficiency = calibrated().rates, calibrated().of
WHOLE = StageShape(EIGHT_B, 36, True, True, True, 1, rates("a100-40gb"))


def test_decode_step_is_weights_and_keys_over_reached_bandwidth() -> None:
    matrices = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 151936 * 4096
    kv = 32 * 1500 * 36 * 2 * 8 * 128 * 2
    share = efficiency("a100-40gb")
    reading = 2 * matrices / (1555e9 * share.decode)
    products = 2 * matrices * 32 / (312e12 * share.prefill)
    expected = math.hypot(reading, products) + kv / (1555e9 * share.decode)
    assert decode_seconds(WHOLE, 32, 1500) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.0169, rel=0.03)  # seconds: a slip of 8 or 1024/1000 would show


def test_decode_of_a_large_batch_is_bound_by_the_products() -> None:
    device = rates("a100-40gb")
    products = 2 * WHOLE.matrix_parameters * 4096 / device.prefill_flops
    assert decode_seconds(WHOLE, 4096, 0) == pytest.approx(products, rel=0.01)


def test_a_rollout_engine_meets_the_vocabulary_once_per_prompt() -> None:
    device = rates("a100-40gb")
    head = 2 * 151936 * 4096 * (8000 - 8) / device.prefill_flops
    whole = replace(WHOLE, rates=replace(device, prompts=1.0))
    assert prefill_seconds(whole, 8000, 1000) - prompt_seconds(whole, 8000, 1000, 8) == pytest.approx(head, rel=0.01)
    share = prompt_seconds(whole, 8000, 1000, 8) / prompt_seconds(WHOLE, 8000, 1000, 8)
    assert share == pytest.approx(device.prompts, rel=0.01)


def test_a_forward_pass_of_the_trainer_is_a_third_of_its_training_without_recomputation() -> None:
    stage = Placed(WHOLE, (), None, None)
    forward = micro_batch_times(stage, 8000.0, "none", 1000.0).forward
    assert forward_pass_seconds(stage, 8000.0, 1000.0) == pytest.approx(forward, rel=0.01)
    few = pass_seconds(WHOLE, 1.0, 0.0)  # reading the weights takes longer than the products of one token
    assert few == pytest.approx(weight_seconds(WHOLE), rel=0.01)


def test_kv_heads_replicate_once_tensor_parallelism_exceeds_them() -> None:
    per_rank = [replace(WHOLE, tensor_parallel=degree).kv_bytes_per_token for degree in (1, 8, 16)]
    assert per_rank == [36 * 4096, 36 * 512, 36 * 512]


def test_a_token_costs_six_flops_per_parameter_and_causal_attention_to_train() -> None:
    matrices, sequence = WHOLE.matrix_parameters, 2048
    assert forward_flops(WHOLE, sequence) == 2 * matrices + 2 * 36 * 4096 * sequence
    device = rates("a100-40gb")
    kept = sum(training_seconds(WHOLE, 100, sequence, "none"))
    held = sum(training_seconds(replace(WHOLE, logits_again=False), 100, sequence, "none"))
    again = sum(training_seconds(WHOLE, 100, sequence, "full"))
    products = 100 * (6 * matrices + 6 * 36 * 4096 * sequence / device.attention) / device.training_flops
    values = 36 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    traffic = 100 * (3 * 2 * 2 * values + 12 * 151936) / device.activation_bytes_per_s
    launches = 3 * 36 * device.overhead.layer
    assert held == pytest.approx(products + traffic + launches)
    assert kept - held == pytest.approx(100 * 2 * 151936 * 4096 / device.training_flops)
    assert traffic < 0.2 * products
    layers = replace(WHOLE, last=False)
    assert again - kept == pytest.approx(training_seconds(layers, 100, sequence, "none")[0])
    half = sum(training_seconds(replace(WHOLE, recompute_layers=18), 100, sequence, "full"))
    assert half - kept == pytest.approx((again - kept) / 2)
    selective = sum(training_seconds(WHOLE, 100, sequence, "selective"))
    values = 36 * (2 * 4096 + 12288)  # two norms, one activation: written and read once more
    assert selective - kept == pytest.approx(100 * 2 * 2 * values / device.activation_bytes_per_s)


SERVER = ((WHOLE, None, None),)
OVERHEAD = rates("a100-40gb").overhead


def _replica(
    samples: int, limit: int, response: Lengths, staleness: int = 0, *, renews: bool = False
) -> ReplicaSeconds:
    return replica_seconds(SERVER, samples, limit, 500, 8, response, staleness, samples, renews)


def test_generation_is_prefill_and_the_steps_of_each_wave() -> None:
    fixed, call = Lengths(1000, 1000), OVERHEAD.generation_call
    step, half = (step_seconds(SERVER, batch, 1000) for batch in (64, 33))
    once = _replica(64, 64, fixed)
    assert once.whole == pytest.approx(call + prompts_seconds(SERVER, 8, 500) + 1000 * step)
    assert once.busy == pytest.approx(once.whole - call)
    assert _replica(128, 64, fixed).whole == pytest.approx(call + prompts_seconds(SERVER, 16, 500) + 2000 * step)
    assert _replica(66, 64, fixed).whole == pytest.approx(call + prompts_seconds(SERVER, 9, 500) + 2000 * half)


@pytest.mark.parametrize(("samples", "each"), [(64, 8), (66, 8), (4, 8), (12, 8), (7, 3), (5, 1), (1, 16)])
def test_replicas_that_draw_so_many_samples_each_share_prompts(samples: int, each: int) -> None:
    begins = range(0, samples * each, samples)  # of the replicas, in a row of samples
    prompts = [len({sample // each for sample in range(begin, begin + samples)}) for begin in begins]
    assert dealt_prompts(samples, each) == pytest.approx(sum(prompts) / len(prompts))


def test_spread_lengths_wait_for_the_longest_and_attend_to_more() -> None:
    spread = Lengths(1000, 4000, "lognormal")
    step, alone = (step_seconds(SERVER, batch, 500 + spread.second_moment / 2000) for batch in (64, 1))
    seconds = _replica(64, 64, spread).whole - OVERHEAD.generation_call - prompts_seconds(SERVER, 8, 500)
    assert spread.longest_of(64) * alone < seconds < spread.longest_of(64) * step


def test_ahead_of_training_the_batch_stays_full_and_samples_share_the_steps() -> None:
    spread = Lengths(1000, 4000, "lognormal")
    found = _replica(64, 64, spread, staleness=3)
    step = step_seconds(SERVER, 64, 500 + spread.second_moment / 2000)
    prefill = prompts_seconds(SERVER, 8, 500)
    assert found.busy == pytest.approx(prefill + 1000 * step)
    assert found.whole == pytest.approx(found.alone + found.shared, rel=0.01)  # no other batch is decoded beside it
    assert found.busy < found.alone < found.whole
    assert found.refill > prefill
    assert found.renewal == 0
    assert _replica(64, 64, spread, staleness=3, renews=True) == found._replace(renewal=found.refill)
    waves = _replica(64, 64, Lengths(1000, 1000), staleness=3, renews=True)
    assert waves.refill == pytest.approx(prompts_seconds(SERVER, 64, 500 / 8))  # a stop comes when one has ended
    assert waves.renewal == pytest.approx(prompts_seconds(SERVER, 64, 500 / 8 + 500))
    assert _replica(64, 64, spread, renews=True).renewal == 0  # nothing is under way when a version comes
    fixed = _replica(64, 256, Lengths(1000, 1000), 3)
    more = step_seconds(SERVER, 256, 1000) - step_seconds(SERVER, 1, 1000)
    assert fixed.shared == pytest.approx(64 * 1000 * more / 255)


def test_replicas_work_at_the_sum_of_their_rates() -> None:
    fast, slow = ReplicaSeconds(10, 4, 6, 8, 1, 3, 5), ReplicaSeconds(12, 8, 9, 7, 0, 2, 1)
    found = generation_seconds([(24, fast), (8, slow)])
    assert found._replace(busy=0) == ReplicaSeconds(12, 0, 9, 7, 0, 3, 5)
    assert found.busy == pytest.approx(32 / (24 / 4 + 8 / 8))


def test_a_pipeline_of_servers_reads_its_weights_once_per_group_in_flight() -> None:
    half = replace(WHOLE, layers=18, last=False)
    hop = Path(0.0, 1e9)
    one = step_seconds(((half, None, None),), 16, 1000)
    two = step_seconds(((half, None, hop), (half, None, None)), 32, 1000)
    assert two == pytest.approx(2 * one)


UNEQUAL = Lengths(512, 4096, "lognormal")


def test_sequences_share_micro_batches_up_to_the_longest_and_a_pipeline_fills_them_up() -> None:
    workload = _workload(response=UNEQUAL, prompt_tokens=256)
    longest, total = 256 + UNEQUAL.longest_of(64), 64 * 768
    assert micro_batches_of(64, 8, 1, workload) == (8, total / 8)
    count, tokens = micro_batches_of(64, 1, 1, workload)  # where each had one sequence, most were nearly empty
    assert 0.9 * total / longest < count < 64 / 3
    assert tokens == pytest.approx(total / count)
    filled = micro_batches_of(64, 1, 4, workload)
    assert filled[0] == count and tokens < filled[1] < 1.2 * tokens
    prompts = replace(workload, response=Lengths(256, 1024, "lognormal"), prompt_tokens=1024)  # no two go together
    longest = 1024 + prompts.response.longest_of(64)
    assert micro_batches_of(64, 1, 4, prompts) == (64, pytest.approx(longest, rel=0.01))
    assert micro_batches_of(64, 1, 4, replace(workload, response=Lengths(512, 512))) == (64, 768)


def test_replicas_have_equal_tokens_unless_one_sequence_is_longer_than_that() -> None:
    workload = _workload(response=UNEQUAL, prompt_tokens=256, samples=64, optimizer_steps_per_iteration=1)
    longest = 256 + UNEQUAL.longest_of(64)
    few, many = (
        TaskPlan("megatron", (Replica(64 // count, (Stage(("a/n/0",), (0, 28)),)),) * count) for count in (4, 32)
    )
    assert uneven(few, 1, workload) == 1
    assert uneven(many, 1, workload) == pytest.approx(longest / (2 * 768))
    assert uneven(many, 1, replace(workload, response=Lengths(512, 512))) == 1


def test_equal_stages_without_hops_give_the_textbook_pipeline() -> None:
    stages = [Times(1.0, 2.0)] * 4
    assert pipeline_seconds(stages, 8) == pytest.approx((8 + 4 - 1) * 3.0)
    assert pipeline_seconds([Times(1.0, 2.0), Times(2.0, 4.0)], 5) == pytest.approx(9.0 + 4 * 6.0)


def test_a_slow_hop_bounds_the_pipeline_by_the_round_trip_of_its_two_stages() -> None:
    hop = Path(0.0, 1.0)  # 1e9 bits per second: 1 GB takes 8 s
    stages = [Times(1.0, 2.0, hop, 1e9), Times(1.0, 2.0)]
    assert pipeline_seconds(stages, 11) == pytest.approx(6 + 16 + 10 * (6 + 16) / 2)
    deep = [Times(0.001, 0.002, hop, 1e9), *[Times(0.001, 0.002)] * 7]
    assert pipeline_seconds(deep, 101) == pytest.approx(864.3, abs=0.1)  # as it is played


def test_a_long_round_trip_bounds_the_pipeline_by_what_is_in_flight() -> None:
    hop = Path(1000.0, 1e9)
    stages = [Times(0.1, 0.1, hop, 0.0), Times(0.1, 0.1)]
    assert pipeline_seconds(stages, 11) == pytest.approx(2.4 + 10 * 2.4 / 2)


def test_all_reduce_is_reduce_scatter_and_all_gather_in_one_direction() -> None:
    edge = Path(0.005, 2400)  # 300 GB/s in one direction
    assert all_reduce_seconds(4, 300e9, edge) == pytest.approx(1e-5 + 2 * 3 / 4 * 1.0)
    assert all_reduce_seconds(1, 300e9, None) == 0.0


def _two_sites(gbps: float = 5.0, delay_ms: float = 10.0, gpu: str = "a100-80gb") -> Topology:
    sites = tuple(Site(name, (Node("n0", gpu, 2),)) for name in ("a", "b"))
    return Topology(sites, (Link(("a", "b"), delay_ms, gbps),))


def test_the_gradient_of_8b_crosses_two_sites_once_each_way() -> None:
    devices = (Device("a", "n0", 0, "a100-80gb"), Device("b", "n0", 0, "a100-80gb"))
    gradient = EIGHT_B.parameters * 4
    ring = Ring(devices, gradient, gradient / 2, False)
    assert wan_reduction_bytes([ring]) == {("a", "b"): gradient, ("b", "a"): gradient}
    assert gradient / 1e9 == pytest.approx(32.8, abs=0.1)
    seconds = reduction_of(_two_sites(), [ring], {}).seconds
    assert seconds == pytest.approx(gradient * 8 / 5e9 + 0.02, rel=1e-3)
    sharing = {("a", "b"): 2}
    assert reduction_of(_two_sites(), [ring], sharing).seconds == pytest.approx(2 * gradient * 8 / 5e9 + 0.02, rel=1e-3)
    sharded = replace(ring, sharded=True)
    assert wan_reduction_bytes([sharded])["a", "b"] == gradient / 2 + gradient / 4  # half, and half of bf16 back
    assert wan_reduction_bytes([replace(sharded, gathered=0.1)])["a", "b"] == gradient / 2 + gradient / 40


def test_a_ring_inside_a_node_runs_at_its_lanes() -> None:
    devices = tuple(Device("a", "n0", index, "a100-80gb") for index in range(2))
    seconds = reduction_of(_two_sites(), [Ring(devices, 300e9, 150e9, False)], {}).seconds
    assert seconds == pytest.approx(1.0, rel=1e-3)  # 2 x 1/2 x 300 GB at 300 GB/s


def test_rings_between_nodes_share_the_nic_of_each_node() -> None:
    topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 2, nic_gbps=80) for index in range(2))),))
    rings = [
        Ring(tuple(Device("a", f"n{node}", rank, "a100-80gb") for node in range(2)), 10e9, 5e9, False)
        for rank in range(2)
    ]
    found = reduction_of(topology, rings, {})
    assert found.seconds == pytest.approx(2 * 10e9 / 10e9, rel=1e-3)  # 80 gbps: 10 GB/s


def test_a_sharded_optimiser_scatters_gradients_and_gathers_parameters_behind_the_update() -> None:
    devices = (Device("a", "n0", 0, "a100-80gb"), Device("b", "n0", 0, "a100-80gb"))
    whole = reduction_of(_two_sites(), [Ring(devices, 32e9, 16e9, False)], {})
    assert whole == Reduction(pytest.approx(32e9 * 8 / 5e9 + 0.02, rel=1e-3), 0.0)
    parts = reduction_of(_two_sites(), [Ring(devices, 32e9, 16e9, True)], {})
    assert parts == Reduction(*(pytest.approx(size * 8 / 5e9 + 0.01, rel=1e-3) for size in (16e9, 8e9)))


def test_all_buckets_but_the_last_are_reduced_beside_the_backward_pass() -> None:
    reduction = Reduction(reduce=8.0, gather=1.0)
    assert reduction.behind(4.0, parameters=4 * 40e6, replicas=2) == 8.0 - 3 / 4 * 4.0 + 1.0
    assert reduction.behind(99.0, parameters=4 * 40e6, replicas=2) == 8.0 / 4 + 1.0
    assert reduction.behind(4.0, parameters=40e6, replicas=2) == reduction.seconds, "one bucket comes at the end"
    assert reduction.behind(4.0, parameters=4 * 40e6, replicas=80) == 8.0 - 1 / 2 * 4.0 + 1.0


def test_inside_a_site_a_version_takes_the_nic_and_the_way_from_host_memory() -> None:
    topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 2, nic_gbps=8) for index in range(2))),))
    workload, model = grpo(), grpo().actor
    trainer = TaskPlan("megatron", (Replica(64, (Stage(("a/n0/0",), (0, 28)),)),))
    generator = TaskPlan("vllm", (Replica(64, (Stage(("a/n1/0", "a/n1/1"), (0, 28)),)),))
    tasks = {"actor_training": trainer, "actor_generation": generator}
    cost = weight_sync_cost(weight_routes(tasks), tasks, CostModel(topology, workload))
    size = model.parameters * 2
    assert cost.wan_bytes == {}
    assert cost.transfer_seconds == pytest.approx(size / 1e9)  # 8 gbps: 1 GB/s
    fixed = rates("a100-80gb").overhead.weight_version
    assert cost.pause_seconds == pytest.approx(fixed + size / 2 / 32e9)  # half of it per device, PCIe 32 GB/s one way


def test_a_node_receives_the_weights_that_it_does_not_hold() -> None:
    topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 2, nic_gbps=8) for index in range(3))),))
    workload = grpo()
    whole = TaskPlan("megatron", (Replica(64, (Stage(("a/n0/0",), (0, 28)),)),))
    halves = TaskPlan("megatron", (Replica(64, (Stage(("a/n0/0",), (0, 14)), Stage(("a/n1/0",), (14, 28)))),))

    def seconds(trainer: TaskPlan, *rollouts: str) -> float:
        generator = TaskPlan("vllm", tuple(Replica(32, (Stage((device,), (0, 28)),)) for device in rollouts))
        tasks = {"actor_training": trainer, "actor_generation": generator}
        return weight_sync_cost(weight_routes(tasks), tasks, CostModel(topology, workload)).transfer_seconds

    size = workload.actor.parameters * 2
    copied = size / rates("a100-80gb").host_bytes_per_s
    assert seconds(whole, "a/n0/1") == pytest.approx(copied)  # on the trainer's own node: no network
    assert seconds(whole, "a/n0/1", "a/n1/0") == pytest.approx(size / 1e9)
    held = max(held_bytes("actor_training", halves, CostModel(topology, workload)).values())
    assert sum(held_bytes("actor_training", halves, CostModel(topology, workload)).values()) == size
    assert seconds(halves, "a/n0/1", "a/n1/1") == pytest.approx(held / 1e9)
    assert seconds(halves, "a/n2/0") == pytest.approx(size / 1e9)


def test_training_holds_18_bytes_per_parameter_sharded_6_and_12_over_dp() -> None:
    whole = EIGHT_B.parameters
    assert sum(training_state_bytes(WHOLE, 1, "fp32")) == 18 * whole
    assert sum(training_state_bytes(WHOLE, 4, "fp32")) == 6 * whole + 3 * whole
    assert sum(training_state_bytes(replace(WHOLE, weight_bytes=4), 1, "fp32")) == 16 * whole


def test_gradients_in_bf16_take_half_and_are_copied_for_the_update() -> None:
    whole, fp32_model = EIGHT_B.parameters, replace(WHOLE, weight_bytes=4)
    assert sum(training_state_bytes(WHOLE, 1, "bf16")) == 16 * whole
    assert sum(training_state_bytes(WHOLE, 4, "bf16")) == 4 * whole + 3 * whole
    assert training_state_bytes(fp32_model, 1, "bf16") == training_state_bytes(fp32_model, 1, "fp32")
    assert update_bytes(WHOLE, 4, "bf16") == whole
    assert update_bytes(WHOLE, 4, "fp32") == update_bytes(fp32_model, 4, "bf16") == 0


@pytest.mark.parametrize("micro_batch", [1, 40])
def test_the_update_stands_where_the_activations_stood(micro_batch: int) -> None:
    base = whole_plan().tasks["actor_training"]
    task = replace(base, micro_batch=micro_batch, gradient_dtype="bf16", optimizer_sharding="none")
    shape = replace(WHOLE, architecture=architecture("qwen3-1.7b"), layers=14, last=False)
    workload = grpo()
    activations = training_active_bytes(shape, 2, micro_batch * workload.max_sequence_tokens, "full")
    copies = 4 * shape.parameters
    assert (activations > copies) == (micro_batch > 1)
    found = training_footprint(shape, task, 0, workload)
    assert found.active_gb == max(activations, copies) / 1e9
    assert found.resident_gb == 16 * shape.parameters / 1e9


def test_a_reduction_in_bf16_sends_half_and_one_of_a_model_in_fp32_does_not() -> None:
    model = CostModel(three_sites(), grpo())
    base = whole_plan().tasks["actor_training"]
    sent = {}
    for dtype, weight_bytes in product(("fp32", "bf16"), (2, 4)):
        task = replace(base, gradient_dtype=dtype)
        found = replace(model, workload=replace(grpo(), weight_bytes=weight_bytes))
        rings = gradient_rings(task, place_all("actor_training", task.replicas, found), found)
        sent[dtype, weight_bytes] = sum(ring.gradient_bytes for ring in rings)
    assert sent["fp32", 2] == 2 * sent["bf16", 2]
    assert sent["fp32", 4] == sent["bf16", 4] == sent["fp32", 2]


def test_a_tied_embedding_is_held_twice_in_a_pipeline() -> None:
    tied = architecture("qwen3-1.7b")
    first = StageShape(tied, 14, True, False, True, 1, rates("cpu"))
    last = StageShape(tied, 14, False, True, True, 1, rates("cpu"))
    both = StageShape(tied, 28, True, True, True, 1, rates("cpu"))
    assert both.parameters == tied.parameters
    assert first.parameters + last.parameters == tied.parameters + tied.embedding_parameters


def test_activations_count_micro_batches_in_flight_and_the_output_layer() -> None:
    stage, tokens = replace(WHOLE, layers=9, first=False), 100
    assert layer_activation_bytes(stage) == 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    layer = 2 * (4 * 4096 + 128 * (4 * 32 + 3 * 8) + 3 * 12288 + 4 * 128)
    gradient, logits = 151936 * 4096 * 2, 4 * tokens * 151936
    head = logits / 2 + 2 * gradient + 2 * tokens * 4096 * 2  # of few tokens, the weights' gradient is the larger part
    assert training_active_bytes(stage, 3, tokens, "none") == tokens * 3 * 9 * layer + head
    assert training_active_bytes(stage, 3, tokens, "full") == tokens * 3 * 9 * 8192 + head
    inner = replace(stage, last=False)
    assert training_active_bytes(inner, 3, tokens, "none") == tokens * (3 * 9 + 0.5) * layer
    assert training_active_bytes(inner, 3, tokens, "full") == tokens * (3 * 9 * 8192 + 2 * layer)


def test_a_chunk_bounds_the_logits_of_however_many_tokens() -> None:
    stage = replace(WHOLE, first=False)
    few, many = (inference_active_bytes(stage, tokens) - 2 * tokens * 4096 * 2 for tokens in (400, 40_000))
    assert few == 2 * 4 * 400 * 151936
    assert inference_active_bytes(replace(stage, last=False), 400) == 400 * 2 * 73_216
    assert many < 40_000 * 4 * 151936


def test_the_first_stage_ends_with_the_gradient_of_the_embedding() -> None:
    stage = replace(WHOLE, layers=1, last=False)
    gradient = 2 * 151936 * 4096 * 2
    assert training_active_bytes(stage, 1, 1, "full") == gradient
    assert training_active_bytes(replace(stage, tensor_parallel=4), 1, 1, "full") == gradient / 4


def test_a_device_holds_all_residents_and_the_largest_active_set() -> None:
    plan, workload, topology = whole_plan(), grpo(), three_sites()
    memory = peak_memory_gb(plan, CostModel(topology, workload))
    alone = replace(plan, tasks={"reference_inference": plan.tasks["reference_inference"]})
    trained = replace(plan, tasks={"actor_training": plan.tasks["actor_training"]})
    device = "alps/a100-0/0"
    parts = (
        peak_memory_gb(alone, CostModel(topology, workload))[device],
        peak_memory_gb(trained, CostModel(topology, workload))[device],
    )
    assert max(parts) < memory[device] < sum(parts)
    weights = workload.actor.parameters * 2 / 1e9
    assert memory["jsc/l40s-1/0"] > weights  # the reward model, tied: no head
    assert memory["lab/l4-0/0"] >= weights + 9.5


def test_weights_cross_each_link_once_and_the_slowest_counts() -> None:
    plan, workload, topology = whole_plan(), grpo(), three_sites()
    routes = weight_routes(plan.tasks)
    assert [(route.source, route.target) for route in routes.routes] == [("alps", "jsc"), ("alps", "lab")]
    cost = weight_sync_cost(routes, plan.tasks, CostModel(topology, workload))
    size = workload.actor.parameters * 2
    assert cost.wan_bytes == {("alps", "jsc"): size, ("alps", "lab"): size}
    assert cost.transfer_seconds == pytest.approx(0.04 + size * 8 / 0.9e9)


def _workload(**changes: object) -> Workload:
    return replace(grpo(), **changes)  # type: ignore[arg-type]


def test_a_synchronous_iteration_is_the_sum_of_its_stations() -> None:
    groups = [GroupTimes(10, 0, 0), GroupTimes(0, 3, 20), GroupTimes(0, 4, 15)]
    sync, versions = _workload(mode="sync", max_staleness=0), Versions(20, 5, 1)
    assert iteration_seconds(groups, versions, sync) == 10 + 4 + 20 + 5 + 1
    assert iteration_seconds(groups, versions, _workload(mode="async", max_staleness=0)) == 40


def test_generation_waits_for_the_actor_and_its_own_devices_and_devices_for_nothing_but_their_tasks() -> None:
    sync, versions = _workload(mode="sync", max_staleness=0), Versions(20, 5, 1)
    apart = [GroupTimes(10, 0, 0), GroupTimes(0, 4, 20), GroupTimes(0, 3, 30)]  # the last one trains the critic
    assert iteration_seconds(apart, versions, sync) == 10 + 4 + 20 + 5 + 1
    assert iteration_seconds([*apart, GroupTimes(0, 2, 50)], versions, sync) == 2 + 50
    assert iteration_seconds(apart, replace(versions, links=70), sync) == 70
    shared = [GroupTimes(10, 0, 30), GroupTimes(0, 4, 20)]
    assert iteration_seconds(shared, versions, sync) == 10 + 4 + 30 + 1


def test_values_wait_for_the_critic_where_it_arrives_behind_the_samples() -> None:
    groups = [GroupTimes(10, 0, 0), GroupTimes(0, 4, 20)]
    sync = _workload(mode="sync", max_staleness=0)
    assert iteration_seconds(groups, Versions(20, 5, 1, critic=35, valuing=4), sync) == 10 + 4 + 20 + 5 + 1
    assert iteration_seconds(groups, Versions(20, 5, 1, critic=80, valuing=4), sync) == 80 + 4
    ahead = replace(sync, mode="async", max_staleness=1)
    rollouts = ReplicaSeconds(whole=12, busy=10, alone=12)
    groups[0] = replace(groups[0], rollouts=rollouts)
    assert iteration_seconds(groups, Versions(20, 5, 1, critic=60, valuing=4), ahead) == (60 + 4) / 2
    assert iteration_seconds(groups, Versions(20, 5, 1, critic=58, valuing=38), ahead) == (58 + 38) / 2


def test_the_critic_is_sent_where_its_inference_lies_apart_from_its_training() -> None:
    topology = Topology(
        tuple(Site(name, (Node("n", "a100-80gb", 2, nic_gbps=100),)) for name in ("a", "b")), (Link(("a", "b"), 10, 8),)
    )
    workload = replace(grpo(), algorithm="ppo", critic=architecture("qwen2.5-7b"))
    whole = (Replica(64, (Stage(("a/n/0",), (0, 28)),)),)
    tasks = {
        "actor_generation": TaskPlan("vllm", whole),
        "actor_training": TaskPlan("megatron", whole),
        "critic_training": TaskPlan("megatron", whole),
        "critic_inference": TaskPlan("megatron", (Replica(64, (Stage(("b/n/0",), (0, 28)),)),)),
    }
    routes, model = weight_routes(tasks), CostModel(topology, workload)
    assert routes.routes == (Route("a", "b", model="critic"),)
    costs = {name: weight_sync_cost(routes, tasks, model, name) for name in ("actor", "critic")}
    size = workload.critic.parameters - workload.critic.head_parameters + workload.critic.hidden  # one value per token
    assert costs["actor"].wan_bytes == {}
    assert costs["critic"].wan_bytes == {("a", "b"): 2 * size}
    assert critic_behind(costs, topology).seconds == pytest.approx(
        0.01 + 2 * size / 1e9 + costs["critic"].pause_seconds
    )
    tasks["actor_generation"] = tasks["critic_inference"]
    costs["actor"] = weight_sync_cost(weight_routes(tasks), tasks, model)  # both over one link: one after the other
    size = workload.actor.parameters * 2
    assert critic_behind(costs, topology).seconds == pytest.approx(size / 1e9 + costs["critic"].seconds)


@pytest.mark.parametrize(
    ("lead", "actor", "critic"),
    [
        (0, 10 + 6, 6 + 8),  # both start at once: one is held up until the other is through
        (5, 10 + 3, 6 + 3),  # 3 of the 8 that both take are left of the actor's
        (8, 10, 6),
        (-4, 10 + 2, 6 + 8),  # 2 are left of the critic's
        (-6, 10, 6),
    ],
)
def test_versions_hold_each_other_up_while_both_are_under_way(lead: float, actor: float, critic: float) -> None:
    assert behind_seconds(6, 14, lead) == critic
    assert shared_transfer_seconds(10, 6, critic, lead) == actor


def test_an_asynchronous_iteration_is_what_takes_longest() -> None:
    def seconds(groups: list[GroupTimes], transfer: float = 1.0, staleness: int = 9, links: float = 0.0) -> float:
        trained = max(group.trainings for group in groups)
        versions = Versions(trained, transfer, 1, links=links)
        return iteration_seconds(groups, versions, _workload(mode="async", max_staleness=staleness))

    rollouts = ReplicaSeconds(whole=12, busy=10, alone=8, shared=4, refill=2)
    groups = [GroupTimes(10, 0, 0, rollouts), GroupTimes(0, 3, 20), GroupTimes(0, 4, 15)]
    assert seconds(groups) == 23  # the second group
    assert seconds(groups, transfer=30) == 30
    assert seconds(groups, links=40) == 40
    busy = rollouts._replace(busy=25)
    assert seconds([GroupTimes(25, 0, 0, busy), *groups[1:]]) == 26  # with the pause of a version
    renewed = busy._replace(renewal=3)
    assert seconds([GroupTimes(25, 0, 0, renewed), *groups[1:]]) == 29  # and contexts that are computed anew
    together = [GroupTimes(10, 3, 20, rollouts), GroupTimes(0, 2, 30)]
    assert seconds(together) == 10 + 3 + 20 + 1 + 2  # one refill: the trainings follow the inferences
    assert seconds([together[0], GroupTimes(0, 5, 30)]) == 10 + 3 + 20 + 1 + 2 * 2


def test_a_batch_passes_all_stations_while_staleness_allows_others_beside_it() -> None:
    rollouts = ReplicaSeconds(whole=100, busy=10, alone=100)
    groups = [GroupTimes(10, 0, 0, rollouts), GroupTimes(0, 3, 20)]
    for staleness in (1, 2, 4):
        workload = _workload(mode="async", max_staleness=staleness)
        period = iteration_seconds(groups, Versions(20, 7, 0), workload)
        assert period * (1 + staleness) == pytest.approx(100 + 3 + 20 + 7)


@pytest.mark.parametrize(("pause", "held_up"), [(0.5, 0.0), (1.0, 0.3)])
def test_a_version_that_is_loaded_behind_a_batch_does_not_hold_it_up(pause: float, held_up: float) -> None:
    rollouts = ReplicaSeconds(whole=1.0, busy=0.1, alone=1.0)
    groups = [GroupTimes(0.1, 0, 0, rollouts), GroupTimes(0, 0.2, 1.0)]
    period = iteration_seconds(groups, Versions(1.0, 0.5, pause), _workload(mode="async", max_staleness=1))
    arrival = 0.2 + 1.0 + 0.5
    assert 2 * period == pytest.approx(arrival + pause + 1.0 + held_up)
    next_load = period + arrival  # generation of the batch begins at arrival + pause and lasts until 2 periods
    assert max(2 * period - next_load, 0.0) == pytest.approx(held_up)


@given(st.floats(30, 200), st.floats(0, 20), st.floats(1, 60), st.floats(0, 20), st.integers(2, 5))
def test_a_batch_takes_what_it_takes_alone_and_the_part_of_those_beside_it(
    period: float, stopped: float, alone: float, shared: float, batches: int
) -> None:
    running = period - stopped

    def took(regular: float) -> float:
        return batch_seconds(period, stopped, regular, batches, 0.0, alone, shared, 0.0)

    if shared < running:
        evenly, at_random = took(period), took(0.0)
        assert evenly == pytest.approx(alone + shared * evenly / running)
        others = (batches - 1) / batches * at_random / running
        assert at_random == pytest.approx(alone + shared * (1 + others))
        assert batch_seconds(period, stopped, period, batches, evenly + 1, alone, shared, 0.0) == evenly + 1
        left = max(1 - running / evenly, 0.0)  # of the batch before
        assert batch_seconds(period, stopped, period, batches, 0.0, alone, shared, 7.0) == pytest.approx(
            evenly + 7 * left
        )


@pytest.mark.parametrize("busy", [10.0, 20.0])
def test_batches_that_share_generation_pass_it_in_the_periods_that_they_have(busy: float) -> None:
    workload = _workload(mode="async", max_staleness=1)
    rollouts = ReplicaSeconds(whole=60, busy=busy, alone=40, shared=20)
    groups = [GroupTimes(busy, 0, 0, rollouts), GroupTimes(0, 0, 30)]
    period = iteration_seconds(groups, Versions(30, 0, 0), workload)
    beside = batch_seconds(period, 0.0, 30, 2, 60, 40, 20, 0.0)
    assert beside > 60
    assert 2 * period == pytest.approx(30 + beside)


def test_prediction_names_every_task_link_and_device() -> None:
    plan = with_prediction(whole_plan(), CostModel(three_sites(), grpo()))
    predicted = plan.predicted
    assert set(predicted.tasks) == {*plan.tasks, "old_logprobs", "weight_sync"}
    assert set(predicted.peak_memory_gb) == {device for task in plan.tasks.values() for device in task.devices}
    assert set(predicted.wan_gb_per_iteration) == {"alps-jsc", "alps-lab"}
    assert predicted.samples_per_second == pytest.approx(64 / predicted.iteration_seconds)


def test_a_plan_over_a_missing_link_takes_for_ever() -> None:
    topology = replace(three_sites(), links=())
    assert predict(whole_plan(), CostModel(topology, grpo())).iteration_seconds > 1e6


def _over_two_sites() -> Plan:
    """Return the whole plan with a trainer whose stages and replicas lie in two sites each."""
    stages = [
        (Stage(("alps/a100-0/0",), (0, 14)), Stage(("jsc/l40s-0/0",), (14, 28))),
        (Stage(("jsc/l40s-1/0",), (0, 14)), Stage(("alps/a100-1/0",), (14, 28))),
    ]
    trainer = TaskPlan("megatron", tuple(Replica(32, pair) for pair in stages))
    return replace(whole_plan(), tasks={**whole_plan().tasks, "actor_training": trainer})


factors = st.floats(1.0, 20.0)


WORKLOADS = [
    _workload(mode=mode, max_staleness=staleness, response=response)
    for mode, staleness in (("sync", 0), ("async", 1), ("async", 4))
    for response in (Lengths(512, 512), Lengths(512, 700, "uniform"), Lengths(300, 512, "lognormal"))
]


@given(factors, factors, factors, st.sampled_from([whole_plan, _over_two_sites]), st.sampled_from(WORKLOADS))
def test_faster_links_and_wires_never_slow_a_plan_down(
    link: float, nic: float, peer: float, make: Callable[[], Plan], workload: Workload
) -> None:
    plan, before = make(), three_sites()
    links = tuple(replace(one, gbps=one.gbps * link, delay_ms=one.delay_ms / link) for one in before.links)
    sites = tuple(
        replace(
            site,
            nodes=tuple(replace(node, nic_gbps=node.nic_gbps * nic, peer_gbps=2400 * peer) for node in site.nodes),
        )
        for site in before.sites
    )
    faster = predict(plan, CostModel(Topology(sites, links), workload))
    slower = predict(plan, CostModel(before, workload))
    assert faster.iteration_seconds <= slower.iteration_seconds * (1 + 1e-9)
    for task, seconds in faster.tasks.items():
        assert seconds <= slower.tasks[task] * (1 + 1e-9)


@given(st.sampled_from(["a100-40gb", "l40s", "l4"]), st.sampled_from(["sync", "async"]))
def test_a_better_gpu_never_slows_a_plan_down(gpu: str, mode: str) -> None:
    before = three_sites()
    better = {"a100-40gb": "h100", "l40s": "h100", "l4": "l40s"}[gpu]
    sites = tuple(
        replace(s, nodes=tuple(replace(n, gpu=better if n.gpu == gpu else n.gpu) for n in s.nodes))
        for s in before.sites
    )
    workload = _workload(mode=mode, max_staleness=2 if mode == "async" else 0)
    after = predict(whole_plan(), CostModel(replace(before, sites=sites), workload))
    assert after.iteration_seconds <= predict(whole_plan(), CostModel(before, workload)).iteration_seconds * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 5))
def test_memory_never_rises_when_the_micro_batch_falls(small: int, more: int) -> None:
    plan = whole_plan()

    def peaks(size: int) -> dict[str, float]:
        trainer = replace(plan.tasks["actor_training"], micro_batch=size)
        return peak_memory_gb(
            replace(plan, tasks={**plan.tasks, "actor_training": trainer}), CostModel(three_sites(), grpo())
        )

    large = peaks(small + more)
    assert all(gb <= large[device] for device, gb in peaks(small).items())


def test_every_catalogue_type_has_efficiencies_and_says_which_are_inferred() -> None:
    for name in gpu_catalogue():
        shares = efficiency(name)
        assert all(0.2 < share <= 1 for share in (shares.decode, shares.prefill, shares.training))
    found = calibrated().uncalibrated(["a100-40gb", "a100-80gb", "l4", "h100", "cpu"])
    assert found == {"cpu": ("decode", "prefill", "training"), "l4": ("training",)}


def test_an_inferred_share_is_the_a100s_or_what_the_power_feeds() -> None:
    a100, l4, l40s, h100 = (efficiency(name) for name in ("a100-40gb", "l4", "l40s", "h100"))
    assert efficiency("a40").prefill == a100.prefill
    power = (72 / 121) / (350 / 362.05)
    assert l4.training == pytest.approx(l40s.training * power ** (1 / 3))
    assert l40s.prefill == pytest.approx(l4.prefill / power ** (1 / 3))
    assert efficiency("h20").training == a100.training  # 400 W for 148 TFLOPS: never held back
    assert (efficiency("h200").decode, efficiency("h200").training) == (h100.decode, h100.training)
    assert l40s.decode == l4.decode
    known = {gpu: dict(shares) for gpu, shares in calibrated().shares.items()}
    del known["l4"]["prefill"]
    ratio = a100.prefill / a100.training
    assert replace(calibrated(), shares=known).of("l4").prefill == pytest.approx(l4.training * ratio)


def test_other_numbers_are_those_of_another_value() -> None:
    before = rates("a100-40gb")
    shares = {**calibrated().shares, "a100-40gb": {"decode": 0.5, "prefill": 0.5, "training": 0.5}}
    assert replace(calibrated(), shares=shares).rates("a100-40gb").decode_bytes == 0.5 * 1555e9
    assert rates("a100-40gb") == before


def test_an_engine_is_the_one_of_the_points_unless_it_is_named() -> None:
    numbers = calibrated()
    served = numbers.rates_served
    for gpu, named, engine in (("a100-80gb", None, "vllm-0.6"), ("a100-80gb", "vllm-0.23", "vllm-0.23")):
        found = served(gpu, named)
        assert found.overhead.decode_step == numbers.engines[engine].step_seconds
        assert (found.overhead.decode_sequence, found.prompts) == (0.0, 1.0)
    own, planned = numbers.engines["vllm-0.32"], numbers.rates("l4")
    assert served("l4") == planned == served("l4", "vllm-0.32")
    overhead = planned.overhead
    assert (overhead.decode_step, overhead.decode_sequence) == (own.step_seconds, own.sequence_seconds)
    assert planned.prompts == own.prefill < 1
    assert served("cpu", "vllm-0.6") == numbers.rates("cpu")
    with pytest.raises(UsageError, match='unknown engine "vllm-0.7"; did you mean "vllm-0.6"'):
        served("h100", "vllm-0.7")


def test_each_running_sequence_adds_to_a_decode_step() -> None:
    bare = replace(WHOLE, rates=replace(WHOLE.rates, overhead=replace(OVERHEAD, decode_sequence=0.0)))
    more = step_seconds(SERVER, 64, 1000) - step_seconds(((bare, None, None),), 64, 1000)
    assert more == pytest.approx(64 * OVERHEAD.decode_sequence)
    halves = replace(WHOLE, layers=18, last=False), replace(WHOLE, layers=18, first=False)
    hop = Path(0.0, 100.0)
    two, none = (
        step_seconds(tuple((replace(half, rates=one.rates), None, hop) for half in halves), 64, 1000)
        for one in (WHOLE, bare)
    )
    assert two - none == pytest.approx(64 * OVERHEAD.decode_sequence)  # 32 at once, at two stages


def test_a_delta_sends_what_changed_and_where_and_never_more_than_all() -> None:
    plan, workload, topology = whole_plan(), grpo(), three_sites()
    size = workload.actor.parameters * 2
    delta = replace(weight_routes(plan.tasks), encoding="delta")

    def crossing(changed: float | None) -> float:
        cost = weight_sync_cost(delta, plan.tasks, CostModel(topology, workload), changed=changed)
        return cost.wan_bytes["alps", "lab"]

    assert crossing(None) == size
    assert crossing(0.0121) == pytest.approx(size / 124, rel=0.05)  # what the codec made of such a version
    assert crossing(0.0988) == pytest.approx(size / 22, rel=0.05)
    assert crossing(1.0) == pytest.approx(size * 3 / 16)
    assert delta_share(1.0, 4) == pytest.approx(1 / 2.8, rel=0.01)
    assert delta_share(0.0, 2) == 0.0


def test_a_delta_is_loaded_whole() -> None:
    plan, model = whole_plan(), CostModel(three_sites(), grpo())
    full, delta = (
        weight_sync_cost(replace(weight_routes(plan.tasks), encoding=encoding), plan.tasks, model, changed=0.01)
        for encoding in ("full", "delta")
    )
    assert delta.pause_seconds == full.pause_seconds
    assert delta.uplink_seconds < full.uplink_seconds
