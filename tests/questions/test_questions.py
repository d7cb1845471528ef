"""Single questions: independent figures, units, monotony, errors, and the command line around them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl import gpus
from hetrl.cost.efficiency import OURS, Efficiencies, calibrated
from hetrl.cost.iteration import predict as predict_plan
from hetrl.cost.model import CostModel
from hetrl.cost.weight_sync import delta_share
from hetrl.errors import UsageError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.questions.answer import Answer
from hetrl.questions.serving import decode_layer, generation, inference, prefill_layer
from hetrl.questions.step import Parallelism, SoloTraining, memory_gb, one_site, step
from hetrl.questions.training import grids, training
from hetrl.questions.weight_sync import weight_sync
from hetrl.workload import Architecture, Workload, architecture
from launch.cli import main
from tests.plan.plan_cases import plan, topology as plan_topology, workload as plan_workload

ROOT = Path(__file__).parents[2]
SEVEN_B = architecture("qwen2.5-7b")
TRAINING = "training --architecture qwen2.5-7b --gpu a100-80gb --gpus 8 --sequence 2048"
QUESTION = ["predict", "--task", "generation", "--architecture", "qwen2.5-7b", "--gpu", "a100-80gb"]


# --- figures worked out by hand: a slip of bits and bytes, of one and two ways, of 1000 and 1024 shows ----------------


def test_one_sequence_reads_all_weights_but_the_input_embedding_per_token() -> None:
    found = generation(SEVEN_B, "a100-80gb", batch=1, prompt=1, response=2048)
    matrices = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 152064 * 3584
    keys = 1025 * 28 * 2 * 4 * 128 * 2
    step_seconds = (2 * matrices + keys) / (2039e9 * calibrated().of("a100-80gb").decode)
    expected = 2048 * (step_seconds + calibrated().engines["vllm-0.6"].step_seconds)
    assert found.seconds == pytest.approx(expected, rel=0.002)
    assert found.tokens == 2048
    assert found.binds == "memory bandwidth (weights)"
    assert 15.2 < found.memory_gb < 16.2  # 7.62 B parameters in bf16, keys, one step's work
    assert found.fits


def test_a_prefill_layer_is_two_flops_per_weight_and_causal_attention() -> None:
    model = architecture("llama-1-30b")
    weights = 4 * 6656**2 + 3 * 6656 * 17920
    reached = 312e12 * calibrated().of("a100-40gb").prefill
    linear = prefill_layer(model, "a100-40gb", tokens=15000, sequence=0).seconds
    assert linear == pytest.approx(15000 * 2 * weights / reached, rel=1e-3)
    whole = prefill_layer(model, "a100-40gb", tokens=15000, sequence=880).seconds
    assert whole - linear == pytest.approx(15000 * 2 * 6656 * 880 / reached, rel=1e-3)


def test_tensor_parallel_ranks_exchange_activations_twice_per_layer_one_way() -> None:
    model = architecture("llama-2-70b")
    found = prefill_layer(model, "a100-80gb", tp=4, tokens=8192)
    moved = 8192 * 8192 * 2  # bytes; 300 GB/s in one direction
    assert found.breakdown["communication"] == pytest.approx(2 * (1e-5 + 2 * 3 / 4 * moved / 300e9))
    assert found.gpus == 4


def test_a_site_of_gpus_has_a_network_card_for_each_where_the_boards_have_nvlink() -> None:
    assert [node.nic_gbps for node in one_site("a100-80gb", 16, 8).sites[0].nodes] == [1600, 1600]
    assert one_site("l4", 4, 8).sites[0].nodes == (Node("n0", "l4", 4, nic_gbps=100),)


def test_sharded_training_divides_18_bytes_per_parameter() -> None:
    model = architecture("mpt-7b")
    asked = SoloTraining(model, "a100-80gb", 8, 2048)
    layout = Parallelism(1, 1, 8, 1, "none", "none", "none")
    state = {name: memory_gb(asked, replace(layout, sharding=name)) for name in ("none", "optimizer", "full")}
    count = model.parameters
    assert state["none"] - state["optimizer"] == pytest.approx(count * 12 * 7 / 8 / 1e9)
    gathered = 4 * (2 * model.layer_parameters + model.embedding_parameters + model.hidden)
    assert state["none"] - state["full"] == pytest.approx((count * 18 * 7 / 8 - gathered) / 1e9)


def test_full_sharding_gathers_the_weights_twice_and_scatters_the_gradients() -> None:
    asked = SoloTraining(architecture("mpt-7b"), "l40s", 8, 128)  # 32 GB/s one way, hardly any work to hide behind
    layout = Parallelism(1, 1, 8, 1, "none", "full", "none")
    found = step(asked, layout, one_site("l40s", 8, 8))
    count = found.tokens / 8 / 128
    moved = 7 / 8 * 3 * asked.architecture.parameters * 2 / 32e9
    assert found.parts["communication"] + found.parts["compute"] == pytest.approx(
        count * moved + calibrated().exposed * found.parts["compute"], rel=0.01
    )


def test_a_trainer_in_bf16_holds_8_bytes_per_parameter_and_needs_no_offloading() -> None:
    model = architecture("qwen2.5-1.5b")
    layout = Parallelism(1, 1, 1, 1, "none", "none", "none")
    asked = SoloTraining(model, "rtx-4090", 1, 1024, trainer="llmq", optimizer_dtype="bf16")
    mixed = replace(asked, optimizer_dtype="fp32")
    assert memory_gb(mixed, layout) - memory_gb(asked, layout) == pytest.approx(10 * model.parameters / 1e9)
    assert (training(asked).details["offload"], training(mixed).details["offload"]) == ("none", "optimizer")


def test_a_trainer_that_makes_the_loss_by_chunks_holds_no_logits() -> None:
    layout = Parallelism(1, 1, 8, 1, "full", "full", "none")
    asked = SoloTraining(architecture("qwen3-4b"), "h100", 8, 65_536, trainer="prime-rl")
    whole = memory_gb(replace(asked, trainer="torchtitan"), layout)
    assert whole - memory_gb(asked, layout) > 0.9 * 6 * 65_536 * 151_936 / 1e9


def test_the_trainer_says_how_fast_products_are() -> None:
    asked = SoloTraining(architecture("mpt-7b"), "a100-80gb", 8, 2048, sharding="full", micro_batch=2, recompute="none")
    seconds = {
        name: training(replace(asked, trainer=name)).breakdown["compute"]
        for name in (OURS, "llm-foundry", "prime-rl", "llmq")
    }
    assert seconds["llmq"] < seconds["llm-foundry"] < seconds["prime-rl"] < seconds[OURS]
    assert training(asked).breakdown["compute"] == seconds[OURS]


def test_ours_launches_every_layer_thrice_and_makes_its_logits_again() -> None:
    asked = SoloTraining(SEVEN_B, "h200", 1, 2048, 8, micro_batch=2, recompute="none", sharding="none", offload="none")
    ours = calibrated().trainers[OURS]
    as_published = replace(calibrated(), trainers={**calibrated().trainers, "other": replace(ours, layer_seconds=0.0)})
    other = training(replace(asked, trainer="other", efficiencies=as_published)).breakdown["compute"]
    logits = 8 * 2048 * 2 * 152064 * 3584 / asked.rates.training_flops
    launches = 4 * 3 * 28 * ours.layer_seconds
    assert training(asked).breakdown["compute"] - other == pytest.approx(logits + launches)


def test_an_all_reduce_of_a_decode_step_has_a_fixed_time() -> None:
    model = architecture("qwen2.5-72b")
    found = generation(model, "a100-80gb", tp=4, batch=1, prompt=1, response=1001)
    wire = 2 * (1e-5 / 2 + 3 / 4 * 8192 * 2 / 300e9)
    each = wire + calibrated().decode_all_reduce
    assert found.breakdown["communication"] == pytest.approx(1000 * 2 * 80 * each, rel=1e-6)


def test_an_offloaded_optimiser_crosses_pcie_both_ways_at_once() -> None:
    asked = SoloTraining(SEVEN_B, "l40s", 1, 1024, offload="optimizer")
    found = step(asked, Parallelism(1, 1, 1, 1, "none", "none", "optimizer"), one_site("l40s", 1, 8))
    assert found.parts["host transfer"] == pytest.approx(SEVEN_B.parameters * 12 / 32e9)


def test_the_mfu_of_a_training_is_that_of_its_tokens() -> None:
    asked = SoloTraining(architecture("mpt-7b"), "a100-40gb", 8, 2048, sharding="full")
    found = training(asked)
    flops = 6 * (32 * 12 * 4096**2 + 50432 * 4096) + 6 * 32 * 4096 * 2048
    rate = found.tokens / found.seconds / 8
    assert found.details["mfu"] == pytest.approx(rate * flops / 312e12)
    assert 0.4 < found.details["mfu"] < 0.6


def test_a_version_crosses_each_link_once_in_bits() -> None:
    sites = tuple(Site(name, (Node("n0", "a100-80gb", 8),)) for name in ("a", "b"))
    topology = Topology(sites, (Link(("a", "b"), 20.0, 2.0),))
    found = weight_sync(architecture("qwen3-8b"), topology, ["a"], ["b"])
    size = architecture("qwen3-8b").parameters * 2
    assert found.breakdown["transfer"] == pytest.approx(size * 8 / 2e9 + 0.02)
    tenth = weight_sync(architecture("qwen3-8b"), topology, ["a"], ["b"], "delta", 0.1)
    assert tenth.details["wan_gb"]["a-b"] == pytest.approx(delta_share(0.1, 2) * size / 1e9)
    with pytest.raises(UsageError, match='no site "bb"; did you mean "b"'):
        weight_sync(architecture("qwen3-8b"), topology, ["a"], ["bb"])
    with pytest.raises(UsageError, match="--changed is of deltas, the encoding is full: leave it out"):
        weight_sync(architecture("qwen3-8b"), topology, ["a"], ["b"], changed=0.1)
    with pytest.raises(UsageError, match="a and b have no link; add the file that has it to --topology"):
        weight_sync(architecture("qwen3-8b"), Topology(sites, ()), ["a"], ["b"])


def test_a_question_about_several_slices_of_a_gpu_is_refused() -> None:
    assert generation(SEVEN_B, "h100-3g.40gb").uncalibrated == {"h100-3g.40gb": ("decode", "prefill")}
    assert training(SoloTraining(architecture("qwen2.5-0.5b"), "h100-3g.40gb", 1, 1024)).fits
    for ask in (
        lambda: generation(SEVEN_B, "h100-3g.40gb", tp=2),
        lambda: generation(SEVEN_B, "h100-3g.40gb", pp=2),
        lambda: training(SoloTraining(SEVEN_B, "h100-3g.40gb", 4, 1024)),
    ):
        with pytest.raises(UsageError, match="h100-3g.40gb is a slice of h100, which works alone"):
            ask()


def test_no_measurement_stands_behind_a_weight_version() -> None:
    sites = (Site("a", (Node("n0", "a100-80gb", 2),)), Site("b", (Node("n0", "l4", 4),)))
    topology = Topology(sites, (Link(("a", "b"), 10.0, 1.0),))
    found = weight_sync(architecture("qwen3-8b"), topology, ["a"], ["b"]).to_json()
    assert not found["calibrated"]
    assert found["uncalibrated"] == {"a100-80gb": ["weight sync"], "l4": ["weight sync"]}


def test_what_does_not_fit_says_so_and_what_waits_takes_its_turn() -> None:
    assert not generation(architecture("llama-3.1-70b"), "l4").fits
    few = generation(SEVEN_B, "l4", batch=4096, prompt=1000, response=1000)
    assert 1 <= few.details["running_sequences"] < 4096
    assert few.fits
    assert not training(SoloTraining(SEVEN_B, "l4", 1, 1024, offload="none")).fits
    assert training(SoloTraining(SEVEN_B, "l4", 1, 1024)).details["offload"] != "none"


def test_what_the_cache_does_not_hold_runs_behind_it_at_its_own_pace() -> None:
    def asked(batch: int) -> Answer:
        return generation(SEVEN_B, "l4", batch=batch, prompt=1000, response=1000)

    for batch in (50, 100, 101):
        found = asked(batch)
        rounds, rest = divmod(batch, int(found.details["running_sequences"]))
        assert rounds > 0 < rest
        steps = rounds * found.details["step_seconds"] + asked(rest).details["step_seconds"]
        assert found.seconds - found.breakdown["prefill"] == pytest.approx(999 * steps)


def test_phases_that_nobody_measured_are_named() -> None:
    assert generation(SEVEN_B, "h200").uncalibrated == {"h200": ("decode", "prefill")}
    assert generation(SEVEN_B, "h100").uncalibrated == {}
    assert training(SoloTraining(SEVEN_B, "l4", 8, 1024)).uncalibrated == {"l4": ("training",)}
    assert generation(SEVEN_B, "l4").to_json()["calibrated"] is True


# --- monotony ---------------------------------------------------------------------------------------------------------


@contextmanager
def board(monkeypatch: pytest.MonkeyPatch, gpu: str, **factors: float) -> Iterator[Efficiencies]:
    """Multiply figures of a GPU's data sheet for a while."""
    catalogue = dict(gpus.gpu_catalogue())
    entry = catalogue[gpu]
    catalogue[gpu] = replace(entry, **{name: getattr(entry, name) * factor for name, factor in factors.items()})
    with monkeypatch.context() as patch:
        patch.setattr(gpus, "gpu_catalogue", lambda: catalogue)
        yield replace(calibrated())  # which remembers nothing of the other figures


