"""What `hetrl probe` and `hetrl profile --site` give a site and run there; the scripts are run, on this machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from hetrl.describe.measured import write_measured
from hetrl.describe.measured_files import read_file
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.gateway.gateway_process import read_gateway
from hetrl.runtime.instruments.load import (
    INTERVALS,
    LARGEST_MESSAGE_BYTES,
    LARGEST_WINDOW_BYTES,
    full_load,
    round_trips,
)
from hetrl.runtime.instruments.probe import Found, Links, ProbeFile
from hetrl.runtime.wire import LinkMeasured
from lab.quickstart import changed
from launch.cli import main
from launch.measure import run as measure_run
from launch.measure.commands import (
    Look,
    fetch_script,
    look_script,
    parse_fetched,
    parse_look,
    start_script,
    stop_script,
    write_script,
)
from launch.measure.remote_task import LOCAL, SLURM, RemoteTask, parameters, perform, read_tasks
from launch.measure.stage import ProbeSite, Wanted, remote_jobs, stage
from launch.measure.verbs import tables
from launch.remote import parse
from launch.slurm.commands import cancel_script
from tests.launch.launch_cases import ROOT, until
from tests.launch.measure.probe_cases import measured_links, probed
from tests.launch.remote_cases import part
from tests.measure.profile_cases import measured

GOLDEN = ROOT / "tests" / "golden" / "probe"
WANTED = Wanted(
    links=True,
    nodes=True,
    gpus=True,
    streams=(1, 4),
    seconds=2.0,
    round_trips=5,
    wait_seconds=60.0,
    gpu_seconds=240.0,
    profile=("--quick",),
)
NODES = {"name": "a", "gpu": "a100-80gb", "gpus": 4, "count": 2}


def site_file(name: str, **more: object) -> SiteFile:
    return SiteFile.model_validate({"name": name, "nodes": [NODES], "scratch": f"/scratch/{name}", **more})


ALPS = site_file(
    "alps",
    ssh="alps-login",
    account="physics",
    partitions=["gpu"],
    gres={"a100": "a100-80gb"},
    modules=["cuda/12.8"],
    python="/envs/hetrl/bin/python",
    interface="ib0",
    mpi="pmi2",
    sbatch=["--reservation=rl"],
    cluster="alps",
)
CONTAINED = site_file("jsc", container="/images/hetrl.sif", allocation="gpu", python="/opt/python")


def probe_site(file: SiteFile, there: str, executor: str = SLURM) -> ProbeSite:
    return ProbeSite(file, executor, Path(there), there, ("links", "gpu-l4"), "probe-1")


# ---- what a site is given


@pytest.mark.parametrize("file", [ALPS, CONTAINED], ids=["alps", "contained"])
def test_the_tasks_of_a_site_and_what_its_scripts_are_given_are_golden(file: SiteFile) -> None:
    site = probe_site(file, f"/scratch/{file.name}/hetrl/probe-1/{file.name}")
    jobs = remote_jobs(file, SLURM, "probe-1", site.there, WANTED, sites=3)
    scripts = {"start": start_script(site), "look": look_script(site), "fetch": fetch_script(site)}
    scripts["stop"] = cancel_script(site.slurm, remove=True)
    given = {name: text[: text.index("# shellcheck")].splitlines() for name, text in scripts.items()}
    found = {"tasks": asdict(jobs), **given}
    path = GOLDEN / f"{file.name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(json.dumps(found)) == json.loads(path.read_text())


def test_probes_and_profiles_bind_cpus_and_find_gpus_as_runs_do() -> None:
    file = site_file("campus", gpu_request="none", cpu_bind="rank_ldom", gateway_sbatch=["--partition=cpu"])
    asked = remote_jobs(file, SLURM, "probe-1", "/work", WANTED, sites=2)
    links, *_, gpus = asked.jobs
    assert "--partition=cpu" in links.options and "--partition=cpu" not in gpus.options
    assert all(parameters(asked, job)["srun_args"][0] == "--cpu-bind=rank_ldom" for job in asked.jobs)
    assert parameters(asked, gpus)["setup"][-1] == "export CUDA_VISIBLE_DEVICES=0,1,2,3"
    assert "CUDA_VISIBLE_DEVICES=" not in " ".join(parameters(asked, links)["setup"])


def test_a_local_site_measures_its_links_by_processes_of_this_machine() -> None:
    jobs = remote_jobs(site_file("here", prefix=["nsenter", "--net"]), LOCAL, "probe-1", "/work", WANTED, sites=2)
    assert [job.name for job in jobs.jobs] == ["links", "gpu-a100-80gb"]  # one machine has one node
    assert jobs.jobs[0].tasks[0].argv == ("nsenter", "--net", "python", "-m", "hetrl.runtime.instruments.probe")
    assert jobs.jobs[1].gpus == 2
    assert all(not job.options and not job.srun for job in jobs.jobs)


def test_staged_sites_have_a_gateway_per_number_of_streams_and_read_their_tasks(tmp_path: Path, monkeypatch) -> None:
    one, other = site_file("one"), site_file("other")
    sites = stage("probe-1", [one, other], LOCAL, tmp_path, WANTED)
    assert [site.tasks for site in sites] == [("links", "gpu-a100-80gb")] * 2
    directory = sites[0].here
    assert directory.stat().st_mode & 0o077 == 0
    assert (directory / "keys.json").stat().st_mode & 0o077 == 0
    asked = msgspec.json.decode((directory / "probe.json").read_bytes(), type=ProbeFile)
    assert (asked.site, asked.streams, asked.ways["one"]["other"]) == ("one", (1, 4), "direct")
    assert [task.name for job in read_tasks(directory / "tasks.json").jobs for task in job.tasks] == list(
        sites[0].tasks
    )
    monkeypatch.chdir(directory)
    for streams in asked.streams:
        document = json.loads((directory / f"gateway-{streams}.json").read_text())
        assert document["links"]["other"]["streams"] == streams
        gateway, ways = read_gateway(directory / f"gateway-{streams}.json")
        assert gateway.site == "one" and set(ways.endpoints) == {"other"}


def test_a_slurm_site_gets_the_code_and_finds_its_peers_by_files(tmp_path: Path) -> None:
    sites = stage("probe-1", [site_file("one"), site_file("other")], SLURM, tmp_path, WANTED)
    assert sites[0].there == "/scratch/one/hetrl/probe-1/one"
    for module in ("hetrl/runtime/instruments/probe.py", "launch/measure/remote_task.py"):
        assert (sites[0].here / "code" / module).is_file()
    document = json.loads((sites[0].here / "gateway-4.json").read_text())
    assert document["links"]["other"]["endpoint_file"] == "peers/other.endpoint"
    with pytest.raises(UsageError, match="bare: scratch is not set"):
        stage("probe-2", [site_file("bare", scratch=None)], SLURM, tmp_path / "more", WANTED)


# ---- the scripts, and what is read from them


def bash(script: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_site_says_is_read(tmp_path: Path) -> None:
    site = probe_site(ALPS, str(tmp_path))
    assert parse_look(bash(look_script(site))).endpoint is None
    for folder in ("ended", "logs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ready").write_text("tcp://10.0.0.1:7000\n")
    (tmp_path / "ended" / "links").write_text("0\n")
    (tmp_path / "ended" / "gpu-l4").write_text("137\n")
    look = parse_look(bash(look_script(site)))
    assert (look.endpoint, look.ended) == ("tcp://10.0.0.1:7000", {"links": 0, "gpu-l4": 137})
    assert parse_look(part("absent")) == parse_look("")

    (tmp_path / "links.json").write_text('{"done": true}')
    (tmp_path / "gpu-l4.json").write_text('{"format": 1}\n')
    (tmp_path / "logs" / "links.log").write_text("@ output gpu-l4.json\nerror: beta is gone\n")
    fetched = parse_fetched(bash(fetch_script(site)))
    assert json.loads(fetched["links.json"]) == {"done": True}
    assert json.loads(fetched["gpu-l4.json"]) == {"format": 1}
    assert "error: beta is gone" in fetched["logs/links.log"]
    assert parse_fetched(bash(fetch_script(probe_site(ALPS, str(tmp_path / "gone"))))) == {}


def test_what_was_cut_off_is_not_read() -> None:
    assert parse_look("@ ready\ntcp://10.0.0.1:70\n") == Look()
    assert parse_look(part("ready") + "@ ended\nlinks 0\n") == Look()
    assert parse_fetched(part("output nodes.json", "{}\n") + '@ output links.json\n{"links":\n') == {
        "nodes.json": "{}\n"
    }


def test_files_are_written_as_they_are(tmp_path: Path) -> None:
    files = {"peers/beta.endpoint": "tcp://10.0.0.1:1\n", "go.json": '["it\'s", "$HOME"]'}
    bash(write_script(probe_site(ALPS, str(tmp_path)), files))
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_stopping_cancels_every_job_that_slurm_lists_and_removes_the_directory(tmp_path: Path, monkeypatch) -> None:
    """Also one whose id nobody wrote down, as where this process was ended while the site was at sbatch."""
    there = tmp_path / "run" / "alps"
    there.mkdir(parents=True)
    rows = "17|probe-1-links|RUNNING|x|x|n1|None\n18|probe-1-gpu-l4|PENDING|x|x||Resources\n"
    programs = {"squeue": f"printf '{rows}'", "scancel": f'echo "$@" >>{tmp_path}/cancelled; [ "$3" != 18 ]'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".bash_profile").write_text(f"PATH={tmp_path}:$PATH\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    site = ProbeSite(ALPS.model_copy(update={"ssh": "local"}), SLURM, there, str(there), ("links", "gpu-l4"), "probe-1")
    with pytest.raises(HetrlError, match="alps: job 18: scancel did not answer; cancel by hand"):
        measure_run.stop(site)
    assert (tmp_path / "cancelled").read_text() == "-M alps 17\n-M alps 18\n"
    assert not (tmp_path / "run").exists()


# ---- tasks


SBATCH = """#!/bin/sh
for file; do :; done
cat "$file" >>"$CAPTURED"
echo "Submitted batch job 41 on cluster alps"
"""


def test_slurm_is_asked_by_submitit_and_the_ids_are_said(tmp_path: Path, monkeypatch, capsys) -> None:
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CAPTURED", str(tmp_path / "captured"))
    jobs = remote_jobs(ALPS, SLURM, "probe-1", str(tmp_path), WANTED, sites=2)
    (tmp_path / "tasks.json").write_text(json.dumps(asdict(jobs)))
    assert main(["remote-task", str(tmp_path / "tasks.json")]) == 0
    assert capsys.readouterr().out == (tmp_path / "jobs").read_text() == "links 41\nnodes 41\ngpu-a100-80gb 41\n"
    lines = (tmp_path / "captured").read_text().splitlines()
    for option in ("--account=physics", "--partition=gpu", "--reservation=rl", "--clusters=alps"):
        assert lines.count(f"#SBATCH {option}") == 3
    assert [line.split("=")[1] for line in lines if line.startswith("#SBATCH --nodes=")] == ["1", "2", "1"]
    assert lines.count(f". {tmp_path}/code/launch/remote/setup.sh 'module load cuda/12.8'") == 3
    runs = [line for line in lines if line.startswith("srun ")]
    assert all("/envs/hetrl/bin/python -u -m submitit.core._submit" in line for line in runs)
    assert ["--mpi=pmi2" in line for line in runs] == [False, True, False]
    assert not any("wckey" in line for line in lines)


def test_a_refusal_of_sbatch_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    refusal = "#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n"
    for name, text in {"sbatch": refusal, "srun": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs = remote_jobs(ALPS, SLURM, "probe-1", str(tmp_path), WANTED, sites=2)
    (tmp_path / "tasks.json").write_text(json.dumps(asdict(jobs)))
    assert main(["remote-task", str(tmp_path / "tasks.json")]) == 1
    assert "Invalid account" in capsys.readouterr().err


def test_a_task_leaves_its_exit_code_and_its_log(tmp_path: Path, monkeypatch) -> None:
    for folder in ("logs", "ended"):
        (tmp_path / folder).mkdir()
    say = "import os, sys; print(os.getcwd()); sys.exit(3)"
    assert perform(RemoteTask("say", ("python", "-c", say)), str(tmp_path)) == 3
    assert (tmp_path / "ended" / "say").read_text() == "3\n"
    assert (tmp_path / "logs" / "say.log").read_text() == f"{tmp_path}\n"
    monkeypatch.setenv("SLURM_PROCID", "1")  # the second node of a step does not speak for it
    assert perform(RemoteTask("more", ("python", "-c", say)), str(tmp_path)) == 3
    assert not (tmp_path / "ended" / "more").exists()


def test_local_tasks_run_until_they_are_stopped(tmp_path: Path) -> None:
    sleeps = {"name": "links", "argv": ["python", "-c", "import time; print('on', flush=True); time.sleep(600)"]}
    job = {"name": "links", "tasks": [sleeps], "seconds": 60.0}
    jobs = {"executor": "local", "key": "probe-1", "python": sys.executable, "setup": [], "jobs": [job]}
    (tmp_path / "tasks.json").write_text(json.dumps(jobs))
    site = probe_site(ALPS, str(tmp_path), LOCAL)
    (name, number) = parse(bash(start_script(site)))["started"].text.split()
    assert name == "links"
    try:
        log = tmp_path / "logs" / "links.log"
        until(lambda: log.exists() and "on" in log.read_text(), "a word of the task", 50)
    finally:
        bash(stop_script(site))
    until(lambda: not Path(f"/proc/{number}").exists(), "the end of the task")  # where killed, its parent sees to it


def test_a_probe_that_waited_in_vain_has_not_failed() -> None:
    site, logs = probe_site(ALPS, "/scratch"), {"logs/links.log": "waited 30 s for go.json"}
    for endpoint, lead, skipped in (("tcp://10.0.0.1:7000", None, []), (None, None, ["alps"]), ("", "alps", ["alps"])):
        found = measure_run.Found()
        measure_run._read(site, Look(endpoint, {"links": 6}), logs, lead, found)
        assert [*found.skipped] == skipped


def test_of_a_probe_that_ended_beside_the_one_that_leads_its_log_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = [
        ProbeSite(SiteFile(name=name), SLURM, Path(), "/scratch", ("links",), "probe-1") for name in ("alps", "bern")
    ]
    codes, logs = {"alps": 0, "bern": 1}, {"alps": "all is measured", "bern": "IndexError: list index out of range"}
    for asked, answer in {
        "stage": lambda *_: sites,
        "start": lambda site: None,
        "_begin": lambda *_: "alps",
        "look": lambda site: Look("tcp://10.0.0.1:7000", {"links": codes[site.name]}),
        "fetch": lambda site: {"logs/links.log": logs[site.name]},
        "stop": lambda site: None,
    }.items():
        monkeypatch.setattr(measure_run, asked, answer)
    found = measure_run.measure([], SLURM, replace(WANTED, nodes=False, gpus=False))
    assert found.skipped == {"bern": "IndexError: list index out of range"}


@pytest.mark.parametrize(("text", "says"), [("{", "not a file of tasks"), (None, "No such file")])
def test_a_file_that_is_not_one_of_tasks_is_refused(tmp_path: Path, text: str | None, says: str, capsys) -> None:
    if text is not None:
        (tmp_path / "tasks.json").write_text(text)
    assert main(["remote-task", str(tmp_path / "tasks.json")]) == 2
    assert says in capsys.readouterr().err


PROFILED = """#!/bin/sh
printf '%s\\n' "$@" >{seen}
cp {measured} gpu-cpu.json
"""


def test_a_site_is_profiled_by_a_task_for_each_type_of_gpu(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_measured(tmp_path / "one.json", measured(gpu="cpu"))
    stub = tmp_path / "stub"
    stub.write_text(PROFILED.format(seen=tmp_path / "seen", measured=tmp_path / "one.json"))
    stub.chmod(0o755)
    nodes = [{"name": "n", "gpu": "cpu", "gpus": 1, "count": 2}]
    (tmp_path / "site.yaml").write_text(json.dumps({"name": "alps", "prefix": [str(stub)], "nodes": nodes}))
    config = changed(tmp_path, topology={"sites": [str(tmp_path / "site.yaml")], "links": None})
    assert main(["profile", "--site", "alps", "--quick", "--out", "out", str(config)]) == 0
    (path,) = (tmp_path / "out").iterdir()
    assert read_file(path) == measured(gpu="cpu")
    words = (tmp_path / "seen").read_text()
    assert words.split()[1:] == ["-m", "launch.cli", "profile", "--gpu", "cpu", "--out", "gpu-cpu.json", "--quick"]
    assert "Shares of the catalogue" in capsys.readouterr().out


# ---- measuring


def test_every_round_trip_after_the_first_two_counts() -> None:
    sent = []

    async def send() -> None:
        sent.append(None)

    assert len(asyncio.run(round_trips(send, 5))) == 5
    assert len(sent) == 7


def test_a_load_counts_what_is_answered_and_keeps_no_more_under_way_than_a_member_takes() -> None:
    under_way, most = 0, 0

    async def send(payload: bytes) -> None:
        nonlocal under_way, most
        assert len(payload) <= LARGEST_MESSAGE_BYTES
        under_way += len(payload)
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= len(payload)

    load = asyncio.run(full_load(send, 0.2, (0.001,)))
    assert len(load.interval_bytes) == INTERVALS and sum(load.interval_bytes) > 0
    assert most <= load.window_bytes <= LARGEST_WINDOW_BYTES


def test_a_load_that_fails_raises_the_error_of_a_message() -> None:
    async def send(payload: bytes) -> None:
        raise HetrlError("beta cannot be reached")

    with pytest.raises(HetrlError, match="^beta cannot be reached$"):
        asyncio.run(full_load(send, 0.2, (0.001,)))


def test_a_load_on_a_machine_that_holds_it_up_is_measured_or_asks_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(payload: bytes) -> None:
        await asyncio.sleep(0)

    def held_up(by_seconds: float) -> float:
        readings = itertools.count(0.0, by_seconds)
        monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
        return sum(asyncio.run(full_load(send, 10.0, (0.001,))).interval_bytes)

    assert held_up(by_seconds=0.3) > 0
    with pytest.raises(HetrlError, match=r"nothing was answered in the 10 s of the load.*--seconds"):
        held_up(by_seconds=11.0)


def test_what_is_found_is_on_disk_after_every_pair(tmp_path: Path) -> None:
    asked = ProbeFile("r", "alpha", None, (1, 4), 1.0, 2, 60.0, {"alpha": {"beta": "ssh"}, "beta": {"alpha": "relay"}})
    found = Found(tmp_path / "links.json", asked)
    loaded = LinkMeasured(round_trip_seconds=(0.01, 0.02), interval_seconds=0.5, interval_bytes=(125_000_000,))
    for streams in asked.streams:
        found.add(("alpha", "beta"), streams, loaded)
    found.skip("beta -> alpha", "no answer")
    found.skip("beta -> alpha", "no answer again")
    links = msgspec.json.decode((tmp_path / "links.json").read_bytes(), type=Links)
    (link,) = links.links
    assert (link.way, link.round_trip_ms) == ("ssh", (10.0, 20.0, 10.0, 20.0))
    assert [(one.streams, one.gbps) for one in link.throughput] == [(1, 2.0), (4, 2.0)]
    assert [(one.what, one.why) for one in links.skipped] == [("beta -> alpha", "no answer")]
    assert not links.done
    found.write(done=True)
    assert msgspec.json.decode((tmp_path / "links.json").read_bytes(), type=Links).done


# ---- the command line


def test_tables_fit_a_terminal_and_name_what_was_written(capsys) -> None:
    from rich.console import Console

    from hetrl.describe.links import LinkEntry
    from hetrl.describe.sites import ScenarioFile

    scenario = ScenarioFile(
        sites=(site_file("alpha"), site_file("beta")),
        links=(LinkEntry(between=("alpha", "beta"), delay_ms=1, gbps=9),),
    )
    found = measured_links(probed("alpha", "beta"), nodes=(probed("alpha", "alpha", way="mpi"),))
    Console(width=80).print(tables(found, scenario))
    printed = capsys.readouterr().out
    assert "Gbps, 1/4 streams" in printed and "0.500/1.00" in printed and "9.00 Gbps" in printed and "mpi" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profile", "--site", "alpha"], "takes an experiment"),
        (["profile", "configs/quickstart.yaml"], "goes with --site NAME"),
        (["profile", "--site", "alpa", "configs/quickstart.yaml"], 'did you mean "alpha"'),
        (["probe", "nowhere.yaml"], "nowhere.yaml: No such file"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], says: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
