"""What login nodes are asked, and what their answers mean."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from launch.run_directory import Run
from launch.show import job_standing
from launch.slurm.commands import (
    MANIFEST,
    Queued,
    cancel_script,
    last_line,
    parse_cancelled,
    parse_rows,
    parse_submitted,
    queued,
    submit_script,
)
from launch.slurm.doctor import read_tests
from launch.slurm.files import Mirror
from launch.slurm.poll import Chunk, parse_poll, poll_script
from launch.slurm.run import SlurmJob, SlurmSite
from tests.launch.remote_cases import part

GANG = SlurmJob("gang", "gang", "hetrl-r-alps-gang", 1, 4, 0)
ARRAY = SlurmJob("array-l4", "array", "hetrl-r-alps-array-l4", 2, 2, 2)
SITE = SlurmSite("alps", "login", "/scratch/it's here/hetrl/r/alps", (GANG, ARRAY))
LISTED = """\
12|hetrl-r-alps-gang|RUNNING|2026-11-21T12:00:00|2026-11-21T12:01:00|n[1-2]|None
13_[1-3]|hetrl-r-alps-array-l4|PENDING|2026-11-21T12:00:01|N/A||Resources
13_0|hetrl-r-alps-array-l4|RUNNING|2026-11-21T12:00:01|2026-11-21T12:02:00|n7|None
"""


SHARED = replace(SITE, cluster="beta")
SCRIPTS = [
    submit_script(SITE),
    cancel_script(SITE, True),
    cancel_script(SHARED, False),
    poll_script(SHARED, {"logs/a b.log": 3}),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_site_that_names_its_cluster_asks_no_other_one(tmp_path):
    there, programs = tmp_path / "it's there", tmp_path / "bin"
    there.mkdir()
    programs.mkdir()
    (there / "plan.json").write_text("{}")
    (there / MANIFEST).write_text(f"{hashlib.sha256(b'{}').hexdigest()}  plan.json\n")
    for name, said in {"squeue": LISTED, "scancel": ""}.items():
        (programs / name).write_text(f"#!/bin/sh\necho {name} \"$@\" >>{tmp_path}/asked\nprintf %s '{said}'\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    shared = replace(SHARED, directory=str(there))
    for script, count in ((submit_script(shared), 2), (poll_script(shared, {}), 1), (cancel_script(shared, True), 3)):
        subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=True)
        asked = (tmp_path / "asked").read_text().splitlines()
        assert len(asked) == count
        assert all(call.split()[1:3] == ["-M", "beta"] for call in asked)  # sbatch is told by the script of the job
        (tmp_path / "asked").unlink()


def test_a_listing_with_the_name_of_its_cluster_above_it():
    assert parse_rows(
        f"CLUSTER: beta\nJOBID|NAME|STATE|SUBMIT_TIME|START_TIME|NODELIST|REASON\n{LISTED}"
    ) == parse_rows(LISTED)


def test_a_job_is_what_its_elements_are():
    found = queued(parse_rows("Welcome to alps\n" + LISTED))
    assert found[GANG.key] == Queued("12", "2026-11-21T12:00:00", "RUNNING", "None", 1795262460.0, "n[1-2]")
    assert found[ARRAY.key].elements == (("RUNNING", 1), ("PENDING", 3))
    assert (found[ARRAY.key].job_id, found[ARRAY.key].state, found[ARRAY.key].nodes) == ("13", "RUNNING", "n7")


@pytest.mark.parametrize(
    ("waiting", "count"), [("13_4", 1), ("13_[4-7]", 4), ("13_[4,6-7%2]", 3), ("13_[9]", 1), ("13+1", 1), ("13_[2-", 1)]
)
def test_elements_are_counted_by_state(waiting, count):
    lines = ["13_0|k|FAILED|t|N/A||None", "13_1|k|RUNNING|t|N/A|n7|None", "13_2|k|RUNNING|t|N/A|n8|None"]
    found = queued(parse_rows("\n".join([f"{waiting}|k|PENDING|t|N/A||Resources", *lines])))["k"]
    assert found.elements == (("RUNNING", 2), ("PENDING", count), ("FAILED", 1))
    standing = f"2 RUNNING, {count} PENDING, 1 FAILED on n7,n8"
    assert job_standing({"elements": dict(found.elements), "nodes": found.nodes, "state": found.state}) == standing


def test_elements_that_are_all_alike_are_not_counted():
    rows = parse_rows("13_0|k|RUNNING|t|N/A|n7|None\n13_1|k|RUNNING|t|N/A|n8|None")
    assert queued(rows)["k"].elements == ()


def test_components_of_a_heterogeneous_job_are_one_job():
    rows = "".join(f"12+{n}|k|PENDING|2026-11-21T12:00:00|N/A||BeginTime\n" for n in range(2))
    assert queued(parse_rows(rows))["k"].job_id == "12"


@given(st.permutations(["COMPLETED", "FAILED", "PENDING", "RUNNING"]), st.integers(1, 4))
def test_a_job_has_ended_when_its_last_element_has_and_failed_when_one_has(states, count):
    rows = parse_rows("".join(f"7_{i}|k|{state}|t|N/A||None\n" for i, state in enumerate(states[:count])))
    alive, found = {"PENDING", "RUNNING"} & set(states[:count]), queued(rows)["k"]
    assert found.ended == (not alive)
    assert found.waiting == (alive == {"PENDING"})
    assert alive or found.state == ("FAILED" if "FAILED" in states[:count] else "COMPLETED")


@given(st.text())
def test_whatever_a_site_says_is_read_without_an_error(text):
    parse_rows(text)
    parse_poll(text)
    parse_cancelled(text, SITE)
    assert not parse_submitted(text, SITE).jobs


@pytest.mark.parametrize(
    ("answer", "jobs", "said", "unreachable"),
    [
        (part("recorded", "gang 12\narray-l4 13\n") + part("listed", LISTED), ["gang", "array-l4"], "", False),
        (
            part("recorded", "gang 12\narray-l4 13\n") + part("listed", "no answer\n", 1),
            ["gang", "array-l4"],
            "",
            False,
        ),
        (
            part("refused array-l4", "sbatch: error: Batch job submission failed: Invalid qos\n", 1)
            + part("recorded")
            + part("listed", f"{LISTED.splitlines()[0]}\n"),
            ["gang"],
            "alps: array-l4 was not accepted: Batch job submission failed: Invalid qos",
            False,
        ),
        (
            part("refused gang", code=124) + part("recorded") + part("listed"),
            [],
            "alps: gang was not accepted: sbatch did not answer",
            True,
        ),
        (
            part("recorded") + part("listed", "slurm_load_jobs error: Unable to contact\n", 1),
            [],
            "alps: gang was not accepted: sbatch did not answer",
            True,
        ),
        (
            part("refused gang", code=1) + part("recorded") + part("listed"),
            [],
            "alps: gang was not accepted: sbatch ended with code 1",
            False,
        ),
        (
            part("silent", "slurm_load_jobs error: Unable to contact\n"),
            [],
            "alps: squeue failed: slurm_load_jobs",
            True,
        ),
        (
            part(
                "refused gang",
                "sbatch: error: 'beta' can't be reached now, or it is an invalid entry for --cluster.\n",
                1,
            )
            + part("recorded")
            + part("listed"),
            [],
            "alps: gang was not accepted: 'beta' can't be reached now",
            True,
        ),
        (part("damaged", "plan.json: FAILED\n"), [], "is not what was sent: plan.json: FAILED", False),
        (part("absent"), [], "is not there", False),
        (part("busy"), [], "another submission of this run", True),
        ("bash: fork: Cannot allocate memory\n", [], "Cannot allocate memory", True),
    ],
)
def test_what_came_of_a_submission(answer, jobs, said, unreachable):
    taken = parse_submitted(answer, SITE)
    assert list(taken.jobs) == jobs
    assert said in taken.problem and bool(said) == bool(taken.problem)
    assert taken.unreachable == unreachable


@pytest.mark.parametrize(
    ("answer", "count", "remains"),
    [
        (part("tried"), 0, ""),
        (part("cancel 12") + part("cancel 13") + part("tried"), 2, ""),
        (
            part("cancel 12") + part("cancel 13", "scancel: error: Kill job error\n", 1) + part("tried"),
            1,
            "alps: job 13: Kill job error",
        ),
        (
            part("cancel 12") + part("cancel 13", code=124) + part("tried"),
            1,
            "alps: job 13: scancel did not answer",
        ),
        (part("silent", "connect failure\n"), 0, f"alps: connect failure; its jobs are {GANG.key}, {ARRAY.key}"),
        ("", 0, "squeue did not answer"),
    ],
)
def test_what_came_of_cancelling(answer, count, remains):
    cancelled, left = parse_cancelled(answer, SITE)
    assert cancelled == count
    assert remains in left and bool(remains) == bool(left)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_files_come_as_they_are_in_any_number_of_looks(tmp_path_factory, pieces):
    run = Run(tmp_path_factory.mktemp("run"))
    (run.path / "logs/alps").mkdir(parents=True)
    run.site("alps").mkdir(parents=True)
    mirror, whole = Mirror(run, "alps"), b"".join(pieces)
    for piece in pieces:
        offset = mirror.offsets().get("logs/x.log", 0)
        encoded = base64.b64encode(piece).decode()
        look = parse_poll(part("listed") + part(f"file logs/x.log {len(whole)} {offset}", f"{encoded}\n"))
        assert look.chunks == (Chunk("logs/x.log", len(whole), offset, piece),)
        mirror.write(look.chunks)
        mirror.write(look.chunks)  # as another process may at the same time
    assert run.log("alps", "x").read_bytes() == whole
    assert look.complete


def test_part_of_a_file_that_was_cut_off_is_left_for_the_next_look():
    look = parse_poll(part("listed") + part("file events.jsonl 9 0", "YWJj\n") + "@ file logs/a.log 9 0\nYWJj\n")
    assert [chunk.name for chunk in look.chunks] == ["events.jsonl"]


def test_silence_of_slurm_is_not_an_empty_queue():
    assert parse_poll(part("listed")).jobs == {}
    said = "squeue: error: x\nslurm_load_jobs error: Unable to contact slurm controller\n"
    look = parse_poll(part("listed", said, 1))
    assert (look.jobs, look.problem) == (None, "slurm_load_jobs error: Unable to contact slurm controller")
    assert parse_poll(part("listed", code=124)).problem == parse_poll("").problem == "squeue did not answer"


SUBMITTED = part("recorded", "gang 12\narray-l4 13\n") + part("listed", LISTED)
CANCELLED = part("cancel 12") + part("cancel 13") + part("tried")
POLLED = part("listed", LISTED) + part("file events.jsonl 9 0", "YWJj\n") + part("file logs/a.log 9 0", "YWJj\n")


def test_a_cancelling_that_was_cut_off_in_its_last_line_is_not_done():
    assert "squeue did not answer" in parse_cancelled(CANCELLED.removesuffix("@ end 0\n"), SITE)[1]


@given(st.data())
def test_nothing_follows_from_an_answer_that_was_cut_off(data):
    def cut(text: str) -> str:
        return text[: data.draw(st.integers(0, len(text) - 1))]

    taken = parse_submitted(cut(SUBMITTED), SITE)
    assert (taken.jobs, taken.unreachable) == ({}, True)
    assert "squeue did not answer; its jobs are" in parse_cancelled(cut(CANCELLED), SITE)[1]
    look, whole = parse_poll(cut(POLLED)), parse_poll(POLLED)
    assert look.jobs in (None, whole.jobs)
    assert look.chunks == whole.chunks[: len(look.chunks)] and len(look.chunks) < len(whole.chunks)


def test_starts_that_slurm_expects():
    class Script:
        name = "gang"

    said = "sbatch: Job 9 to start at 2026-11-21T12:00:00 using 4 processors on nodes n1 in partition gpu\n"
    (finding,), starts = read_tests("alps", part("test gang", said) + part("clock", "1\n"), [Script()])
    assert (finding.verdict, starts) == ("ok", {"gang": 1795262400.0})
    said = "allocation failure: Invalid qos specification\n"
    (finding,), starts = read_tests("alps", part("test gang", said, 1), [Script()])
    assert (finding.verdict, finding.found, starts) == ("failed", "allocation failure: Invalid qos specification", {})


def test_last_line_leaves_the_program_out():
    assert last_line("x\nsbatch: error: no such partition\n\n") == "no such partition"
    assert last_line("") == ""