FIGURES = ("peak_tflops", "memory_gb_per_s", "memory_gb", "peer_gbps", "host_gbps")
MODELS = ("qwen2.5-0.5b", "qwen2.5-7b", "llama-2-70b")
LAYOUTS = (
    Parallelism(1, 1, 8, 1, "none", "full", "none"),
    Parallelism(1, 1, 8, 2, "full", "full", "all"),
    Parallelism(2, 2, 2, 1, "none", "optimizer", "none"),
    Parallelism(4, 1, 2, 4, "full", "none", "optimizer"),
)


def _times(gpu: str, model: Architecture, known: Efficiencies | None = None) -> list[float]:
    known = known or calibrated()
    asked = SoloTraining(model, gpu, 8, 1024, efficiencies=known)
    answers = [
        generation(model, gpu, batch=64, prompt=500, response=500, efficiencies=known),
        generation(model, gpu, tp=2, pp=2, batch=64, prompt=500, response=500, efficiencies=known),
        decode_layer(model, gpu, batch=64, efficiencies=known),
        prefill_layer(model, gpu, tokens=500, efficiencies=known),
        inference(model, gpu, pp=2, samples=16, sequence=1024, micro_batch=2, efficiencies=known),
    ]
    steps = [step(asked, layout, one_site(gpu, 8, 8)) for layout in LAYOUTS]
    return [one.seconds for one in (*answers, *steps)]


