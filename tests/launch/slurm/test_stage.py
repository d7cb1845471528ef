"""What a run prepared for Slurm leaves in its directory, and how gateways find each other there."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.describe.experiment import Experiment, Model
from hetrl.describe.inventory import write_inventory
from hetrl.describe.launching import Launch
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import GangTimeoutError, UsageError
from hetrl.runtime.gateway import ssh_tunnel, ways
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.gateway.ways import SiteLinks, Way, open_ways
from hetrl.runtime.run.context import read_context
from launch import cli
from launch.slurm.run import read_slurm_run, write_slurm_run
from launch.slurm.stage import (
    Carried,
    carried_files,
    describe,
    dry_run_text,
    settings_lines,
    stage_slurm,
    with_endpoint_files,
)
from tests.launch.slurm.slurm_plans import accounts, cray, lab, plan, problem, university
from tests.launch.slurm.test_render import inventory

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "config.yaml").write_text("name: quick\n")


def open_to_all(*sites: dict[str, object]) -> list[dict[str, object]]:
    return [{"login": f"ada@{site['name']}", "ingress": "ssh", **site} for site in sites]


def two_sites(**changes: object):
    """Training at a, one rollout at b; `changes` are of b's file."""
    nodes = [{"name": "n", "gpu": "l4", "gpus": 2}]
    first = {"name": "a", "ssh": "a-login", "allocation": "gpu", "nodes": nodes}
    second = {"name": "b", "allocation": "gpu", "nodes": nodes, **changes}
    return problem(*open_to_all(first, second)), plan(["a/n/0"], [["b/n/1"]])


@pytest.mark.parametrize("start_with", ["all", 1])
def test_jobs_that_have_but_rollouts_are_spare(start_with, tmp_path):
    asked, given = two_sites()
    experiment = asked.experiment.model_copy(update={"launch": Launch(start_with=start_with)})
    asked = replace(asked, files=replace(asked.files, experiment=experiment))
    staged = stage_slurm(asked, given, tmp_path / "config.yaml")
    described = describe(asked, given, staged)
    assert [(job.kind, job.spare) for job in described.site("a").jobs] == [("gang", False)]
    assert [(job.kind, job.spare) for job in described.site("b").jobs] == [("gang", True), ("array", True)]
    assert described.begins_without_spare == (start_with == 1)
    write_slurm_run(staged.run, described)
    assert read_slurm_run(staged.run) == described


# --- the run directory ------------------------------------------------------------------------------------------------


