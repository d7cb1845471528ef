"""`hetrl resume` of a local run: what lives is left alone, what is gone has failed, checkpoints stay where they are."""

from __future__ import annotations

import io
import json

import pytest
import yaml
from rich.console import Console

from hetrl.errors import SiteUnreachableError, UsageError
from hetrl.files import EventLog, read_lines, replace_json
from hetrl.problem import read_problem
from lab.planned.random_plans import plan_on_one_device, random_plan, write_experiment
from launch.cli import main
from launch.collect import Collector, log_planned
from launch.executor import Prepared
from launch.local import LocalExecutor, processes_of
from launch.run_directory import LAUNCHER, Run, create_run
from launch.state import State
from launch.verbs import resume
from launch.verbs.runs import current_state
from tests.launch.launch_cases import job
from tests.launch.test_checkpoints import checkpoint


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """Give a run on one device of alpha that was planned by a launcher that is gone."""
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "runs"))
    config = write_experiment(tmp_path, "sync")
    problem = read_problem(config)
    plan = plan_on_one_device(problem)
    made = create_run("quick", config.read_text(), plan)
    log_planned(made, plan, problem.experiment)
    rows = [{**row, "launcher": None} for row in read_lines(made.events)]
    made.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replace_json(made.site("alpha") / "site.json", {"continues": []})
    return made


def test_a_run_that_lives_is_left_alone(run, capsys):
    events = EventLog(run.events, LAUNCHER)
    executor = LocalExecutor(run, [job(run, "alpha", controller="import time; time.sleep(60)")], events, lambda: None)
    executor.start()
    try:
        assert main(["resume"]) == 2
        assert f"{run.id}: it runs" in capsys.readouterr().err
    finally:
        executor.stop()
    assert not [row for row in read_lines(run.events) if row["kind"] == "failed"]


def test_nobody_leaves_a_local_run_to_itself(run, capsys):
    before = run.events.read_bytes()
    assert main(["resume", "--detach"]) == 2
    assert "--detach: these sites are this machine" in capsys.readouterr().err
    assert run.events.read_bytes() == before


def test_what_is_left_of_a_run_that_ended_without_its_launcher_is_ended(run, capsys):
    events = EventLog(run.events, LAUNCHER)
    executor = LocalExecutor(run, [job(run, "alpha", gateway="import time; time.sleep(60)")], events, lambda: None)
    executor.start()
    events.append("finished")
    try:
        left = current_state(run).processes
        assert processes_of(left)
        assert main(["resume"]) == 0
        assert "is finished already" in capsys.readouterr().out
        assert not processes_of(left)
    finally:
        executor.stop()


def test_a_run_that_is_gone_has_failed_and_goes_on_only_where_its_checkpoints_are(run, tmp_path, capsys):
    problem = read_problem(tmp_path / "config.yaml")
    plans = (random_plan(problem, seed) for seed in range(100))
    replace_json(tmp_path / "beta.json", next(plan for plan in plans if "alpha" not in plan.site_order).to_json())
    checkpoint(run.site("alpha"), 4)
    assert main(["resume", "--plan", str(tmp_path / "beta.json")]) == 2
    said = capsys.readouterr().err
    assert "its checkpoints are at alpha, where the plan has nothing; take a plan that uses one of these sites" in said
    state = Collector(run, "alpha")
    state.collect()
    assert (state.state.phase, state.state.cause) == ("failed", "its processes are gone without a last word")


def test_a_site_that_does_not_come_back_must_be_one(run, capsys):
    assert main(["resume", "--without", "alhpa"]) == 2
    assert 'there is no site "alhpa"; did you mean "alpha"?' in capsys.readouterr().err
    assert main(["resume", "--without", "alpha", "--without", "beta", "--without", "gamma"]) == 2
    assert "no site is left without alpha, beta, gamma" in capsys.readouterr().err


def test_another_executor_finds_no_checkpoints(run, tmp_path, capsys):
    config = tmp_path / "slurm.yaml"
    document = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config.write_text(yaml.safe_dump({**document, "launch": {"executor": "slurm", "walltime": "01:00:00"}}))
    assert main(["resume", "--config", str(config)]) == 2
    assert f"{run.id}: its checkpoints are in its directory here, where launch.executor of" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(resume.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(resume.time, "sleep", lambda more: seconds.__setitem__(0, seconds[0] + more))
    return seconds


def test_a_site_is_left_out_only_where_it_is_silent_for_a_while(clock):
    """One look that came to nothing does not take a run away from a site; one that took long counts as well."""

    def look(back_at: float, looking_seconds: float = 0.0) -> State:
        clock[0] += looking_seconds
        return State(silent={"beta": "no answer"} if clock[0] < back_at else {})

    assert resume.once_all_answer(lambda: look(12.0)).silent == {}
    assert clock[0] == 15.0
    assert resume.once_all_answer(lambda: look(1e6)).silent == {"beta": "no answer"}
    assert clock[0] == 45.0
    assert resume.once_all_answer(lambda: look(1e6, 60.0)).silent == {"beta": "no answer"}
    assert clock[0] == 105.0


def test_a_site_that_does_not_answer_is_asked_again_for_an_hour(clock):
    """A launcher that nobody watches takes a run up once the login node is back, and says what it waits for."""
    said = io.StringIO()

    def answers(at: float) -> str:
        if clock[0] < at:
            raise SiteUnreachableError("alpha: no answer from login.alpha")
        return "made"

    console = Console(file=said, width=200)
    assert resume.once_sites_answer(lambda: answers(150.0), console) == "made"
    assert clock[0] == 180
    assert said.getvalue().count("alpha: no answer from login.alpha; trying again in 60 s, Ctrl-C ends this") == 3
    with pytest.raises(SiteUnreachableError):
        resume.once_sites_answer(lambda: answers(1e6), console)
    assert 180 + 3600 <= clock[0] <= 180 + 3720


def test_what_no_site_mends_is_not_asked_again():
    def refuses() -> None:
        raise UsageError("no such file")

    with pytest.raises(UsageError):
        resume.once_sites_answer(refuses, Console(file=io.StringIO()))


def test_a_site_that_stops_answering_before_the_start_is_asked_again(run, monkeypatch):
    """What all sites are asked last, once the run that goes on has been made, is no end of the launcher either."""
    monkeypatch.setattr(resume.time, "sleep", lambda seconds: None)
    asked = []

    def agree(console: Console, yes: bool) -> bool:
        asked.append(yes)
        if len(asked) < 3:
            raise SiteUnreachableError("alpha: no answer from login.alpha")
        return True

    prepared = resume.patient(Prepared(run, lambda *_: pytest.fail("not started here"), agree))
    assert prepared.agree(Console(file=io.StringIO()), True)
    assert asked == [True] * 3
