from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from hetrl.describe.experiment import Experiment
from hetrl.describe.sites import SiteFile
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError, UsageError
from hetrl.files import replace_json
from hetrl.plan.document import read_plan
from hetrl.runtime.gateway.relay_protocol import key_of_run
from hetrl.runtime.wire.keys import make_run_keys, read_keys
from hetrl.runtime.wire.members import everyone
from launch.render import commands, render
from launch.run_directory import (
    HOLD_MARGIN_SECONDS,
    create_run,
    find_run,
    stage,
    with_absolute_paths,
    write_scripts,
)
from launch.site_ways import OFFERS_PER_PEER, STREAMS, links_of
from tests.launch.launch_cases import quick_experiment, quick_gpus, quick_plan, quick_run

GATEWAYS = {site: f"tcp://127.0.0.1:{port}" for port, site in enumerate(("alpha", "beta", "gamma"), 40001)}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


HELD = {"alpha": 4, "beta": 1, "gamma": 2}
RELAY, SECRET = "relay.example.org:7443", "5" * 64


def staged(**gamma):
    """Stage a run; `gamma` are keys of that site's file."""
    plan, run = quick_plan(), quick_run()
    keys = make_run_keys(plan.site_order)
    sites = [SiteFile(name="alpha"), SiteFile(name="beta"), SiteFile(name="gamma", **gamma)]
    links = links_of(sites, GATEWAYS)
    experiments = dict.fromkeys(plan.site_order, quick_experiment())
    stage(run, experiments, plan, quick_gpus(plan), HELD, GATEWAYS, keys, links, {RELAY: SECRET})
    return run, plan, keys


def test_every_site_gets_the_files_of_its_own_and_its_own_keys_alone():
    run, plan, keys = staged()
    for site in plan.site_order:
        directory = run.site(site)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "keys.json").stat().st_mode) == 0o600
        assert read_keys(directory / "keys.json") == keys[site]
        assert read_plan(directory / "plan.json") == plan
        assert read_yaml(directory / "config.yaml", Experiment) == quick_experiment()
    secrets = {key.secret for key in keys.values()}
    texts = [path.read_text() for path in run.path.rglob("*") if path.is_file() and path.name != "keys.json"]
    assert not any(secret in text for secret in secrets for text in texts)


def test_site_and_gateway_files_name_endpoints_and_no_path_outside_the_site():
    run, plan, _ = staged()
    site = json.loads((run.site("beta") / "site.json").read_text())
    assert (site["run"], site["site"], site["lead_site"], site["bind"]) == (run.id, "beta", "alpha", GATEWAYS["beta"])
    assert set(site) == {"run", "site", "bind", "lead_site", "gpus", "held", "continues", "goes_on"}
    assert site["gpus"] == quick_gpus(plan)
    assert site["held"] == HELD
    gateway = json.loads((run.site("beta") / "gateway.json").read_text())
    assert gateway == {
        "run": run.id,
        "site": "beta",
        "bind": GATEWAYS["beta"],
        "members": list(everyone(plan)),
        "hold_seconds": quick_experiment().launch.start_seconds + HOLD_MARGIN_SECONDS,
        "patience_seconds": {"alpha": 600, "gamma": 600},
        "orphan_seconds": 1800,
        "keys": "keys.json",
        "links": {
            site: {"way": "direct", "endpoint": GATEWAYS[site], "streams": STREAMS} for site in ("alpha", "gamma")
        },
        "offers": [],
    }
    for path in run.site("beta").iterdir():
        assert str(run.path) not in path.read_text()


def test_each_link_has_its_patience():
    launch = quick_experiment().launch.model_copy(
        update={"patience": "00:20:00", "link_patience": {"gamma-beta": "01:00:00"}}
    )
    assert [launch.patience_seconds("beta", to) for to in ("alpha", "beta", "gamma")] == [1200, 0, 3600]
    assert launch.patience_seconds("gamma", "beta") == 3600


def test_a_site_that_uses_a_relay_gets_the_key_of_its_run_for_it_and_not_the_secret():
    run, plan, _ = staged(relay=RELAY)
    for site in plan.site_order:
        gateway = json.loads((run.site(site) / "gateway.json").read_text())
        assert stat.S_IMODE((run.site(site) / gateway["relay_keys"]).stat().st_mode) == 0o600
        assert json.loads((run.site(site) / gateway["relay_keys"]).read_text()) == {
            RELAY: key_of_run(SECRET, run.id).hex()
        }
    assert gateway["offers"] == [{"relay": RELAY, "count": 2 * OFFERS_PER_PEER}]
    assert not any(SECRET in path.read_text() for path in run.path.rglob("*") if path.is_file())


def test_scripts_hold_the_gang_and_one_row_per_array_task():
    plan, run = quick_plan(), quick_run()
    jobs = render(plan, quick_gpus(plan))
    write_scripts(run, commands(jobs, run.id, quick_gpus(plan), dict.fromkeys(plan.site_order, ())))
    gang = json.loads((run.path / "scripts" / "alpha" / "gang.json").read_text())
    assert [task["name"] for task in gang["tasks"]] == ["gateway", "controller", "actor_training-0", "actor_training-1"]
    rows = json.loads((run.path / "scripts" / "beta" / "array-cpu.json").read_text())
    assert rows[0]["argv"][-2:] == ["--replica", "0"]


def test_run_id_is_name_and_stamp_and_two_runs_of_one_second_differ(monkeypatch):
    monkeypatch.setattr("launch.run_directory.time.strftime", lambda form: "20260101-120000")
    first, second = (create_run("quick", "", quick_plan()) for _ in range(2))
    assert (first.id, second.id) == ("quick-20260101-120000", "quick-20260101-120000-2")
    assert find_run(None) == second
    assert find_run("quick-20260101-120000") == first
    assert find_run(str(first.path)) == first
    assert (first.path / "checkpoints").resolve() == first.site("alpha") / "checkpoints"


def test_latest_run_goes_by_the_stamp_not_by_the_name(monkeypatch):
    stamps = iter(["20260102-000000", "20260101-000000"])
    monkeypatch.setattr("launch.run_directory.time.strftime", lambda form: next(stamps))
    later = create_run("a", "", quick_plan())
    create_run("b", "", quick_plan())
    assert find_run(None) == later


def test_unknown_run_is_an_error_that_names_the_nearest_one():
    run = quick_run()
    with pytest.raises(UsageError, match=re.escape(f'did you mean "{run.id}"')):
        find_run(run.id[:-1] + "x")


def test_no_run_at_all_says_how_to_start_one(runs):
    with pytest.raises(UsageError, match="no run yet; start one with `hetrl submit CONFIG`"):
        find_run(None)


def test_runs_directory_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(HetrlError, match="Not a directory; a run needs a directory.*set HETRL_RUNS"):
        quick_run()


def test_relative_paths_of_an_experiment_become_absolute_where_they_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("qwen3-0.6b").mkdir()  # an export of it: the plan is made for what the catalogue has
    given = quick_experiment(
        model={"architecture": "qwen3-0.6b", "weights": "model"}, data={"kind": "jsonl", "path": "x"}
    )
    staged_experiment = with_absolute_paths(given)
    assert staged_experiment.model.weights == str(tmp_path / "model")
    assert staged_experiment.model.architecture == "qwen3-0.6b"
    assert staged_experiment.data.path == "x"


def test_json_file_keeps_its_old_text_when_writing_fails(tmp_path):
    path = tmp_path / "state.json"
    replace_json(path, {"a": 1})
    with pytest.raises(TypeError):
        replace_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_nobody_else_looks_into_a_run():
    run, _, _ = staged()
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
