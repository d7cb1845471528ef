"""Explanations: parts sum to the whole, what binds is what was made slow, what-ifs answer for the changed topology."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from hetrl.cost.charges import held_devices
from hetrl.cost.efficiency import calibrated
from hetrl.cost.iteration import predict, with_prediction
from hetrl.cost.model import CostModel
from hetrl.cost.objective import COST, Objective
from hetrl.explanation import Explanation, explain, with_choices
from hetrl.explanation.idle import idle
from hetrl.explanation.resources import (
    ITERATION,
    Resource,
    Slope,
    attribution,
    critical_path,
    derivatives,
    parts_of,
    resources,
)
from hetrl.explanation.training_sites import shares, training_sites
from hetrl.explanation.what_if import UNCHANGED, questions, runner_up, study
from hetrl.explanation.worse_links import ALL, worse_links
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Group, Plan, Replica, Route, Stage
from hetrl.problem import Problem, read_problem
from hetrl.report.reasons import training_reason, worse_links_reason
from hetrl.search import solve
from hetrl.search.sha_ea import groupings
from hetrl.workload import Lengths, Workload, architecture
from launch.cli import main
from tests.launch.launch_cases import ROOT
from tests.plan.plan_cases import plan, topology, workload

MODES = {"async": {}, "sync": {"mode": "sync", "max_staleness": 0}}


def case(mode: str = "async", **changes: object) -> tuple[Plan, Topology, Workload]:
    job = replace(workload(), **MODES[mode], **changes)
    algorithm = replace(plan().algorithm, mode=job.mode, max_staleness=job.max_staleness)
    found = replace(plan(), algorithm=algorithm)
    return with_prediction(found, CostModel(topology(), job)), topology(), job


def with_link(found: Topology, gbps: float) -> Topology:
    """Return the topology with another bandwidth between alps and lab."""
    links = tuple(replace(one, gbps=gbps) if set(one.between) == {"alps", "lab"} else one for one in found.links)
    return replace(found, links=links)


def spread_training() -> Plan:
    """Return the plan with the second replica of the actor's training at jsc."""
    other = tuple(f"jsc/l40s-{node}/{index}" for node in range(2) for index in range(2))
    base = plan()
    training = base.tasks["actor_training"]
    first, second = training.replicas
    stages = tuple(replace(stage, devices=other[2 * i : 2 * i + 2]) for i, stage in enumerate(second.stages))
    tasks = {**base.tasks, "actor_training": replace(training, replicas=(first, replace(second, stages=stages)))}
    return replace(base, tasks=tasks)


