"""The job scripts on real Slurm: who runs where with which GPUs, what a gateway survives, and how jobs end.

The processes are small programs in the place of the engines; scripts, rows and placement are those of a plan.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hetrl.runtime.transport.notice import ENDING
from lab.lab import Lab
from lab.processes import wait_until
from lab.shape import JOB_USER, JOB_USER_ID
from launch.slurm.commands import parse_submitted, submit_script
from launch.slurm.files import pack
from launch.slurm.render import SiteScript, site_scripts
from launch.slurm.run import SlurmSite
from launch.slurm.stage import job_of, sbatch_argv
from tests.launch.slurm.slurm_plans import plan, problem

ROOT = Path(__file__).parents[2]
GATEWAY = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('told'))); time.sleep(99)"
REPORT = """
import json, os, socket, sys
names = ("SLURM_PROCID", "CUDA_VISIBLE_DEVICES")
said = {"host": socket.gethostname(), "words": sys.argv[1:]}
print(json.dumps({**said, **{name: os.environ.get(name) for name in names}}))
"""
SLEEP = "import time; time.sleep(99)"
# srun itself gives the highest exit code of a step's tasks: of a rank that it has to end, that of the signal.
STAY = f"print('here', flush=True); {SLEEP}"
FAIL = """
import os, time
from pathlib import Path
log = Path("logs/actor_training-0.log")
while not (log.exists() and log.read_text()):
    time.sleep(0.1)
"""


# A run that fails: its controller once both rollouts are there, and the others when they hear of it.
TELL = """
import time
from pathlib import Path
while len([*Path("logs").glob("actor_generation-*.log")]) < 2:
    time.sleep(0.1)
Path("told").touch()
raise SystemExit(1)
"""
HEAR = """
import time
from pathlib import Path
while not Path("told").exists():
    time.sleep(0.1)
"""


@dataclass
class Cluster:
    """One site of the lab with a run's directory."""

    lab: Lab
    site: str
    scripts: Mapping[str, SiteScript]
    directory: Path  # as this process sees it

    def submit(self, name: str) -> str:
        there = f"/home/{JOB_USER}/{self.directory.relative_to(self.lab.home(self.site))}"
        return self.lab.run(self.site, sbatch_argv(there, self.scripts[name])).stdout.strip()

    def exit_code(self, job: str, seconds: float = 90) -> str:
        """Return `code:signal` of a job when it has ended."""
        shown = ["scontrol", "--oneliner", "show", "job", job]

        def fields() -> dict[str, str]:
            words = self.lab.run(self.site, shown).stdout.splitlines()[0].split()
            return dict(word.split("=", 1) for word in words if "=" in word)

        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(lambda: fields()["JobState"] in ended, seconds, lambda: f"{fields()}\n{self.logs()}")
        return fields()["ExitCode"]

    def log(self, process: str) -> str:
        return (self.directory / "logs" / f"{process}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in (self.directory / "logs").glob("*.log"))


def cluster(
    lab: Lab,
    trainers: list[str],
    rollouts: list[list[str]],
    programs: Mapping[str, str],
    grace: int = 3,
    run: str = "run",
    restarts: int = 0,
) -> Cluster:
    """Put the directory of a plan on alpha; a program is looked up by process, then by step, then `report`."""
    site = {
        "name": "alpha",
        "allocation": "gpu",
        "gres": {"a100": "a100-80gb"},
        "python": sys.executable,
        "nodes": [{"name": "a100", "gpu": "a100-80gb", "gpus": 4, "count": 2, "host_memory_gb": 8}],
    }
    other = {"name": "other", "nodes": [{"name": "x", "gpu": "l4", "gpus": 1}]}
    directory = lab.home("alpha") / run
    shutil.rmtree(directory, ignore_errors=True)
    for folder in ("scripts", "logs"):
        (directory / folder).mkdir(parents=True)
    (directory / "code").symlink_to(ROOT)
    there = {"alpha": f"/home/{JOB_USER}/{run}", "other": "/nowhere"}
    asked = problem(site, other, launch={"restarts": restarts})
    found = site_scripts(plan(trainers, rollouts), asked, run, there)
    scripts = {one.name: one for one in found if one.site == "alpha"}
    for name, script in scripts.items():
        text = script.text.replace("\ngrace=60 ", f"\ngrace={grace} ")
        (directory / "scripts" / f"{name}.sbatch").write_text(text)
        rows = json.loads(script.rows_text)
        for step in rows["steps"].values():
            for row in step:
                step_name = row["name"].rpartition("-")[0] or row["name"]
                code = programs.get(row["name"], programs.get(step_name, REPORT))
                row["argv"] = ["python", "-c", code, *row["argv"][3:]]  # instead of `python -m MODULE`
        (directory / "scripts" / f"{name}.json").write_text(json.dumps(rows))
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink() and ROOT not in path.resolve().parents:
            os.chown(path, JOB_USER_ID, JOB_USER_ID)
    return Cluster(lab, "alpha", scripts, directory)


def test_ranks_of_a_heterogeneous_job_stand_on_their_nodes_with_their_gpus(strangers: Lab) -> None:
    trainers = ["alpha/a100-0/1", "alpha/a100-0/3", "alpha/a100-1/0", "alpha/a100-1/1", "alpha/a100-1/2"]
    alpha = cluster(strangers, trainers, [["other/x/0"]], {"gateway": GATEWAY})
    assert alpha.scripts["gang"].heterogeneous
    assert alpha.exit_code(alpha.submit("gang")) == "0:0", alpha.logs()
    ranks = [json.loads(alpha.log(f"actor_training-{rank}")) for rank in range(5)]
    said = [dict(zip(rank["words"][1::2], rank["words"][2::2], strict=True)) for rank in ranks]
    assert [words["--rank"] for words in said] == list("01234")
    assert [words["--device"] for words in said] == list("01012")
    assert [len(rank["CUDA_VISIBLE_DEVICES"].split(",")) for rank in ranks] == [2, 2, 3, 3, 3]
    hosts = [rank["host"] for rank in ranks]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3] == hosts[4]
    assert json.loads(alpha.log("controller"))["host"] == hosts[0]
    assert alpha.log("gateway") == "told\n"


