from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, UsageError
from hetrl.files import EventLog, read_lines
from launch import local, ports
from launch.local import LocalExecutor, processes_of, stop_processes
from launch.ports import free_ports, gateway_endpoints
from launch.render import Command, Job, commands
from launch.run_directory import Run
from launch.state import fold
from tests.launch.launch_cases import SLEEPER, job, left_of, member, quick_run, until

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
# A child in a session of its own that outlives its parent and hides from the parent's group.
ORPHAN = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True)"
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path))
    monkeypatch.setattr(local, "GRACE_SECONDS", 1.0)
    run = quick_run()
    yield run
    stop_processes(run, [])


def started(run: Run, *jobs: Job[Command]) -> LocalExecutor:
    events = EventLog(run.events, "launcher")
    executor = LocalExecutor(run, jobs, events, lambda: fold(read_lines(run.events)))
    executor.start()
    return executor


def exits(executor: LocalExecutor) -> list[tuple[str, str, int]]:
    return [(gone.what.site, gone.what.name, gone.code) for gone in executor.poll()]


def test_processes_start_in_their_site_with_their_environment_and_a_log(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    code = "import os, sys; print(os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), sorted(os.environ))"
    executor = started(run, job(run, "beta", member=code))
    (record,) = list(read_lines(run.events))[-1]["processes"]
    until(lambda: exits(executor) == [("beta", "member", 0)], "exit")
    text = run.log("beta", "member").read_text()
    assert text.startswith(f"{run.site('beta')} True ")
    assert "'HETRL_RUN'" in text
    assert "HETRL_RUNS" not in text and "CUDA_VISIBLE_DEVICES" not in text
    assert record["name"] == "member"


def test_a_sites_prefix_stands_before_each_of_its_commands(run):
    jobs = [Job(site, "gang", "gang", (member(site, "gateway"),)) for site in ("alpha", "beta")]
    tells = ["sh", "-c", 'echo "${WHERE-None} $2"']
    executor = started(run, *commands(jobs, run.id, {}, {"alpha": ["env", "WHERE=inside", *tells], "beta": tells}))
    seen = []
    until(lambda: seen.extend(executor.poll()) or len(seen) == 2, "both exit")
    logs = [run.log(site, "gateway").read_text() for site in ("alpha", "beta")]
    module = "hetrl.runtime.gateway.gateway_process"
    assert logs == [f"inside {module}\n", f"None {module}\n"]


def test_poll_tells_each_exit_once(run):
    executor = started(run, job(run, "alpha", good="", bad="raise SystemExit(3)", stays=SLEEPER))
    seen = []
    until(lambda: seen.extend(exits(executor)) or len(seen) >= 2, "two exits")
    assert sorted(seen) == [("alpha", "bad", 3), ("alpha", "good", 0)]
    assert [(one.name, one.role) for one in executor.alive()] == [("stays", "stays")]
    executor.stop()
    assert exits(executor) == [("alpha", "stays", -15)]


def test_a_process_has_a_temporary_directory_that_ends_with_it(run):
    code = "import os, tempfile; print(tempfile.mkdtemp(), flush=True); "
    stays = f"{code} import time; time.sleep(600)"
    executor = started(run, job(run, "alpha", killed=f"{code} os.kill(os.getpid(), 9)", stays=stays))
    until(lambda: exits(executor) == [("alpha", "killed", -9)], "one is killed")
    made = {}
    for name in ("killed", "stays"):
        until(lambda name=name: run.log("alpha", name).read_text(), "it has said which")
        made[name] = Path(run.log("alpha", name).read_text().strip()).parent
    assert {name: path.exists() for name, path in made.items()} == {"killed": False, "stays": True}
    executor.stop()
    assert not made["stays"].exists()


def test_stop_kills_what_ignores_the_first_signal(run):
    executor = started(run, job(run, "alpha", stubborn=STUBBORN))
    until(lambda: run.log("alpha", "stubborn").read_text(), "the program is up")
    executor.stop()
    assert exits(executor) == [("alpha", "stubborn", -9)]
    assert left_of(run) == []


def test_stop_finds_what_left_the_group_of_a_parent_that_is_gone(run):
    executor = started(run, job(run, "alpha", parent=ORPHAN))
    until(lambda: executor.poll(), "the parent is gone")
    assert len(left_of(run)) == 1
    executor.stop()
    assert left_of(run) == []


def test_stop_spares_other_runs_even_of_the_same_name(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("launch.run_directory.time.strftime", lambda form: run.id.removeprefix("quick-"))
    other = quick_run()
    assert other.id == run.id
    executors = [started(one, job(one, "alpha", stays=SLEEPER)) for one in (run, other)]
    executors[0].stop()
    assert executors[1].poll() == []
    assert len(left_of(other)) == 1
    executors[1].stop()


def test_a_number_that_another_process_has_by_now_is_not_ours():
    mine = psutil.Process()
    record = {"pid": mine.pid, "created": mine.create_time()}
    assert processes_of([record]) == [mine]
    assert processes_of([{**record, "created": mine.create_time() - 60}]) == []


def test_program_that_does_not_exist_is_named(run):
    command = Command(member("alpha", "gateway"), ("/no/such/program",), {"HETRL_RUN": run.id})
    with pytest.raises(HetrlError, match="alpha: cannot start gateway: No such file or directory: /no/such/program"):
        started(run, Job("alpha", "gang", "gang", (command,)))


def test_gateway_that_is_killed_stays_down_once_the_run_is_stopped(run):
    executor = started(run, job(run, "alpha", gateway=SLEEPER))
    executor.stop()
    assert exits(executor) == [("alpha", "gateway", -15)]
    assert left_of(run) == []


def test_free_ports_differ_and_sites_get_their_fixed_or_a_free_one():
    free = free_ports(20)
    assert len(set(free)) == 20
    sites = [SiteFile(name="alpha", gateway_port=free[0]), SiteFile(name="beta"), SiteFile(name="gamma")]
    endpoints = gateway_endpoints(sites)
    assert endpoints["alpha"] == f"tcp://127.0.0.1:{free[0]}"
    assert len(set(endpoints.values())) == 3


def test_free_ports_are_none_that_the_kernel_gives_to_whoever_connects():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        assert first <= listener.getsockname()[1] <= last
    assert not [port for port in free_ports(50) if first <= port <= last]


def test_where_all_ports_are_ephemeral_any_free_one_is_taken(tmp_path, monkeypatch):
    everything = tmp_path / "ip_local_port_range"
    everything.write_text("1024\t65535\n")
    for at in (everything, tmp_path / "missing"):
        monkeypatch.setattr(ports, "_EPHEMERAL", at)
        assert len(set(free_ports(20))) == 20


def test_the_port_of_a_site_with_a_prefix_is_not_tried_here():
    away = {"gateway_host": "192.0.2.1", "prefix": ["nsenter", "--net=/run/netns/alpha"]}
    sites = [SiteFile(name="alpha", gateway_port=1, **away), SiteFile(name="beta", **away)]
    endpoints = gateway_endpoints(sites)
    assert endpoints["alpha"] == "tcp://192.0.2.1:1"
    assert endpoints["beta"].startswith("tcp://192.0.2.1:")


def test_port_that_is_taken_is_named_with_its_owner():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            gateway_endpoints([SiteFile(name="alpha", gateway_port=port)])
    name = psutil.Process().name()
    assert str(caught.value) == (
        f"alpha: port {port} on 127.0.0.1 is taken by {name} (process {os.getpid()}); "
        "set gateway_port in the site's file (0: any free port)"
    )


def test_two_sites_with_one_port_and_a_foreign_address_are_refused():
    (port,) = free_ports(1)
    sites = [SiteFile(name=name, gateway_port=port) for name in ("alpha", "beta")]
    with pytest.raises(UsageError, match=f"alpha and beta: both have gateway_port {port}"):
        gateway_endpoints(sites)
    with pytest.raises(UsageError, match=r"alpha: cannot listen on 192\.0\.2\.1"):
        gateway_endpoints([SiteFile(name="alpha", gateway_host="192.0.2.1", gateway_port=port)])