def star(*gbps: float) -> tuple[Plan, Topology, Workload]:
    """Return training at alps that sends its weights to one L4 at each of other sites, over links of so many Gbps."""
    names = [f"s{index}" for index in range(len(gbps))]
    around = tuple(Site(name, (Node("l4-0", "l4", 1),)) for name in names)
    links = tuple(Link(("alps", name), 1.0, rate) for name, rate in zip(names, gbps, strict=True))
    base, job = plan(), replace(workload(), **MODES["sync"])
    samples = [8 * count for count in shares([1.0] * len(names), job.samples // 8)]
    replicas = tuple(
        Replica(count, (Stage((f"{name}/l4-0/0",), (0, 28)),), 9.5, 64)
        for name, count in zip(names, samples, strict=True)
    )
    reward = replace(base.tasks["reward_inference"], replicas=base.tasks["reference_inference"].replicas[:1])
    generation = replace(base.tasks["actor_generation"], replicas=replicas)
    found = replace(
        base,
        algorithm=replace(base.algorithm, mode="sync", max_staleness=0),
        tasks={**base.tasks, "actor_generation": generation, "reward_inference": reward},
        groups=(
            Group(tuple(name for name in base.tasks if name != "actor_generation"), base.groups[0].devices),
            Group(("actor_generation",), generation.devices),
        ),
        weight_sync=replace(base.weight_sync, routes=tuple(Route("alps", name) for name in names)),
        site_order=("alps", *names),
    )
    where = Topology((topology().sites[0], *around), links)
    return with_prediction(found, CostModel(where, job)), where, job


def slowed(found: Plan, model: CostModel, gpu: str, factor: float) -> CostModel:
    """Return the cost model in which all that a type of GPU does takes longer by a factor."""
    for resource in resources(found, model.topology):
        if resource.name.startswith(f"{gpu}: "):
            model = resource.slower(model, factor)
    return model


# What binds


@pytest.mark.parametrize("mode", MODES)
def test_the_parts_of_every_time_sum_to_it(mode: str) -> None:
    found, where, job = case(mode)
    times = {**found.predicted.tasks, ITERATION: found.predicted.iteration_seconds}
    parts = attribution(found, CostModel(where, job))
    assert parts.keys() == times.keys()
    for name, seconds in times.items():
        assert sum(part.seconds for part in parts[name]) == pytest.approx(seconds, rel=2e-3)


def test_what_would_save_time_by_being_slower_counts_too() -> None:
    slower = [lambda amounts, factor, name=name: {**amounts, name: amounts[name] * factor} for name in "abc"]
    among = [Resource(name, change) for name, change in zip("abc", slower, strict=True)]
    amounts = {"a": 3.0, "b": 1.0, "c": 1e-5}
    parts = derivatives(among, amounts, lambda now: {"time": 2 * now["a"] - now["b"] + now["c"]})["time"]
    assert [(part.name, part.seconds) for part in parts] == [("a", pytest.approx(6)), ("b", pytest.approx(-1))]


@pytest.mark.parametrize("sites", [1, 2, 3, 5])
def test_links_that_are_equally_slow_share_what_one_alone_would_take(sites: int) -> None:
    found, where, job = star(*[1.0] * sites)
    parts = attribution(found, CostModel(where, job))
    for name, seconds in {**found.predicted.tasks, ITERATION: found.predicted.iteration_seconds}.items():
        assert sum(part.seconds for part in parts[name]) == pytest.approx(seconds, rel=2e-3)
    links = [part.seconds for part in parts["weight_sync"] if part.name.startswith("link ")]
    one, hub, _ = star(1.0)
    (alone,) = (p.seconds for p in attribution(one, CostModel(hub, job))["weight_sync"] if p.name.startswith("link "))
    assert links == pytest.approx([alone / sites] * sites, rel=2e-3)


@pytest.mark.parametrize("faster", [1.0005, 1.0009, 1.1])
def test_links_that_are_nearly_as_slow_take_less_of_it(faster: float) -> None:
    found, where, job = star(1.0, faster, faster, faster)
    parts = attribution(found, CostModel(where, job))["weight_sync"]
    assert sum(part.seconds for part in parts) == pytest.approx(found.predicted.tasks["weight_sync"], rel=2e-3)
    slowest, *others = [part for part in parts if part.name.startswith("link ")]
    assert slowest.name == "link alps–s0" and all(part.seconds < slowest.seconds / 2 for part in others)
    assert len(others) == (0 if faster > 1.001 else 3)


def test_a_kink_leaves_alone_what_is_smooth_and_what_saves() -> None:
    tied = [Slope(name, 10.0, 0.0) for name in "abcd"]
    slopes = [Slope("smooth", 60.0, 60.0), Slope("both", 22.0, 12.0), Slope("saves", -2.0, 0.0), *tied]
    parts = {part.name: part.seconds for part in parts_of(slopes, 81.0)}
    assert parts == pytest.approx({"smooth": 60, "both": 14, "saves": -1, **dict.fromkeys("abcd", 2)})
    assert [part.seconds for part in parts_of([Slope("a", 3.001, 2.999), Slope("b", -1.0, -1.0)], 2.0)] == [3.0, -1.0]


def test_three_groups_that_take_equally_long_share_the_iteration() -> None:
    _, where, job = case("async", max_staleness=8)
    alps, jsc, lab = where.sites
    jsc = replace(jsc, nodes=(jsc.nodes[0], replace(jsc.nodes[1], gpu="h100")))
    where = Topology((alps, jsc, lab), tuple(replace(link, gbps=400.0, delay_ms=0.1) for link in where.links))
    base = plan()
    spots = {
        "actor_generation": "lab/l4-0/0",
        "reference_inference": "jsc/l40s-0/0",
        "reward_inference": "jsc/l40s-1/0",
    }
    alone = {
        name: replace(
            base.tasks[name], replicas=(Replica(64, (Stage((spot,), (0, 28)),), 9.5, 64),), idle_state="resident"
        )
        for name, spot in spots.items()
    }
    groups = (Group(("actor_training",), base.groups[0].devices), *(Group((n,), (spot,)) for n, spot in spots.items()))
    sync = replace(base.weight_sync, routes=(Route("alps", "lab"),))
    found = replace(base, tasks={**base.tasks, **alone}, groups=groups, weight_sync=sync)
    model = slowed(found, CostModel(where, job), "l4", 0.01)
    seconds = predict(found, model).tasks
    for gpu, task in (("l40s", "reference_inference"), ("h100", "reward_inference")):
        model = slowed(found, model, gpu, seconds["actor_training"] / seconds[task])
    third = predict(found, model).iteration_seconds / 3
    path = {part.name: part.seconds for part in critical_path(found, model) if part.seconds > 0}
    assert path == pytest.approx(dict.fromkeys(("reference_inference", "reward_inference", "actor_training"), third))
    parts = attribution(found, model)[ITERATION]
    assert sum(part.seconds for part in parts) == pytest.approx(3 * third, rel=2e-3)
    assert sum(part.seconds for part in parts if part.name.startswith("l40s")) == pytest.approx(third, rel=2e-3)


@settings(max_examples=20)
@given(
    gbps=st.floats(0.05, 400),
    nic=st.floats(1, 400),
    samples=st.sampled_from((32, 64, 320)),
    kind=st.sampled_from(("fixed", "lognormal")),
    mode=st.sampled_from(sorted(MODES)),
)
def test_the_tasks_on_the_path_sum_to_the_iteration(
    gbps: float, nic: float, samples: int, kind: str, mode: str
) -> None:
    lengths = Lengths(512, 512) if kind == "fixed" else Lengths(512, 1024, kind)
    found, where, job = case(mode, samples=samples, response=lengths)
    where = with_link(where, gbps)
    sites = [replace(s, nodes=tuple(replace(n, nic_gbps=nic) for n in s.nodes)) for s in where.sites]
    where = replace(where, sites=tuple(sites))
    whole = predict(found, CostModel(where, job)).iteration_seconds
    assert sum(part.seconds for part in critical_path(found, CostModel(where, job))) == pytest.approx(whole, rel=2e-3)
    assert sum(part.seconds for part in attribution(found, CostModel(where, job))[ITERATION]) == pytest.approx(
        whole, rel=2e-3
    )


def test_a_slow_link_binds_the_weight_sync_and_a_fast_one_does_not() -> None:
    found, where, job = case("sync")
    slow, fast = (attribution(found, CostModel(with_link(where, gbps), job))["weight_sync"] for gbps in (0.1, 400.0))
    assert slow[0].name == "link alps–lab"
    assert "link alps–lab" not in {part.name for part in fast[:1]}


def test_a_reduction_between_sites_waits_for_their_link() -> None:
    _, where, job = case("sync")
    found = with_prediction(spread_training(), CostModel(where, replace(job, gradient_dtype="fp32")))
    parts = attribution(found, CostModel(where, job))["actor_training"]
    assert parts[0].name == "link alps–jsc"


def test_a_missing_link_has_no_parts() -> None:
    found, where, job = case("sync")
    cut = with_link(where, 0.0)
    assert math.isinf(predict(found, CostModel(cut, job)).iteration_seconds)
    assert critical_path(found, CostModel(cut, job)) == ()


def test_changed_rates_are_those_of_one_type_in_another_value() -> None:
    known = calibrated()
    before = known.rates("l4").decode_bytes
    changed = known.with_rates("l4", replace(known.rates("l4"), decode_bytes=before / 2))
    assert changed.rates("l4").decode_bytes == before / 2
    assert changed.rates("l40s").decode_bytes > before
    assert known.rates("l4").decode_bytes == before


# Memory


def test_the_memory_of_every_device_is_the_predicted_peak() -> None:
    found, where, job = case()
    rows = explain(found, Problem(where, job)).memory
    peaks = {device: row.peak_gb for row in rows for device in row.devices}
    assert peaks == pytest.approx(dict(found.predicted.peak_memory_gb))
    assert all(not share.resident for row in rows for share in row.shares[-1:])


# Training and idle GPUs


def test_two_sites_train_faster_over_a_fast_link_than_over_a_slow_one() -> None:
    found, where, job = case("sync")
    one_link = Topology(where.sites[:2], where.links[:1])
    fast, slow = (
        training_sites(
            found, CostModel(replace(one_link, links=(replace(where.links[0], gbps=gbps, delay_ms=1.0),)), job)
        )
        for gbps in (400.0, 0.5)
    )
    assert fast is not None and slow is not None and fast.two is not None and slow.two is not None
    assert fast.two.seconds < slow.two.seconds
    assert slow.two.sites == ("alps", "jsc")
    assert slow.two.parts[0].name == "link alps–jsc"
    assert slow.one is not None and slow.one.seconds <= slow.seconds
    assert fast.one == slow.one


def test_worse_links_cost_what_the_prediction_over_them_says_and_all_of_them_the_most() -> None:
    _, where, job = case("sync")
    problem = Problem(where, replace(job, gradient_dtype="fp32"))
    found = with_prediction(spread_training(), problem.model)
    *each, every = worse_links(found, problem)
    assert {one.link for one in each} == {"alps–jsc", "alps–lab"} and every.link == ALL
    links = tuple(replace(link, gbps=0.7 * link.gbps) for link in where.links)
    over_all = predict(found, replace(problem, topology=replace(where, links=links)).model).iteration_seconds
    assert every.seconds == over_all >= each[0].seconds >= each[1].seconds >= found.predicted.iteration_seconds
    assert each[0].seconds > 1.01 * found.predicted.iteration_seconds
    said = worse_links_reason((*each, every), found.predicted.iteration_seconds)
    assert said.startswith("Where a link gives 30 % less than was measured, an iteration takes: " + each[0].link)


def test_a_plan_that_crosses_is_asked_what_one_that_does_not_would_take() -> None:
    found, where, job = case("sync")
    problem = Problem(where, job)
    asked = [[one.name for one in questions(plan, problem) if one.home] for plan in (found, spread_training())]
    assert asked == [[], ["no training crosses a link"]]


def test_one_site_alone_has_nothing_to_compare() -> None:
    found, where, job = case()
    assert training_sites(found, CostModel(Topology(where.sites[:1]), job)) is None


def test_why_there_are_no_two_sites_that_could_train_is_told_apart() -> None:
    found, where, job = case("sync")
    alps, jsc, lab = where.sites
    rollouts_only = tuple(replace(site, engines=("vllm",)) for site in (jsc, lab))
    huge = replace(job, actor=architecture("qwen2.5-72b"))
    for sites, trained, why in (
        (where, job, ""),
        (Topology((alps, *rollouts_only), where.links), job, "no other site has whole GPUs and the engine megatron"),
        (Topology(where.sites, where.links[2:]), job, "no link joins alps with jsc, lab, where training could be, too"),
        (where, huge, ""),
    ):
        compared = training_sites(found, CostModel(sites, trained))
        assert compared is not None and compared.why_not_two == why
        said = training_reason(compared)
        if trained is huge:
            assert "because it fits into no two linked sites" in said
        elif why:
            assert f"because {why}. With" in said and "fit" not in said and "in two" not in said
        else:
            assert "because two are slower" in said and "in two" in said


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8), st.integers(8, 200))
def test_shares_sum_to_the_units_and_end_together(speeds: list[float], units: int) -> None:
    found = shares(speeds, units)
    assert sum(found) == units and min(found) >= 1
    last = max(count / speed for count, speed in zip(found, speeds, strict=True) if count > 1) if units > 8 else 0
    assert all((count + 1) / speed >= last * (1 - 1e-6) for count, speed in zip(found, speeds, strict=True))


