from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.charges import held_by_site
from launch.screen import Screen
from launch.show import Lines, charges_line, columns, log_tail, step_line, telling_line
from launch.state import State
from tests.launch.launch_cases import plain_console
from tests.plan import plan_cases

SECONDS = {
    "actor_generation": 99.9,
    "generation_wait": 12.34,
    "old_logprobs": 1.0,
    "reference_inference": 0.5,
    "actor_training": 10.0,
    "weight_sync": 0.01,
    "iteration": 123.4,
}
STEP = {"kind": "step", "step": 7, "of": 400, "reward": 0.533, "seconds": SECONDS}
PUBLISHED = {"kind": "weights_published", "version": 12}


def test_line_of_a_step_has_reward_seconds_and_version_in_80_columns():
    lines = Lines()
    assert lines.line(PUBLISHED) is None
    line = lines.line(STEP)
    assert line == "step   7/400  reward 0.53  123.4 s (gen 12.3, infer 0.5, train 10.0)  v12"
    assert len(line) <= 80
    assert step_line(STEP, None).endswith("train 10.0)")


MPICH = """Abort(1) on node 0: Fatal error in internal_Init: Other MPI error, error stack:
internal_Init(70)...: MPI_Init_thread(required=3) failed
MPII_Init_thread(2).:
MPIDU_bc(9)....: no space left
srun: job step aborted
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("loading\n\n", "loading"),
        ("a\nTraceback (most recent call last):\n  x\nValueError: no\nwarning: 3 leaked objects\n", "ValueError: no"),
        ("error: beta: port 1 is taken; set gateway_port\n", "beta: port 1 is taken; set gateway_port"),
        ("\x1b[31mtorch.OutOfMemoryError: too much\x1b[0m\n", "torch.OutOfMemoryError: too much"),
        ("no errors were found\ngoodbye", "goodbye"),
        ("raise SomeError\nSomeError", "SomeError"),
        ("OSError: no\nINFO 11-24 [core.py:58] error: none\nWARNING: fatal error (again)\n", "OSError: no"),
        ("Killed\n(worker pid=7) INFO 11-24 goodbye\n", "Killed"),
        ("INFO all is well\n", ""),
        (MPICH, "Abort(1) on node 0: Fatal error in internal_Init: Other MPI error; MPIDU_bc(9)....: no space left"),
        ("Fatal error: Other MPI error, error stack:\n", "Fatal error: Other MPI error"),
    ],
)
def test_telling_line_is_the_last_that_names_an_error_or_the_last(text, line):
    assert telling_line(text) == line


def test_tail_of_a_log_is_its_last_lines_or_nothing(tmp_path):
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_text("a\nb\nc")
    assert log_tail(path) == "a\nb\nc"
    path.write_bytes(b"x" * 100_000 + b"\nlast\n")
    assert len(log_tail(path)) == 65536


def test_columns_are_aligned():
    assert columns([("a", "b"), ("long", "")]) == "a     b\nlong"
    assert columns([]) == ""


def test_lines_wait_while_a_question_is_open_and_none_is_lost():
    console = plain_console()
    with Screen(console, 400) as screen:
        screen.hold(True)
        screen.show(STEP, State())
        assert console.file.getvalue() == ""
        screen.hold(False)
        assert console.file.getvalue().startswith("step   7/400")
        screen.hold(True)
        screen.show({**STEP, "step": 8}, State())
    assert "step   8/400" in console.file.getvalue()


def test_charges_are_of_all_that_the_jobs_hold():
    plan, topology = plan_cases.plan(), plan_cases.topology()
    assert charges_line(plan, topology, 100) == (
        "objective throughput: the jobs hold 13 devices; an iteration takes 0.149 GPU-hours; "
        "100 steps take 1.15 h, 14.9 GPU-hours"
    )
    alps, jsc, lab = topology.sites
    dear = replace(alps, nodes=tuple(replace(node, price_per_gpu_hour=2.0) for node in alps.nodes))
    single = replace(lab, allocation="gpu", queue_hours=1.5)
    told = charges_line(plan, replace(topology, sites=(dear, jsc, single)), 100)
    assert "13 devices at a price of 16.0 per hour; an iteration takes 0.149 GPU-hours at a price of 0.183;" in told
    assert told.endswith("14.9 GPU-hours at a price of 18.3, after 1.50 h in the queue")


def test_granted_nodes_are_held_as_a_whole_and_granted_gpus_alone():
    plan, topology = plan_cases.plan(), plan_cases.topology()
    one = replace(plan, groups=(replace(plan.groups[0], devices=("alps/a100-0/2", "jsc/l40s-1/0")),))
    assert dict(held_by_site(one, topology)) == {"alps": 4, "jsc": 2}
    alps, jsc, lab = (replace(site, allocation="gpu") for site in topology.sites)
    assert dict(held_by_site(one, replace(topology, sites=(alps, jsc, lab)))) == {"alps": 1, "jsc": 1}


def test_prompts_that_were_left_out_are_told():
    event = {"kind": "prompts_left_out", "prompts": 7473, "left_out": 12, "limit": 512}
    assert Lines().line(event) == "12 of 7473 prompts are longer than 512 tokens: left out"


def test_who_comes_late_or_is_given_back_is_told():
    go = {"kind": "go", "members": ["alpha/actor_training/0"], "absent": ["beta/actor_generation/0"]}
    assert Lines().line(go) == "GO: 1 member is ready, the run begins, without beta/actor_generation/0 as yet"
    released = {"kind": "released", "site": "beta"}
    assert Lines().line(released) == "beta: its rollouts are given back; the run goes on without them"
    joined = {"kind": "replica_joined", "member": "beta/actor_generation/0"}
    assert Lines().line(joined) == "beta/actor_generation/0 is there, and draws as soon as it has the newest weights"


def test_replicas_without_the_newest_weights_are_told():
    behind = {"kind": "replicas_behind", "version": 7, "causes": {"beta/actor_generation/0": "the link to beta is out"}}
    assert Lines().line(behind) == (
        "weight version 7 is not everywhere, who lacks it draws later: beta/actor_generation/0: the link to beta is out"
    )
    again = {"kind": "replicas_caught_up", "version": 9, "members": ["beta/actor_generation/0"], "seconds": 1.5}
    assert Lines().line(again) == "beta/actor_generation/0: has the newest weights again, version 9"


def test_links_that_are_out_and_back_are_told():
    assert Lines().line({"kind": "link_out", "link": "alpha-beta"}) == (
        "alpha-beta: the link is out; what does not need it goes on"
    )
    assert Lines().line({"kind": "link_back", "link": "alpha-beta"}) == "alpha-beta: the link is back"


def test_who_is_lost_and_what_was_refused_is_told():
    lost = {"kind": "replica_lost", "member": "beta/actor_generation/0", "cause": "out of memory"}
    assert Lines().line(lost) == "beta/actor_generation/0 is lost, its samples are drawn elsewhere: out of memory"
    refused = {"kind": "refused", "offences": {"alpha": {"beta": 8, "gamma": 1}}}
    assert Lines().line(refused) == (
        "refused: 8 messages of beta at alpha, 1 message of gamma at alpha; the logs of these sites' gateways say what"
    )