@given(
    st.sampled_from(FIGURES), st.floats(1.0, 8.0), st.sampled_from(MODELS), st.sampled_from(["a100-40gb", "l4", "l40s"])
)
def test_a_better_board_never_takes_longer(figure: str, factor: float, name: str, gpu: str) -> None:
    model = architecture(name)
    before = _times(gpu, model)
    with pytest.MonkeyPatch.context() as patch, board(patch, gpu, **{figure: factor}) as known:
        after = _times(gpu, model, known)
    assert all(new <= old * (1 + 1e-9) for new, old in zip(after, before, strict=True))


WORKLOADS = [
    replace(plan_workload(), mode=mode, max_staleness=staleness, response=response)
    for mode, staleness in (("sync", 0), ("async", 1), ("async", 4))
    for response in (Lengths(512, 512), Lengths(512, 700, "uniform"), Lengths(300, 512, "lognormal"))
]


@given(
    st.sampled_from(FIGURES),
    st.floats(1.0, 8.0),
    st.sampled_from(["a100-40gb", "l4", "l40s"]),
    st.sampled_from(WORKLOADS),
)
def test_a_plan_on_better_boards_never_takes_longer(figure: str, factor: float, gpu: str, workload: Workload) -> None:
    before = predict_plan(plan(), CostModel(plan_topology(), workload))
    with pytest.MonkeyPatch.context() as patch, board(patch, gpu, **{figure: factor}) as known:
        after = predict_plan(plan(), CostModel(plan_topology(), workload, known))
    assert after.iteration_seconds <= before.iteration_seconds * (1 + 1e-9)
    assert all(seconds <= before.tasks[task] * (1 + 1e-9) for task, seconds in after.tasks.items())