def test_idle_devices_are_those_without_a_task() -> None:
    found, where, job = case("sync")
    (one,) = idle(found, Problem(where, job), attribution(found, CostModel(where, job))[ITERATION])
    assert one.devices == ("jsc/l40s-1/1",) and one.gpu == "l40s"
    assert one.task in ("actor_generation", "reference_inference", "reward_inference")
    assert one.seconds is not None
    assert one.better == (one.seconds < found.predicted.iteration_seconds)


def test_idle_devices_are_worth_nothing_where_they_break_the_budget() -> None:
    found, where, job = case("sync")
    by_gpu = replace(where, sites=tuple(replace(site, allocation="gpu") for site in where.sites))
    given_back = {"jsc/l40s-1/1"}
    groups = (replace(one, devices=tuple(d for d in one.devices if d not in given_back)) for one in found.groups)
    found = replace(found, groups=tuple(groups))
    own = float(sum(held_devices(found, by_gpu).values()))
    for budget, better in ((own, False), (own + 1, True)):
        (one,) = idle(found, Problem(by_gpu, job, Objective(COST, budget_per_hour=budget)), ())
        assert set(one.devices) == given_back and one.better == better


def test_gpus_that_nobody_can_reach_say_so() -> None:
    found, where, job = case("sync")
    far = Site("moon", (Node("n0", "l4", 1),))
    apart = Topology((*where.sites, far), where.links)
    problem = Problem(apart, job)
    lonely = idle(found, problem, ())[-1]
    assert (lonely.devices, lonely.task) == (("moon/n0/0",), None)
    assert lonely.why_not == "no link between alps and moon"


