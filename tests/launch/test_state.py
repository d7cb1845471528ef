from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.files import EventLog, append_line, read_lines
from launch.collect import Collector
from launch.run_directory import Run
from launch.state import State, fold


def event(kind, **fields):
    return {"time": 1.0, "source": "alpha", "sequence": 0, "kind": kind, **fields}


PLANNED = event("planned", run="r", steps=9, launcher={"pid": 1, "created": 2.0})
SUBMITTED = event("submitted", site="alpha", processes=[{"name": "controller", "pid": 7, "created": 3.0}])
GO = event("go", members=["alpha/actor_training/0"])
STEP = event("step", step=4, of=9, reward=0.5, seconds={})
FINISHED = event("finished")
FAILED = event("failed", cause="no", exit_code=6)
CANCELLED = event("cancelled", cause="yes")


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([], "planned"),
        ([PLANNED], "planned"),
        ([PLANNED, SUBMITTED], "starting"),
        ([PLANNED, SUBMITTED, GO, STEP], "running"),
        ([PLANNED, SUBMITTED, GO, FINISHED], "finished"),
        ([PLANNED, SUBMITTED, FAILED, CANCELLED], "failed"),
        ([PLANNED, SUBMITTED, CANCELLED, FAILED], "cancelled"),
        ([PLANNED, SUBMITTED, FINISHED, GO], "finished"),
    ],
)
def test_phase_follows_the_events_and_the_first_end_decides(events, phase):
    assert fold(events).phase == phase


def test_state_holds_step_reward_members_processes_and_cause():
    ready = event("member_ready", member="beta/actor_generation/0")
    gone = event("process_exited", site="alpha", process="controller", code=6)
    state = fold([PLANNED, SUBMITTED, ready, GO, STEP, {**FAILED, "time": 5.0}, gone])
    assert (state.step, state.steps, state.reward) == (4, 9, 0.5)
    assert state.members == {"beta/actor_generation/0": "ready", "alpha/actor_training/0": "running"}
    assert state.processes == ({"name": "controller", "pid": 7, "created": 3.0, "site": "alpha", "code": 6},)
    assert (state.cause, state.exit_code, state.updated) == ("no", 6, 5.0)


JOB = {"site": "alpha", "job": "gang"}
SUBMITTING = event("submitting", key="k", **JOB)
ACCEPTED = event("submitted", job_id="17", submit_time="T", **JOB)
RUNS = event("job_state", job_id="17", submit_time="T", state="RUNNING", reason="None", start=9, nodes="n1", **JOB)
RUNS |= {"elements": {}}
SILENT, ANSWERS = event("site_silent", site="beta", cause="no"), event("site_answers", site="beta")
WITHDRAWN = event("withdrawn", jobs=1, remains=[])


def test_jobs_go_from_intent_to_their_identity_and_what_slurm_says():
    assert [(job["id"], job["state"]) for job in fold([SUBMITTING]).jobs] == [(None, "SUBMITTING")]
    assert fold([SUBMITTING, ACCEPTED]).phase == "starting"
    (job,) = fold([SUBMITTING, ACCEPTED, RUNS]).jobs
    assert (job["site"], job["id"], job["submit_time"], job["nodes"]) == ("alpha", "17", "T", "n1")
    assert fold([SUBMITTING, ACCEPTED, WITHDRAWN]).jobs[0]["state"] == "CANCELLED"
    assert fold([SUBMITTING, SILENT]).silent == {"beta": "no"}
    assert fold([SUBMITTING, SILENT, ANSWERS]).silent == {}


EVENTS = st.lists(
    st.sampled_from(
        [PLANNED, SUBMITTED, GO, STEP, FINISHED, FAILED, CANCELLED, event("odd"), SUBMITTING, ACCEPTED, RUNS, WITHDRAWN]
    )
)


@given(EVENTS, EVENTS)
def test_folding_in_two_parts_equals_folding_at_once(first, second):
    assert fold(second, fold(first)) == fold([*first, *second])