def test_a_better_board_is_seen() -> None:
    before = _times("l4", SEVEN_B)
    with pytest.MonkeyPatch.context() as patch, board(patch, "l4", memory_gb_per_s=2.0, peak_tflops=2.0) as known:
        after = _times("l4", SEVEN_B, known)
    assert all(new < 0.9 * old for new, old in zip(after[2:4], before[2:4], strict=True))


@given(st.sampled_from(LAYOUTS), st.integers(1, 8), st.integers(1, 8), st.sampled_from(MODELS), st.integers(128, 4096))
def test_memory_never_rises_when_the_micro_batch_or_the_sequence_falls(
    layout: Parallelism, small: int, more: int, name: str, sequence: int
) -> None:
    asked = SoloTraining(architecture(name), "a100-80gb", 8, sequence)
    large = memory_gb(asked, replace(layout, micro_batch=small + more))
    assert memory_gb(asked, replace(layout, micro_batch=small)) <= large
    assert memory_gb(replace(asked, sequence=sequence // 2), replace(layout, micro_batch=small + more)) <= large


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(MODELS))
def test_memory_never_rises_and_time_never_falls_with_fewer_samples(few: int, more: int, name: str) -> None:
    model = architecture(name)
    small = generation(model, "a100-80gb", batch=few, prompt=100, response=100)
    large = generation(model, "a100-80gb", batch=few + more, prompt=100, response=100)
    assert small.memory_gb <= large.memory_gb * (1 + 1e-9)
    assert small.seconds <= large.seconds * (1 + 1e-9)


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4, 8, 16, 24]))
def test_every_legal_grid_uses_all_gpus(name: str, gpus: int) -> None:
    model = architecture(name)
    found = list(grids(SoloTraining(model, "l4", gpus, 128)))
    assert found
    assert all(t * p * d == gpus and model.heads % t == 0 and t <= 8 for t, p, d in found)