# What if


def test_the_questions_change_one_thing_each() -> None:
    where, job = topology(), workload()
    asked = {question.name: question for question in questions(plan(), Problem(where, job))}
    assert list(asked) == [
        UNCHANGED,
        "contexts kept: on_update: continue",
        "link alps–jsc doubled",
        "link alps–lab doubled",
        "link jsc–lab doubled",
        "one more node at alps: 4 × a100-40gb",
        "one more node at jsc: 2 × l40s",
        "one more node at lab: 1 × l4",
        "without alps",
        "without jsc",
        "without lab",
    ]
    assert asked["link alps–lab doubled"].problem.topology.link("lab", "alps") == Link(("alps", "lab"), 40.0, 1.8)
    assert len(asked["one more node at jsc: 2 × l40s"].problem.topology.devices) == len(where.devices) + 2
    assert [site.name for site in asked["without jsc"].problem.topology.sites] == ["alps", "lab"]
    assert asked["without jsc"].problem.topology.links == where.links[1:2]


def test_contexts_may_be_kept_where_a_version_has_them_computed_anew() -> None:
    where, job = topology(), workload()
    assert job.staleness
    kept, sync = replace(job, renews_contexts=False), replace(job, mode="sync")
    for asked, answers in ((sync, []), (job, [kept]), (kept, [])):
        found = [one.problem.workload for one in questions(plan(), Problem(where, asked)) if "kept" in one.name]
        assert found == answers


