from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from hetrl.cost.objective import COST, Objective
from hetrl.describe.experiment import Planner
from hetrl.files import EventLog
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Replica, Route, Solver, Stage, TaskPlan, WeightSync
from hetrl.problem import objective_of, read_problem
from launch.cli import main, parser
from launch.state import State
from launch.verbs.logs import Tail, is_over
from launch.verbs.planning import given_plan, planner_of, tell_solver
from tests.launch.launch_cases import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture
def hetrl(tmp_path):
    """Return a function that runs the command line in an empty directory with its own runs."""

    def run(*words, **environment):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HETRL_")}
        environment = {**inherited, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
        command = [sys.executable, "-m", "launch.cli", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)

    return run


def quickstart_plan(**changes) -> Plan:
    problem = read_problem(QUICKSTART)
    layers, samples = (0, problem.workload.actor.layers), problem.workload.samples
    trainers = tuple(f"alpha/alpha-0/{index}" for index in range(4))
    rollouts = ("beta/beta-0/0", "gamma/gamma-0/0")

    def replicas(devices, *server):
        return tuple(Replica(samples // len(devices), (Stage((one,), layers),), *server) for one in devices)

    document = {
        "algorithm": Algorithm("grpo", "sync", 0, 1),
        "groups": (Group(("actor_training",), trainers), Group(("actor_generation",), rollouts, "array")),
        "tasks": {
            "actor_generation": TaskPlan("vllm", replicas(rollouts, 0.1, 32)),
            "actor_training": TaskPlan("megatron", replicas(trainers)),
        },
        "weight_sync": WeightSync("full", (Route("alpha", "beta"), Route("alpha", "gamma"))),
        "site_order": ("alpha", "beta", "gamma"),
        "predicted": Predicted(1.0, 16.0, peak_memory_gb=dict.fromkeys((*trainers, *rollouts), 0.5)),
        "solver": Solver("verl", 0, 0.1, 1),
        "inputs": problem.digests,
    }
    return Plan(**{**document, **changes})


def write_plan(path: Path, plan: Plan) -> Path:
    path.write_text(json.dumps(plan.to_json()))
    return path


def quickstart_copy(tmp_path: Path, **changes) -> Path:
    """Write the quickstart with other sections; its topology files are named absolutely."""
    document = yaml.safe_load(QUICKSTART.read_text())
    section = document["topology"]
    section["sites"] = [str(ROOT / site) for site in section["sites"]]
    section["links"] = str(ROOT / section["links"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**document, **changes}))
    return path


def only_run(directory: Path) -> Path:
    (run,) = (directory / "runs").iterdir()
    return run


def test_help_and_version_load_no_more_than_they_need():
    code = (
        "import sys\n"
        "from launch import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pulp', 'pydantic', 'rich', 'torch', 'zmq', 'psutil', 'yaml'}\n"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(verb in done.stdout for verb in ("plan", "submit", "status", "logs", "cancel"))


def test_verbs_load_no_engine(tmp_path):
    code = (
        "import sys\n"
        "from launch.verbs import logs, planning, runs, submit\n"
        "sys.exit(sorted({'torch', 'vllm', 'megatron', 'zmq'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", [["plan"], ["fly"], ["plan", "x.yaml", "--budget", "0"], ["logs", "-n", "-1"], ["status", "a", "b"]]
)
def test_wrong_words_are_usage_errors(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


def test_help_of_every_verb_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("plan", "submit", "status", "logs", "cancel"):
        with pytest.raises(SystemExit):
            parser().parse_args([verb, "--help"])
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_missing_file_and_unknown_key_are_one_line_each(hetrl, tmp_path, verb):
    missing = hetrl(verb, "none.yaml")
    assert (missing.returncode, missing.stderr) == (2, "error: none.yaml: No such file or directory\n")
    path = quickstart_copy(tmp_path, stepps=3)
    unknown = hetrl(verb, path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f'error: {path}: unknown key "stepps"; did you mean "steps"?\n'
    assert not (tmp_path / "runs").exists()


def test_plan_writes_json_to_stdout_and_to_a_file(hetrl, tmp_path):
    done = hetrl("plan", QUICKSTART, "--json", "-o", "plan.json", "--solver", "verl", "--seed", 3, "--budget", 1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "plan.json").read_text())
    assert json.loads(done.stdout)["solver"]["name"] == "verl"
    assert "the plan is in plan.json" in done.stderr


def test_so_many_evaluations_give_the_same_plan_again(hetrl):
    plans = []
    for _ in range(2):
        done = hetrl("plan", QUICKSTART, "--json", "--evaluations", 3000, "--budget", 600)
        assert (done.returncode, "notice" in done.stderr) == (0, False), done.stderr
        plans.append(json.loads(done.stdout))
        assert 0 < plans[-1]["solver"].pop("evaluations") <= 3000
        del plans[-1]["solver"]["seconds"]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("words", "objective"),
    [
        ((), Objective("time-to-result", steps=40, budget_gpu_hours=9.0)),
        (("--budget-per-hour", "3"), Objective("cost", steps=40, budget_per_hour=3.0)),
        (("--at-least", "16"), Objective("cost", 16.0, 256, steps=40)),
        (("--min-samples-per-second", "16"), Objective("cost", 16.0, 256, steps=40)),
        (("--max-iteration-seconds", "7"), Objective("cost", 7.0, steps=40)),
        (("--budget-gpu-hours", "5"), Objective("time-to-result", steps=40, budget_gpu_hours=5.0)),
        (("--objective", "throughput"), Objective(steps=40)),
    ],
)
def test_a_bound_on_the_command_line_implies_its_objective_and_leaves_none_of_the_file(tmp_path, words, objective):
    experiment = read_problem(quickstart_copy(tmp_path, planner={"budget_gpu_hours": 9})).experiment
    planner = planner_of(parser().parse_args(["plan", "x.yaml", *words]), experiment.planner)
    found = objective_of(experiment, planner)
    assert replace(found, walltime_seconds=math.inf, queue_timeout_seconds=math.inf) == objective


def test_plan_says_what_to_ask_for(hetrl):
    done = hetrl("plan", QUICKSTART, "--at-least", 100, "--evaluations", 3000, "--budget", 600)
    assert done.returncode == 0, done.stderr
    assert "objective cost" in done.stdout
    _, *rows = done.stdout[done.stdout.index("What to ask for") :].splitlines()
    asked = [int(row.split()[2]) for row in rows if row.split()[1:2] in (["cpu"], ["cpu-half"])]
    assert rows[-2].split()[:2] == ["total", str(sum(asked))]
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changes", "wanted", "said"),
    [
        ({"evaluations": 320, "seconds": 30.2}, None, True),
        ({"evaluations": 320, "seconds": 2.0}, None, False),  # the search ended by itself
        ({"evaluations": 200_000, "seconds": 30.2}, None, False),
        ({"evaluations": 320, "seconds": 30.2}, 300, False),
        ({"evaluations": 200_000, "seconds": 30.2}, 500_000, True),  # fewer than were asked for
        ({"evaluations": 320, "seconds": 30.2, "name": "verl"}, None, False),
    ],
)
def test_a_search_that_the_clock_ended_too_early_is_said(capsys, changes, wanted, said):
    plan = quickstart_plan()
    plan = replace(plan, solver=replace(plan.solver, **{"name": "sha-ea", **changes}))
    tell_solver(plan, Planner(evaluations=wanted))
    notice = f"notice: the clock ended the search after {changes['evaluations']:,} plans"
    assert (notice in capsys.readouterr().err) == said


def test_plan_says_how_a_baseline_was_tuned_and_what_its_jobs_hold(hetrl):
    done = hetrl("plan", QUICKSTART, "--solver", "verl", "--budget", 1)
    assert "baseline verl, tuned: the fastest of all uniform layouts" in done.stderr
    assert "objective throughput: the jobs hold" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--solver", "verl", "--objective", "cost"), 'solver "verl" plans for throughput alone'),
        (("--solver", "ilp", "--evaluations", 9), 'evaluations bound sha-ea alone; solver "ilp" has none'),
        (("--solver", "verl", "--space", "ilp"), "only sha-ea can be kept to the plan space of ilp"),
        (
            ("--budget-per-hour", 3, "--objective", "throughput"),
            "planner: budget_per_hour is for objective cost, not for throughput: leave the objective out",
        ),
        (
            ("--budget-per-hour", 3, "--at-least", 9),
            "give one of min_samples_per_second and budget_per_hour: ",
        ),
        (
            ("--at-least", 9, "--budget-gpu-hours", 3),
            "planner: budget_gpu_hours is for objective time-to-result, not for cost: leave out min_samples_per_second",
        ),
        (("--solver", "verl", "--at-least", 9), 'solver "verl" plans for throughput alone; for cost take'),
    ],
)
def test_plan_refuses_what_does_not_go_together(hetrl, words, message):
    done = hetrl("plan", QUICKSTART, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_without_a_verb_all_are_listed(hetrl):
    done = hetrl()
    assert (done.returncode, done.stdout) == (2, "")
    for verb in ("plan", "submit", "status"):
        assert re.search(rf"^ +{verb} +\w", done.stderr, re.MULTILINE)


def test_plan_prints_a_table_of_80_columns(hetrl):
    done = hetrl("plan", QUICKSTART, "--solver", "verl", "--budget", 1)
    assert done.returncode == 0, done.stderr
    assert "actor training" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("place", "cause"), [(".", "Is a directory"), ("absent/plan.json", "there is no directory")])