def make_run(path):
    run = Run(path)
    run.site("alpha").mkdir(parents=True)
    return run


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["write", "half", "launcher", "collect", "collect by another", "restart"])))
def test_any_interleaving_of_collectors_brings_every_event_once(tmp_path_factory, actions):
    run = make_run(tmp_path_factory.mktemp("run"))
    there, metrics = run.site("alpha") / "events.jsonl", run.site("alpha") / "metrics.jsonl"
    theirs, ours = EventLog(there, "alpha"), EventLog(run.events, "launcher")
    collectors, written, noted, half, shown = [Collector(run, "alpha"), Collector(run, "alpha")], 0, 0, "", []
    for action in actions:
        if action == "write" and not half:
            theirs.append("step", step=written, of=99, reward=0.0, seconds={})
            append_line(metrics, {"step": written})
            written += 1
        elif action == "half":  # a line reaches the file in two parts
            line = json.dumps({"time": 1.0, "source": "alpha", "sequence": written, "kind": "odd"}) + "\n"
            part, half = (half, "") if half else (line[:20], line[20:])
            with there.open("a") as file:
                file.write(part)
            if not half:
                theirs, written = EventLog(there, "alpha"), written + 1
        elif action == "launcher":
            ours.append("odd")
            noted += 1
        elif action == "restart":
            collectors[1] = Collector(run, "alpha")
        elif action.startswith("collect"):
            rows = collectors[action.endswith("another")].collect()
            shown += rows if action == "collect" else []
    shown += collectors[0].collect()
    rows = list(read_lines(run.events))
    assert [row["sequence"] for row in rows if row["source"] == "alpha"] == list(range(written))
    assert [row["sequence"] for row in rows if row["source"] == "launcher"] == list(range(noted))
    assert shown == rows
    assert run.metrics.exists() == metrics.exists()
    assert not metrics.exists() or run.metrics.read_text() == metrics.read_text()
    assert collectors[0].state == fold(rows, State(run=run.id))
    assert json.loads(run.state.read_text())["phase"] == "planned"


def test_summary_comes_home_when_it_is_whole(tmp_path):
    run = make_run(tmp_path)
    (run.site("alpha") / "summary.json").write_text('{"steps":')
    Collector(run, "alpha").collect()
    assert not run.summary.exists()
    (run.site("alpha") / "summary.json").write_text('{"steps": 2}')
    Collector(run, "alpha").collect()
    assert json.loads(run.summary.read_text()) == {"steps": 2}


def test_metrics_go_on_where_a_full_disk_cut_them(tmp_path):
    run = make_run(tmp_path)
    (run.site("alpha") / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    run.metrics.write_text('{"step": 1}\n{"st')
    Collector(run, "alpha").collect()
    assert [row["step"] for row in read_lines(run.metrics)] == [1, 2]


def test_links_that_are_out_are_part_of_the_state_until_they_are_back():
    out = [event("link_out", link="alpha-beta"), event("link_out", link="alpha-gamma")]
    assert fold([PLANNED, *out]).links_out == ("alpha-beta", "alpha-gamma")
    assert fold([PLANNED, *out, event("link_back", link="alpha-beta")]).links_out == ("alpha-gamma",)


def test_a_replica_that_comes_late_is_part_of_the_state_from_then_on():
    joined = event("replica_joined", member="beta/actor_generation/0")
    assert fold([PLANNED, GO, joined]).members["beta/actor_generation/0"] == "running"


def test_a_replica_without_the_newest_weights_is_behind_until_it_has_them():
    name = "beta/actor_generation/0"
    behind = event("replicas_behind", version=7, causes={name: "the link to beta is out"})
    state = fold([PLANNED, GO, event("replica_joined", member=name), behind])
    assert state.members[name] == "behind"
    assert fold([event("replicas_caught_up", version=9, members=[name], seconds=1.0)], state).members[name] == "running"


def test_a_lost_replica_and_refused_messages_are_part_of_the_state():
    lost = event("replica_lost", member="beta/actor_generation/0", cause="out of memory")
    state = fold([PLANNED, GO, lost, event("refused", offences={"alpha": {"beta": 8}})])
    assert state.members == {"alpha/actor_training/0": "running", "beta/actor_generation/0": "lost"}
    assert state.refused == {"alpha": {"beta": 8}}
    assert json.loads(json.dumps(state.to_json()))["refused"] == {"alpha": {"beta": 8}}