def test_the_study_answers_every_question_and_names_a_runner_up() -> None:
    _, where, job = case("sync")
    problem = Problem(where, job)
    found = solve(problem, "verl", 1, 0)
    told: list[str] = []
    study_of = study(found, problem, 0.2, report=told.append)
    answers = {answer.name: answer for answer in study_of.what_ifs}
    assert list(answers) == [question.name for question in questions(found, problem)]
    assert answers[UNCHANGED].seconds == pytest.approx(found.predicted.iteration_seconds)
    assert set(answers) < set(told)
    doubled = answers["link alps–lab doubled"].seconds
    assert doubled is not None and doubled <= found.predicted.iteration_seconds
    other = study_of.runner_up
    assert other is not None
    assert sum(term.other_seconds for term in other.terms) == pytest.approx(other.seconds, rel=2e-3)
    assert sum(term.seconds for term in other.terms) == pytest.approx(found.predicted.iteration_seconds, rel=2e-3)


def test_the_study_asks_for_what_the_objective_makes_least() -> None:
    _, where, job = case("sync")
    sites = (
        replace(site, nodes=tuple(replace(node, price_per_gpu_hour=2.0) for node in site.nodes)) for site in where.sites
    )
    problem = Problem(replace(where, sites=tuple(sites)), job, Objective(COST))
    found = solve(problem, "sha-ea", 0.5, 0)
    study_of = study(found, problem, 0.5)
    own = found.predicted.cost_per_iteration
    assert own is not None and study_of.value == pytest.approx(own, rel=1e-3)
    assert study_of.measure.name == "price of an iteration"
    (doubled,) = [one for one in study_of.what_ifs if one.name == "link alps–lab doubled"]
    assert doubled.value is not None and doubled.value <= study_of.value
    bound = replace(problem, objective=Objective(COST, max_iteration_seconds=found.predicted.iteration_seconds / 2))
    assert study(found, bound, 0.01).value is None


