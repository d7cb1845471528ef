"""`hetrl checkpoints` and `hetrl export`: what is where and whole, what a resume takes up, a model to take along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetrl.files import EventLog, replace_json
from hetrl.runtime.checkpoints import files, writing
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.workload import ACTOR_TRAINING, CRITIC_TRAINING
from launch.cli import main
from launch.run_directory import Run
from launch.shell import Shell
from launch.verbs.checkpoints import history_of
from launch.verbs.stored import Place, Stored, newest_of, parse_stored
from tests.launch.launch_cases import quick_run
from tests.launch.remote_cases import part

MODEL = ("model-00001-of-00001.safetensors", files.MODEL_INDEX, files.CONFIG, "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a run of alpha, beta and gamma that went on from another one."""
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "runs"))
    made = quick_run()
    for site in ("alpha", "beta", "gamma"):
        replace_json(made.site(site) / "site.json", {"continues": [earlier_run(tmp_path / "earlier" / site)]})
    return made


def earlier_run(directory: Path, left_at: int | None = None) -> dict[str, Any]:
    return {"directory": str(directory), "left_at": left_at}


def checkpoint(site: Path, step: int, task: str = ACTOR_TRAINING, *, whole: bool = True) -> Path:
    directory = files.path_of(site / files.root_of(task), step)
    partial = writing.begin(directory)
    for name in (*MODEL, "optimizer-rank-00000.safetensors", files.PIECES_INDEX, files.STATE):
        writing.write(partial / name, [memoryview(f"{name} of {site.name} {step}".encode())])
    if whole:
        writing.finish(directory)
    return directory


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["checkpoints", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_each_is_listed_with_its_site_and_whether_it_is_whole(run: Run, tmp_path: Path, capsys: Any) -> None:
    checkpoint(tmp_path / "earlier" / "alpha", 2)
    checkpoint(run.site("alpha"), 4)
    checkpoint(run.site("gamma"), 4)
    checkpoint(run.site("alpha"), 6, whole=False)
    (checkpoint(run.site("gamma"), 8) / MODEL[0]).write_text("cut")
    rows = listed(capsys)
    shown = [(row["step"], row["site"], row["whole"], row["next"]) for row in rows]
    assert shown == [
        *((8, "gamma", False, False), (6, "alpha", False, False)),
        *((4, "alpha", True, True), (4, "gamma", True, False), (2, "alpha", True, False)),
    ]
    assert rows[2]["bytes"] == files.bytes_of(files.path_of(run.site("alpha") / "checkpoints", 4))
    assert main(["checkpoints"]) == 0
    assert "whole, for resume" in capsys.readouterr().out


def test_what_a_site_calls_a_task_is_shown_as_it_is(run: Run, capsys: Any) -> None:
    checkpoint(run.site("alpha"), 4, "[bold]_training")
    assert main(["checkpoints"]) == 0
    assert "│ [bold] │" in capsys.readouterr().out


def test_a_run_without_any_says_so(run: Run, capsys: Any) -> None:
    assert main(["checkpoints", run.id]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "has no checkpoint" in said.err


def test_a_resume_takes_the_last_step_that_all_models_have() -> None:
    def one(task: str, step: int, site: str = "alpha", *, whole: bool = True) -> Stored:
        return Stored(site, task, step, f"/{site}/{task}/{step}", {}, 0.0, whole)

    both = {ACTOR_TRAINING: "alpha", CRITIC_TRAINING: "beta"}
    actor = [one(ACTOR_TRAINING, step) for step in (0, 2, 4, 6)]
    sites = ("alpha", "beta")
    assert newest_of(actor, both, sites) == {ACTOR_TRAINING: actor[0]}
    critic = [one(CRITIC_TRAINING, 2, "beta"), one(CRITIC_TRAINING, 4, "alpha"), one(CRITIC_TRAINING, 4, "beta")]
    away = one(CRITIC_TRAINING, 6, "gamma")
    assert newest_of([*actor, *critic, away], both, sites) == {ACTOR_TRAINING: actor[2], CRITIC_TRAINING: critic[2]}
    assert newest_of([one(ACTOR_TRAINING, 8, "gamma"), one(ACTOR_TRAINING, 9, whole=False)], both, sites) == {}
    copy = one(ACTOR_TRAINING, 8, "beta")
    assert newest_of([*actor, copy], {ACTOR_TRAINING: "alpha"}, sites) == {ACTOR_TRAINING: copy}


def test_what_an_earlier_run_wrote_behind_where_it_was_left_is_not_taken_up(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its actor of step 6 is not the one to which the critic of step 6 belongs that the later run has."""
    for site in ("alpha", "beta", "gamma"):
        replace_json(run.site(site) / "site.json", {"continues": [earlier_run(tmp_path / "earlier" / site, 5)]})
    for task in (ACTOR_TRAINING, CRITIC_TRAINING):
        for step in (2, 4, 6):
            checkpoint(tmp_path / "earlier" / "alpha", step, task)
    checkpoint(run.site("alpha"), 6, CRITIC_TRAINING)
    steps = [(row["task"], row["step"]) for row in listed(capsys)]
    assert steps.count((ACTOR_TRAINING, 6)) == 0 and steps.count((CRITIC_TRAINING, 6)) == 1
    log = EventLog(run.events, "alpha/controller/0")
    log.append("resumed", step=3, version=4)
    assert sorted({row["step"] for row in listed(capsys)}) == [2, 4, 6]  # it has written nothing yet
    log.append("checkpoint", step=6)
    assert sorted({row["step"] for row in listed(capsys)}) == [2, 6]
    assert history_of(run, None, ["beta"])["beta"][1] == EarlierRun(tmp_path / "earlier" / "beta", 3)


@pytest.mark.parametrize("complete", ["", "{", "[1]", '{"config.json": 3}', '{"state.json": 2}'])
def test_what_a_site_says_is_not_believed_where_it_does_not_fit(complete: str) -> None:
    text = part("files /run", "2 10.5 checkpoints/step-00000004/config.json\n")
    text += part("complete /run/checkpoints/step-00000004/COMPLETE", complete)
    (found,) = parse_stored(text, Place("alpha", Shell("alpha"), (EarlierRun(Path("/run")),)))
    assert (found.step, found.whole, found.bytes, found.written) == (4, False, 2, 10.5)


@pytest.mark.parametrize(("words", "site", "step"), [((), "gamma", 6), (("--step", "4"), "alpha", 4)])
def test_an_export_is_the_model_with_its_tokenizer(
    run: Run, tmp_path: Path, capsys: Any, words: tuple[str, ...], site: str, step: int
) -> None:
    checkpoint(run.site("alpha"), 4)
    checkpoint(run.site("gamma"), 6)
    checkpoint(run.site("gamma"), 8, CRITIC_TRAINING)
    assert main(["export", run.id, *words, str(tmp_path / "out" / "model")]) == 0
    exported = {path.name: path.read_text() for path in (tmp_path / "out" / "model").iterdir()}
    assert exported == {name: f"{name} of {site} {step}" for name in MODEL}
    assert f"the model after step {step}, from {site}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_an_export_that_cannot_be_says_why_and_leaves_nothing(run: Run, tmp_path: Path, capsys: Any) -> None:
    checkpoint(run.site("alpha"), 4)
    assert main(["export", run.id, "--step", "5", str(tmp_path / "model")]) == 1
    assert "no whole checkpoint of step 5 is there; there are 4" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["export", run.id, str(tmp_path / "there")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_copy_that_breaks_off_is_taken_from_the_next_site(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for site in ("alpha", "gamma"):
        checkpoint(run.site(site), 4)
    copy = Shell.copy_from

    def breaks_off(shell: Shell, source: str, target: Path, **options: Any) -> None:
        copy(shell, source, target, **options)
        if shell.site == "alpha":
            (target / MODEL[0]).unlink()

    monkeypatch.setattr(Shell, "copy_from", breaks_off)
    assert main(["export", run.id, str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "changed while it was copied" in said.err
    assert (tmp_path / "model" / MODEL[0]).read_text().endswith("of gamma 4")