def test_a_sites_directory_holds_scripts_rows_and_what_its_processes_read():
    asked, given = two_sites()
    prepared = stage_slurm(asked, given, Path("config.yaml"))
    run = prepared.run
    assert prepared.directories == {site: f"/scratch/ada/hetrl/{run.id}/{site}" for site in ("a", "b")}
    assert {str(path.relative_to(run.site("b"))) for path in run.site("b").rglob("*")} == {
        *("config.yaml", "plan.json", "site.json", "keys.json", "gateway.json", "logs", "peers", "scripts"),
        *("scripts/gang.sbatch", "scripts/gang.json", "scripts/array-l4.sbatch", "scripts/array-l4.json"),
    }
    assert (run.path / "scripts" / "b" / "array-l4.sbatch").read_text() == prepared.scripts[-1].text
    assert (run.site("b").stat().st_mode & 0o777, (run.site("b") / "keys.json").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    assert all(f"#SBATCH --chdir={prepared.directories[one.site]}\n" in one.text for one in prepared.scripts)


def test_each_site_reads_models_and_data_where_they_are_there():
    sites, given = two_sites(paths={"/data": "/p/shared"})
    model = {"architecture": "tiny-qwen3", "weights": "/data/actor"}
    files = replace(sites.files, experiment=sites.files.experiment.model_copy(update={"model": Model(**model)}))
    run = stage_slurm(replace(sites, files=files), given, Path("config.yaml")).run
    weights = {site: read_yaml(run.site(site) / "config.yaml", Experiment).model.weights for site in ("a", "b")}
    assert weights == {"a": "/data/actor", "b": "/p/shared/actor"}


def test_a_site_without_a_shared_directory_is_refused_before_anything_is_written():
    for scratch, said in ((None, "not set"), ("scratch/ada", "scratch/ada")):
        asked, given = two_sites(scratch=scratch)
        with pytest.raises(UsageError, match=f"b: scratch is {said}; set it in the site's file to the absolute path"):
            stage_slurm(asked, given, Path("config.yaml"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(("path", "named"), [("topology/measured/b.json", {}), ("b.json", {"inventory": "b.json"})])
def test_what_discover_measured_decides_what_is_asked_for(path, named):
    asked, given = two_sites(gres={"ada": "l4"}, **named)
    write_inventory(Path(path), inventory("b", {"": 2}, ("ada",)))
    scripts = {f"{one.site}/{one.name}": one.text for one in stage_slurm(asked, given, Path("config.yaml")).scripts}
    assert "#SBATCH --gres=gpu:1\n#SBATCH --constraint=ada\n" in scripts["b/array-l4"]


def test_templates_are_found_beside_the_experiment(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "array.sbatch.j2").write_text("#!/bin/bash\n# {{ name }}\n")
    asked, given = two_sites()
    launch = asked.experiment.launch.model_copy(update={"templates": "mine"})
    asked = replace(
        asked, files=replace(asked.files, experiment=asked.experiment.model_copy(update={"launch": launch}))
    )
    assert stage_slurm(asked, given, Path("config.yaml")).scripts[-1].text == "#!/bin/bash\n# array-l4\n"
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"config\.yaml: launch\.templates.*mine"):
        stage_slurm(asked, given, Path("config.yaml"))


def test_a_dry_run_needs_neither_scratch_nor_secrets_and_says_what_it_assumes(capsys):
    given, asked = lab()
    sites = [
        site.model_copy(update={"scratch": None, "relay": "relay.example.org:7443"}) for site in asked.scenario.sites
    ]
    asked = replace(
        asked, files=replace(asked.files, scenario=asked.scenario.model_copy(update={"sites": tuple(sites)}))
    )
    prepared = stage_slurm(asked, given, Path("config.yaml"), dry_run=True)
    assert "alpha: no `scratch` in the site's file, /scratch stands for it" in capsys.readouterr().err
    lines = dry_run_text(prepared, {site.name: site for site in sites}).splitlines()
    at = f"/scratch/hetrl/{prepared.run.id}"
    assert [line for line in lines if line.startswith("sbatch")] == [
        f"sbatch --parsable {at}/alpha/scripts/gang.sbatch  # 1 node, 2 GPUs",
        f"sbatch --parsable {at}/beta/scripts/gang.sbatch  # 1 node, 0 GPUs",
        f"sbatch --parsable {at}/beta/scripts/array-cpu.sbatch  # 1 task, 1 GPU",
        f"sbatch --parsable {at}/gamma/scripts/gang.sbatch  # 1 node, 0 GPUs",
        f"sbatch --parsable {at}/gamma/scripts/array-cpu.sbatch  # 1 task, 1 GPU",
    ]
    first = lines.index("# alpha, on alpha")
    copied = f"rsync -a {prepared.run.site('alpha')}/ alpha:{at}/alpha/"
    assert lines[first + 1 : first + 3] == [f"ssh alpha 'mkdir -p {at}/alpha'", copied]


def test_dry_run_shows_what_the_site_files_say_of_how_jobs_run():
    files = [site for case in (accounts, cray, university) for site in case()[1].scenario.sites]
    shown = {site.name: list(settings_lines(site)) for site in files}
    assert shown["rented"] == [
        "#   setup: source /opt/conda/etc/profile.d/conda.sh",
        "#   setup: conda activate base",
        "#   container: /images/it's hetrl.sif by apptainer",
        "#   container binds: /datasets:/datasets:ro",
        "#   container options: --no-home",
        "#   container options: --env=HF_HOME=/datasets/hf",
        "#   gateway_sbatch: --partition=cpu",
    ]
    assert {"#   interface: hsn0", "#   container options: --no-container-mount-home"} <= set(shown["alps"])
    assert {"#   cpu_bind: rank_ldom", "#   gpu_request: gpus-per-node"} <= set(shown["centre"])
    assert "#   gpu_request: none" in shown["campus"]
    moved = files[0].model_copy(update={"paths": {"/data": "/work/data"}})
    assert "#   paths: /data is /work/data" in list(settings_lines(moved))
    asked, given = two_sites(setup=["module use /opt"])
    text = dry_run_text(
        stage_slurm(asked, given, Path("config.yaml"), dry_run=True), {s.name: s for s in asked.scenario.sites}
    )
    assert "# b\n#   setup: module use /opt\nmkdir -p " in text


def test_dry_run_of_64_gpus_in_eight_clusters_needs_no_cluster(tmp_path, capsys):
    text = (ROOT / "configs" / "paper-multi-country-slurm.yaml").read_text()
    scenario = ROOT / "topology" / "scenarios" / "multi-country-slurm.yaml"
    config = tmp_path / "eight.yaml"
    config.write_text(
        text.replace("solver: sha-ea", "solver: verl").replace(f"topology/scenarios/{scenario.name}", str(scenario))
    )
    assert cli.main(["submit", str(config), "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sbatch")]
    assert "/r0/scripts/gang.sbatch  # 1 node, 8 GPUs" in lines[0]
    assert sum(int(line.split(", ")[-1].split()[0]) for line in lines) == 64
    (run,) = (tmp_path / "runs").iterdir()
    for line in lines:
        site, _, script = line.split()[2].rsplit("/", 3)[1:]
        assert (run / "scripts" / site / script).read_text().startswith("#!/bin/bash -l\n# hetrl run")


# --- the addresses of gateways ----------------------------------------------------------------------------------------


def test_each_way_is_told_where_the_other_gateway_listens():
    links = SiteLinks(
        {
            "ssh": Way("ssh", "tcp://gw.example.org:7000", 4, login="ada@login"),
            "direct": Way("direct", "", 4),
            "fixed": Way("direct", "tcp://gw.example.org:7000", 4),
            "proxy": Way("proxy", "", 4, proxy="proxy:3128"),
            "relay": Way("relay", "", 4, relay="relay:7443"),
        }
    )
    directories = {site: f"/scratch/{site}" for site in (*links.links, "here")}
    told = with_endpoint_files(links, directories)
    assert {peer: (way.endpoint, way.endpoint_file) for peer, way in told.links.items()} == {
        "ssh": ("", "/scratch/ssh/gateway.endpoint"),
        "direct": ("", "peers/direct.endpoint"),
        "fixed": ("tcp://gw.example.org:7000", None),
        "proxy": ("", "peers/proxy.endpoint"),
        "relay": ("", None),
    }
    assert list(carried_files({"here": told}, directories)) == [
        Carried(site, "here", f"/scratch/{site}/gateway.endpoint", f"/scratch/here/peers/{site}.endpoint")
        for site in ("direct", "proxy")
    ]


def test_members_wait_for_the_address_of_their_gateway(tmp_path):
    asked, given = two_sites()
    asked = replace(
        asked,
        files=replace(
            asked.files,
            experiment=asked.experiment.model_copy(
                update={"launch": Launch(queue_timeout="00:00:00", gang_timeout="00:00:00")}
            ),
        ),
    )
    directory = stage_slurm(asked, given, Path("config.yaml")).run.site("b")
    with pytest.raises(GangTimeoutError, match="gateway.endpoint: the gateway of b did not start"):
        read_context(directory)
    (directory / "gateway.endpoint").write_text("tcp://10.0.0.7:4711\n")
    assert read_context(directory).gateway == "tcp://10.0.0.7:4711"


def test_a_gateway_that_slurm_is_yet_to_place_is_dialled_where_its_file_says(tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "PAUSE_SECONDS", 0.02)
    links = SiteLinks({"beta": Way("direct", "", 1, endpoint_file=str(tmp_path / "beta.endpoint"))})

    async def echo_through(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        with contextlib.suppress(ConnectionResetError):
            return await reader.read(5)
        return b""

    async def scenario() -> None:
        opened = open_ways("alpha", "run-1", links, "tcp://127.0.0.1:1", {})
        port = int(opened.endpoints["beta"].rpartition(":")[2])
        carrying = asyncio.create_task(opened.carry())
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        assert await echo_through(port) == b""  # it is not up
        (tmp_path / "beta.endpoint").write_text(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
        assert await echo_through(port) == b"hello"
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        server.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(5))
    await writer.drain()
    writer.close()


def test_a_tunnel_asks_until_the_other_gateway_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(ssh_tunnel, "ASK_PAUSE_SECONDS", 0.02)
    file, asked, opened = (tmp_path / name for name in ("gateway.endpoint", "asked", "opened"))
    ask = ["bash", "-c", f"echo x >> {asked}; cat {file}"]  # as the login node's shell does

    def tunnel(endpoint: str) -> list[str]:
        return ["bash", "-c", f"echo {endpoint} > {opened}; exec sleep 60"]

    async def scenario() -> None:
        keeping = asyncio.create_task(ssh_tunnel.keep_tunnel_to(ask, tunnel, LinkReport("alpha -> beta")))
        while not (asked.exists() and len(asked.read_text()) >= 4):
            await asyncio.sleep(0.01)
        assert not opened.exists()
        file.write_text("tcp://10.0.0.7:4711\n")
        while not (opened.exists() and opened.read_text()):
            await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert opened.read_text() == "10.0.0.7:4711\n"


def test_a_tunnel_follows_a_gateway_that_is_started_again_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(ssh_tunnel, "ASK_PAUSE_SECONDS", 0.02)
    file, asked, opened = (tmp_path / name for name in ("gateway.endpoint", "asked", "opened"))
    ask = ["bash", "-c", f"echo x >> {asked}; cat {file}"]
    file.write_text("tcp://10.0.0.7:4711\n")

    def tunnel(endpoint: str) -> list[str]:
        refusals = "echo 'channel 2: open failed: connect failed: Connection refused' >&2; sleep 0.05"
        return ["bash", "-c", f"echo {endpoint} >> {opened}; while true; do {refusals}; done"]

    async def scenario() -> None:
        keeping = asyncio.create_task(ssh_tunnel.keep_tunnel_to(ask, tunnel, LinkReport("alpha -> beta")))
        while not (asked.exists() and len(asked.read_text()) >= 8):  # refused, and still said to be there
            await asyncio.sleep(0.01)
        assert opened.read_text() == "10.0.0.7:4711\n"
        file.write_text("tcp://10.0.0.8:4712\n")
        while "10.0.0.8" not in opened.read_text():
            await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert opened.read_text() == "10.0.0.7:4711\n10.0.0.8:4712\n"


def test_the_question_for_an_address_is_one_quoted_word():
    command = ssh_tunnel.ask_command("ada@login.b", "/scratch/a b/gateway.endpoint", None)
    assert command[-3:] == ["--", "ada@login.b", "cat '/scratch/a b/gateway.endpoint'"]
    assert "BatchMode=yes" in command