def test_plans_of_the_same_kind_are_no_runner_up() -> None:
    found, where, job = case()
    assert runner_up(found, [found], Problem(where, job)) is None


def test_the_search_leaves_an_excluded_grouping_out() -> None:
    tasks = workload().tasks
    excluded = (("actor_training", "actor_generation"), ("reward_inference", "reference_inference"))
    every, rest = groupings(tasks), groupings(tasks, excluded)
    (gone,) = [group for group in every if group not in rest]
    owner = dict(zip(tasks, gone, strict=True))
    assert len(rest) == len(every) - 1
    assert {frozenset(t for t in tasks if owner[t] == g) for g in gone} == set(map(frozenset, excluded))


# The command


def written(tmp_path, found: Plan) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found.to_json()))
    return str(path)


def explanation() -> Explanation:
    found, where, job = case()
    problem = Problem(where, job)
    return with_choices(explain(found, problem), problem)


def test_an_explanation_becomes_json() -> None:
    document = json.loads(json.dumps(explanation().to_json()))
    assert document["predicted"]["iteration_seconds"] > 0
    assert document["binds"]["weight_sync"][0]["name"] == "link alps–lab"
    assert document["training"]["sites"] == ["alps"] and document["idle"][0]["devices"] == ["jsc/l40s-1/1"]


def paper_case(tmp_path) -> tuple[str, str]:
    """Return the files of a plan and of its experiment: a small model on the paper's first scenario."""
    document = yaml.safe_load((ROOT / "configs/paper-single-region.yaml").read_text())
    document["model"]["architecture"] = document["reward"]["architecture"] = "qwen3-0.6b"
    document["topology"]["scenario"] = str(ROOT / document["topology"]["scenario"])
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    problem = read_problem(config)
    found = solve(Problem(problem.topology, problem.workload), "verl", 1, 0, problem.digests)
    return written(tmp_path, found), str(config)


def test_the_command_explains_in_80_columns_and_writes_the_page(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, config = paper_case(tmp_path)
    assert main(["explain", path, "--html", str(tmp_path / "plan.html")]) == 0  # the experiment lies beside the plan
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert all(word in said for word in ("waits for", "actor training", "Memory of each GPU"))
    assert "What each time waits for" in (tmp_path / "plan.html").read_text()
    assert main(["explain", path, "--config", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["binds"]["iteration"]


def test_a_plan_for_another_objective_is_said(tmp_path, capsys) -> None:
    path, config = paper_case(tmp_path)
    assert main(["explain", path, "--config", config, "--json"]) == 0
    assert "notice" not in capsys.readouterr().err
    document = yaml.safe_load((tmp_path / "config.yaml").read_text())
    document["planner"] = {"budget_per_hour": 40.0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    assert main(["explain", path, "--config", config, "--json"]) == 0
    assert "the plan was made for objective throughput, the experiment asks for cost" in capsys.readouterr().err


def test_without_an_experiment_the_command_says_what_to_name(tmp_path, capsys) -> None:
    assert main(["explain", written(tmp_path, plan())]) == 2
    assert "name the file with --config" in capsys.readouterr().err
