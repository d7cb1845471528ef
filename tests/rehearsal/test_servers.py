"""What a GPU's server of generation is started with fits the GPU; a cap that is not cut to it is found."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from hetrl.cost.memory import rollout_shapes, serving_workspace_bytes, with_server
from hetrl.cost.model import CostModel
from hetrl.hardware import Node, Site, Topology
from hetrl.plan.plan import Replica, Stage
from hetrl.runtime.run.context import Context, read_context
from hetrl.runtime.run.rollout import settings_of
from hetrl.runtime.vllm.command import command_of
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from hetrl.workload import ACTOR_GENERATION, Lengths, Workload, architecture
from lab.quick import quick_plan
from tests.rehearsal.rank_cases import EXPERIMENT, SITE

ACTOR = architecture("qwen3-8b")
GPUS = {f"{SITE}/big/0": "a100-80gb", f"{SITE}/small/0": "l40s"}
CAP_GB, SEQUENCES = 73.6, 64  # the cap suits neither
TOPOLOGY = Topology((Site(SITE, (Node("big", "a100-80gb", 1), Node("small", "l40s", 1))),))
MODEL = CostModel(TOPOLOGY, Workload("grpo", "sync", 0, 16, 1, 512, Lengths(512, 512), 1, actor=ACTOR))


def site_of_two_servers(directory: Path) -> Context:
    """Write what the launcher stages where two unequal GPUs generate, and read it as a rollout does."""
    plan = quick_plan()
    replicas = tuple(
        with_server(Replica(8, (Stage((device,), (0, ACTOR.layers)),)), CAP_GB, SEQUENCES, MODEL) for device in GPUS
    )
    tasks = {**plan.tasks, ACTOR_GENERATION: replace(plan.tasks[ACTOR_GENERATION], replicas=replicas)}
    (directory / "plan.json").write_text(json.dumps(replace(plan, tasks=tasks).to_json()))
    (directory / "config.yaml").write_text(yaml.safe_dump(EXPERIMENT))  # its model is small: the plan counts here
    site = {"run": "r", "site": SITE, "lead_site": SITE, "bind": "tcp://127.0.0.1:9", "gpus": GPUS, "held": {SITE: 2}}
    (directory / "site.json").write_text(json.dumps({**site, "continues": [], "goes_on": False}))
    write_keys(directory / "keys.json", make_run_keys([SITE])[SITE])
    return read_context(directory)


def start_servers(directory: Path) -> None:
    """Make every server's command; fail where weights, cache and workspace are more than its GPU has."""
    context = site_of_two_servers(directory)
    for number, replica in enumerate(context.plan.tasks[ACTOR_GENERATION].replicas):
        command = command_of(settings_of(context, number, directory / str(number)), directory / "socket")
        asked = dict(pairwise(command))
        (shape,) = rollout_shapes(replica, MODEL)
        held = shape.parameters * 2 + int(asked["--kv-cache-memory-bytes"])
        held += serving_workspace_bytes(shape, int(asked["--max-num-seqs"]), MODEL.workload)
        usable = shape.rates.usable_gb * 1e9
        assert held <= usable * (1 + 1e-9), f"{replica.devices[0]}: {held:.4g} bytes of {usable:.4g}"


def test_every_server_fits_its_gpu(tmp_path: Path) -> None:
    start_servers(tmp_path)


def test_a_cap_that_is_not_cut_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "kv_cache_bytes", int(CAP_GB * 1e9))
    with pytest.raises(AssertionError, match=r"alpha/big/0: .* bytes of"):
        start_servers(tmp_path)