# --- command line -----------------------------------------------------------------------------------------------------


def test_json_has_the_keys_of_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--prompt", "1", "--response", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ("seconds", "tokens_per_second", "tokens_per_second_per_gpu", "breakdown", "memory_gb", "fits", "binds")
    assert {*keys, "calibrated"} <= set(found)
    assert found["tokens_per_second"] == pytest.approx(2048 / found["seconds"])
    assert sum(found["breakdown"].values()) == pytest.approx(found["seconds"])


@pytest.mark.parametrize(
    "words",
    [
        "decode-layer --architecture llama-2-70b --gpu l4 --tp 1 --batch 85 --context 880",
        "prefill-layer --architecture llama-2-70b --gpu l4 --tokens 7500",
        "training --architecture mpt-7b --gpu a100-80gb --gpus 8 --sequence 2048 --tp 2 --pp 2 --dp 2 --micro-batch 1",
        "training --architecture mpt-7b --gpu a100-80gb --gpus 8 --sequence 2048 --sharding full --recompute full",
        "inference --architecture qwen3-8b --gpu l40s --tp 2 --samples 64 --sequence 2048 --micro-batch 4",
        "weight-sync --architecture qwen3-8b --topology topology/scenarios/multi-country.yaml --from r0 --to r1 r2",
    ],
)
def test_every_task_answers_in_a_table(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["predict", "--task", *words.split()]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"seconds", "binds", "memory", "calibrated"} <= set(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generation --architecture qwen2.5-7c --gpu l4", 'did you mean "qwen2.5-7b"'),
        ("generation --architecture qwen2.5-7b --gpu l4s", 'did you mean "l40s"'),
        ("generation --architecture qwen2.5-7b --gpu l4 --batch 0", "--batch must be positive"),
        ("generation --architecture qwen2.5-7b --gpu l4 --tp 3", "--tp 3 does not divide the 28 attention heads"),
        ("generation --architecture qwen2.5-7b --gpu l4 --tokens 5", "does not take --tokens; it takes"),
        ("generation --gpu l4", "needs --architecture"),
        ("prefill-layer --architecture qwen2.5-7b --gpu l4", "needs --tokens"),
        ("decode-layer --architecture qwen2.5-7b --gpu l4 --context -1", "--context must be a number of tokens"),
        ("training --architecture qwen2.5-7b --gpu l4 --gpus 8 --sequence 128 --tp 3", "no legal layout of 8 GPUs"),
        ("training --architecture qwen2.5-7b --gpu l4 --gpus 0 --sequence 128", "--gpus must be positive"),
        (f"{TRAINING} --node-gpus 0", "--node-gpus must be positive, not 0"),
        (f"{TRAINING} --dp 3", "dp=3: they must multiply to --gpus"),
        (f"{TRAINING} --offload all --pp 2", "pp=2, dp=any: --offload all needs pp=1 (--offload optimizer does not)\n"),
        (f"{TRAINING} --micro-batch 64 --samples 8", "--micro-batch 64 is more than --samples 8; lower it, or raise"),
        (f"{TRAINING} --samples 2 --tp 1 --pp 1", "pp=1, dp=any: --samples 2 lets dp be 2 at most\n"),
        (f"{TRAINING} --sharding full --dp 4", "--sharding full needs pp=1, and tp=1 unless --tp says otherwise\n"),
        (f"{TRAINING} --sharding full --samples 2", "--samples 2 lets dp be 2 at most; --sharding full needs pp=1"),
        ("training --architecture qwen2.5-7b --gpu l4 --gpus 1 --sequence 128 --trainer llmw", 'did you mean "llmq"'),
        ("training --architecture mpt-7b --gpu l4 --gpus 1 --sequence 128 --trainer llm-foundri", '"llm-foundry"?'),
        ("weight-sync --architecture qwen3-8b --topology nowhere.yaml --from a --to b", "No such file"),
    ],
)
def test_nonsense_is_a_usage_error(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--task", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_task_ends_with_the_code_of_usage() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--task", "generatoin"])
    assert ended.value.code == 2


def test_an_answer_loads_neither_an_engine_nor_the_search() -> None:
    code = (
        "import sys; from launch.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'vllm', 'megatron', 'pulp', 'hetrl.search') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *QUESTION], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