@pytest.mark.parametrize(("how", "code"), [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_process_that_fails_ends_the_others_and_gives_the_job_its_exit_code(
    strangers: Lab, how: str, code: int
) -> None:
    programs = {"gateway": GATEWAY, "controller": SLEEP, "actor_training-0": STAY, "actor_training-1": FAIL + how}
    alpha = cluster(strangers, ["alpha/a100-0/0", "alpha/a100-0/1"], [["other/x/0"]], programs)
    job = alpha.submit("gang")
    assert alpha.exit_code(job) == f"{code}:0", alpha.logs()
    said = f"the job ends with exit code {code}, for actor_training-1 failed first"
    assert said in alpha.log(f"gang-{job}")
    assert "controller ended with exit code 143" in alpha.log(f"gang-{job}")


def test_a_controller_that_is_killed_ends_the_others_at_once(strangers: Lab) -> None:
    programs = {"gateway": GATEWAY, "actor_training-0": STAY, "controller": FAIL + "os.kill(os.getpid(), 9)"}
    alpha = cluster(strangers, ["alpha/a100-0/0"], [["other/x/0"]], programs, grace=600)
    job = alpha.submit("gang")
    assert alpha.exit_code(job) == "137:0", alpha.logs()
    assert "for controller failed first" in alpha.log(f"gang-{job}")


def test_a_gateway_that_is_killed_comes_back_and_one_that_gives_up_ends_the_job(strangers: Lab) -> None:
    once = "was = Path('was')\nif not was.exists():\n was.touch()\n os.kill(os.getpid(), 9)"
    back = f"import os\nfrom pathlib import Path\n{once}\nPath('back').touch()\n{GATEWAY}"
    wait = "import pathlib, time\nwhile not pathlib.Path('back').exists(): time.sleep(0.1)"
    alpha = cluster(strangers, ["alpha/a100-0/0"], [["other/x/0"]], {"gateway": back, "controller": wait})
    job = alpha.submit("gang")
    assert alpha.exit_code(job) == "0:0", alpha.logs()
    assert "the gateway ended with exit code 137" in alpha.log(f"gang-{job}")

    alpha = cluster(
        strangers, ["alpha/a100-0/0"], [["other/x/0"]], {"gateway": "raise SystemExit(2)", "controller": SLEEP}
    )
    assert alpha.exit_code(alpha.submit("gang")) == "2:0"


def test_a_gateway_that_does_not_end_ends_with_its_job(strangers: Lab) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(999)"
    alpha = cluster(strangers, ["alpha/a100-0/0"], [["other/x/0"]], {"gateway": deaf})
    assert alpha.exit_code(alpha.submit("gang")) == "0:0", alpha.logs()


def test_a_gateway_alone_serves_until_the_tasks_of_the_arrays_have_ended(strangers: Lab) -> None:
    rollouts = [["alpha/a100-0/0"], ["alpha/a100-1/2"]]
    programs = {"gateway": GATEWAY, "actor_generation-1": "raise SystemExit(4)"}
    alpha = cluster(strangers, ["other/x/0"], rollouts, programs)
    assert alpha.scripts["gang"].processes == ("gateway",)
    gang, array = alpha.submit("gang"), alpha.submit("array-a100-80gb")
    assert [alpha.exit_code(f"{array}_{index}") for index in range(2)] == ["0:0", "4:0"]
    assert alpha.exit_code(gang) == "0:0"
    assert len(json.loads(alpha.log("actor_generation-0"))["CUDA_VISIBLE_DEVICES"].split(",")) == 1
    assert {path.name for path in (alpha.directory / "ended").iterdir()} == {"array-a100-80gb.0", "array-a100-80gb.1"}


@pytest.mark.parametrize("whole", [True, False])
def test_jobs_of_a_run_that_failed_go_on_as_those_of_the_next(strangers: Lab, whole: bool) -> None:
    """Both components of a heterogeneous gang, and an array; one of which a task is gone is submitted anew."""
    trainers = ["alpha/a100-0/1", "alpha/a100-0/3", "alpha/a100-1/0", "alpha/a100-1/1", "alpha/a100-1/2"]
    placed = (strangers, trainers, [["alpha/a100-0/0"], ["alpha/a100-1/3"]])
    first, last = f"{HEAR}raise SystemExit({8 if whole else 1})", f"{HEAR}raise SystemExit(8)"
    programs = {"actor_training": last, "actor_generation-0": first, "actor_generation-1": last}
    failed = cluster(*placed, {"gateway": GATEWAY, "controller": TELL, **programs}, restarts=1)
    ids = {name: failed.submit(name) for name in failed.scripts}
    (array,) = (name for name in ids if name != "gang")
    names = ["squeue", "--local", "--noheader", "--states=RUNNING", "--format=%j"]
    held = {f"held-{one.key}" for one in failed.scripts.values()}
    wait_until(lambda: set(strangers.run("alpha", names).stdout.split()) == held, 90, failed.logs)
    again = cluster(*placed, {"gateway": GATEWAY}, run=f"next-{whole}", restarts=1)
    got = taken_over(again, failed)
    assert (got["gang"], got[array] == ids[array]) == (ids["gang"], whole)
    assert all(again.exit_code(job) == "0:0" for job in got.values()), again.logs()
    wait_until(lambda: not strangers.run("alpha", names).stdout, 90, failed.logs)
    assert json.loads(again.log("controller"))["host"] == json.loads(again.log("actor_training-0"))["host"]
    assert [json.loads(again.log(f"actor_generation-{one}"))["SLURM_PROCID"] for one in (0, 1)] == ["0", "0"]


def test_members_that_heard_nothing_of_the_end_hear_it_before_their_jobs_go_on(strangers: Lab) -> None:
    """A gateway that waits for the tasks of an array, which draw on: their controller was killed."""
    placed = (strangers, ["other/x/0"], [["alpha/a100-0/0"], ["alpha/a100-1/2"]])
    stays = {"gateway": GATEWAY, "actor_generation": STAY}
    failed = cluster(*placed, stays, restarts=1)
    ids = {name: failed.submit(name) for name in failed.scripts}
    wait_until(lambda: len([*failed.directory.glob("logs/actor_generation-*.log")]) == 2, 90, failed.logs)
    again = cluster(*placed, {"gateway": GATEWAY}, run="next-heard", restarts=1)
    assert taken_over(again, failed) == ids
    assert all(again.exit_code(job) == "0:0" for job in ids.values()), again.logs() + failed.logs()
    assert [json.loads(again.log(f"actor_generation-{one}"))["SLURM_PROCID"] for one in (0, 1)] == ["0", "0"]


def taken_over(again: Cluster, failed: Cluster) -> dict[str, str]:
    """Submit a run that may take over the jobs of one that failed; return the ids of its jobs by their names."""
    jobs = tuple(replace(job_of(one), takes=failed.scripts[one.name].key) for one in again.scripts.values())
    homes = [f"/home/{JOB_USER}/{one.directory.name}" for one in (again, failed)]
    site = SlurmSite("alpha", "local", homes[0], jobs, earlier=homes[1])
    pack(again.directory)
    taken = parse_submitted(again.lab.run("alpha", ["bash", "-lc", submit_script(site)]).stdout, site)
    assert not taken.problem
    return {name: number for name, (number, _) in taken.jobs.items()}


def test_processes_of_a_gang_are_told_that_slurm_ends_it(strangers: Lab) -> None:
    ends = f"""
import time
from pathlib import Path
print("here", flush=True)
while not Path("{ENDING}").exists():
    time.sleep(0.1)
"""
    programs = {"gateway": GATEWAY, "controller": ends, "actor_training": ends}
    alpha = cluster(strangers, ["alpha/a100-0/0", "alpha/a100-1/0"], [["other/x/0"]], programs)
    (alpha.directory / ENDING).touch()  # of an earlier attempt
    job = alpha.submit("gang")
    wait_until(lambda: len(list((alpha.directory / "logs").glob("*-[01].log"))) == 2, 30, alpha.logs)
    strangers.run("alpha", ["scancel", "--batch", "--signal=USR2", job])  # as Slurm does, ahead of the walltime
    assert alpha.exit_code(job) == "0:0"


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_cancelled_gang_leaves_no_process(strangers: Lab, signal: str) -> None:
    programs = {"gateway": GATEWAY, "controller": SLEEP, "actor_training": SLEEP}
    alpha = cluster(strangers, ["alpha/a100-0/0", "alpha/a100-1/0"], [["other/x/0"]], programs)
    job = alpha.submit("gang")
    wait_until(lambda: len(list((alpha.directory / "logs").glob("*-[01].log"))) == 2, 30, alpha.logs)
    strangers.run("alpha", ["scancel", *(["--signal=KILL", "--full"] if signal == "KILL" else []), job])
    alpha.exit_code(job)

    def left() -> str:
        return "".join(
            strangers.run(node, ["pgrep", "-u", JOB_USER, "-f", "time.sleep"], check=False).stdout
            for node in ("alpha-1", "alpha-2")
        )

    wait_until(lambda: not left(), 30, left)