def test_where_a_plan_cannot_be_written_is_said_before_the_search(hetrl, tmp_path, place, cause):
    done = hetrl("plan", QUICKSTART, "-o", tmp_path / place)
    assert done.returncode == 1
    assert f"{tmp_path / place}: cannot write the plan ({cause}" in done.stderr
    assert "planned with" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("simulate", "--trace", "absent/trace.json"),
            "absent/trace.json: cannot write the trace (there is no directory",
        ),
        (("simulate", "--seed", "-1"), "argument --seed: -1 is negative"),
        (("explain", "--html", "absent/plan.html"), "absent/plan.html: cannot write the page (there is no directory"),
        (("explain", "--play"), "say where that is written with --html"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_plan_is_read(hetrl, words, said):
    verb, *options = words
    done = hetrl(verb, "absent.json", "--config", QUICKSTART, *options)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "absent.json" not in done.stderr


def test_a_plan_that_cannot_be_written_is_printed(hetrl):
    done = hetrl("plan", QUICKSTART, "--budget", 1, "-o", "/dev/full")
    assert done.returncode == 1
    assert "/dev/full: cannot write the plan (No space left on device)" in done.stderr
    assert json.loads(done.stdout)["format"] == "hetrl-plan/1"


def test_the_page_of_a_plan_is_utf_8_wherever_it_goes(hetrl, tmp_path):
    words = ("explain", write_plan(tmp_path / "plan.json", quickstart_plan()), "--config", QUICKSTART, "--html")
    (tmp_path / "link.html").symlink_to("page.html")
    for place in ("link.html", "/dev/stdout"):
        done = hetrl(*words, place, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="utf-8")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "link.html").is_symlink()
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "×" in page
    assert page in done.stdout
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_dry_run_writes_the_run_directory_and_starts_nothing(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    done = hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert "nothing was started" in done.stdout
    assert (run / "config.yaml").read_text() == QUICKSTART.read_text()
    written = json.loads((run / "plan.json").read_text())
    assert written == {**quickstart_plan().to_json(), "predicted": written["predicted"]}
    scripts = sorted(str(path.relative_to(run / "scripts")) for path in (run / "scripts").rglob("*.json"))
    assert scripts == [
        "alpha/gang.json",
        "beta/array-cpu.json",
        "beta/gang.json",
        "gamma/array-cpu.json",
        "gamma/gang.json",
    ]
    assert "there is no run yet" in hetrl("cancel").stderr
    status = hetrl("status", run.name, "--json")
    state = json.loads(status.stdout)
    assert (state["run"], state["phase"], state["steps"], state["processes"]) == (run.name, "planned", 40, [])
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_plan_made_for_other_inputs_is_a_warning_and_one_that_breaks_a_constraint_an_error(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan(inputs={}))
    done = hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run")
    assert done.returncode == 0
    assert f"warning: {plan} was made for another experiment and another topology" in done.stderr
    plan = write_plan(tmp_path / "plan.json", quickstart_plan(site_order=("alpha", "beta")))
    done = hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run")
    assert done.returncode == 2
    assert "site_order: lacks the site gamma" in done.stderr


def test_a_given_plan_that_breaks_a_bound_of_the_experiment_says_so(tmp_path, capsys):
    problem, plan = read_problem(QUICKSTART), write_plan(tmp_path / "plan.json", quickstart_plan())
    given_plan(plan, problem)
    assert "breaks a bound" not in capsys.readouterr().err
    for bound, key in (
        ({"max_iteration_seconds": 1e-3}, "max_iteration_seconds"),
        ({"budget_per_hour": 0.5}, "budget_"),
    ):
        given_plan(plan, replace(problem, objective=Objective(COST, **bound)))
        said = capsys.readouterr().err
        assert "warning: the plan breaks a bound of the experiment: it needs " in said
        assert f"(planner.{key}" in said


def test_a_plan_of_which_something_else_is_predicted_now_says_so_and_has_that(hetrl, tmp_path):
    whole = quickstart_plan()
    wrong = replace(whole, predicted=replace(whole.predicted, iteration_seconds=0.001))
    plan = write_plan(tmp_path / "plan.json", wrong)
    found = [hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run"), hetrl("simulate", plan, "--config", QUICKSTART)]
    assert all("warning: the plan was made when 0.001 s were predicted; " in done.stderr for done in found)
    predicted = json.loads((only_run(tmp_path) / "plan.json").read_text())["predicted"]["iteration_seconds"]
    assert predicted > 0.01
    assert f" {predicted:.3g} " in found[1].stdout


def test_slurm_needs_a_directory_that_nodes_share(hetrl, tmp_path):
    config = quickstart_copy(tmp_path, launch={"executor": "slurm"})
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    done = hetrl("submit", config, "--plan", plan)
    assert done.returncode == 2
    assert "alpha: scratch is not set" in done.stderr


def test_a_local_run_is_not_left_to_itself(hetrl, tmp_path):
    done = hetrl("submit", QUICKSTART, "--plan", "absent.json", "--detach")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--detach: these sites are this machine" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_runs_directory_that_cannot_be_made_is_an_error(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    done = hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run", HETRL_RUNS=str(plan / "runs"))
    assert done.returncode == 1
    assert "Not a directory; a run needs a directory to write to" in done.stderr


def test_verbs_without_a_run_say_how_to_start_one(hetrl):
    for verb in ("status", "logs", "cancel"):
        done = hetrl(verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: runs: there is no run yet; start one with `hetrl submit CONFIG`\n"


def test_logs_are_merged_prefixed_and_chosen_by_site_and_process(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    assert hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run").returncode == 0
    logs = only_run(tmp_path) / "logs"
    (logs / "alpha" / "gateway.log").write_text("one\ntwo\n")
    (logs / "beta" / "actor_generation-0.log").write_text("three\nfour")
    run = only_run(tmp_path).name
    assert hetrl("logs", run).stdout.splitlines() == [
        "alpha/gateway           | one",
        "alpha/gateway           | two",
        "beta/actor_generation-0 | three",
        "beta/actor_generation-0 | four",
    ]
    assert hetrl("logs", run, "-n", 1, "--site", "alpha").stdout == "alpha/gateway | two\n"
    assert hetrl("logs", run, "--process", "actor_generation-0", "-n", 1).stdout == "beta/actor_generation-0 | four\n"
    wrong = hetrl("logs", run, "--site", "alpa")
    assert wrong.returncode == 2
    assert 'no log of site "alpa"; did you mean "alpha"?' in wrong.stderr


def test_a_log_is_read_on_where_its_last_whole_line_ends(tmp_path):
    path = tmp_path / "gateway.log"
    path.write_text("one\n\ntwo\nthr")
    tail = Tail(path, "alpha/gateway")
    assert tail.last(2) == ["", "two"]
    with path.open("a") as log:
        log.write("ee\n0 %\r1 %\r\nfo")
    assert tail.read() == ["three", "0 %", "1 %"]
    assert tail.read() == []
    assert tail.read(final=True) == ["fo"]
    assert Tail(path, "alpha/gateway").last(2, final=True) == ["1 %", "fo"]
    assert Tail(path, "alpha/gateway").last(0) == []


def test_logs_are_followed_while_processes_live_or_a_launcher_may_have_the_last_word():
    me = psutil.Process()
    living = {"pid": me.pid, "created": me.create_time()}
    gone = {**living, "created": 0.0}
    for phase, processes, launcher, over in [
        ("planned", (), None, False),
        ("planned", (), living, False),
        ("running", (living,), gone, False),
        ("running", (gone,), living, False),
        ("running", (gone,), gone, True),
        ("failed", (living,), gone, False),
        ("failed", (gone,), living, True),
        ("cancelled", (), None, True),
    ]:
        assert is_over(State(phase=phase, processes=processes, launcher=launcher)) == over


def test_logs_follow_ends_where_the_processes_are_gone_without_a_last_word(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    assert hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run").returncode == 0
    run = only_run(tmp_path)
    (run / "logs" / "alpha" / "gateway.log").write_text("one")
    gone = {"name": "gateway", "pid": os.getpid(), "created": 0.0}
    EventLog(run / "events.jsonl", "launcher").append("submitted", site="alpha", job="gang", processes=[gone])
    done = hetrl("logs", run.name, "-f")
    assert (done.returncode, done.stdout) == (0, "alpha/gateway | one\n")
    assert done.stderr == f"{run.name}: its processes are gone without a last word\n"


def test_logs_follow_ends_with_the_run(hetrl, tmp_path):
    plan = write_plan(tmp_path / "plan.json", quickstart_plan())
    assert hetrl("submit", QUICKSTART, "--plan", plan, "--dry-run").returncode == 0
    run = only_run(tmp_path)
    (run / "logs" / "alpha" / "gateway.log").write_text("one\n")
    assert hetrl("cancel", run.name).returncode == 0
    assert hetrl("logs", run.name, "-f").stdout == "alpha/gateway | one\n"
