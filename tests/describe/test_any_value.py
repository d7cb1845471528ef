"""Whatever value a key of an experiment, a site or a link has: the files are read, or an error says what is wrong."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings, strategies as st

from hetrl.describe.experiment import Experiment
from hetrl.describe.links import LinksFile
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError
from hetrl.problem import read_problem
from tests.describe.described_keys import Key, keys

SITES: dict[str, Any] = {
    name: {"name": name, "nodes": [{"name": "n", "gpu": "a100-40gb", "gpus": 2}]} for name in ("alps", "jsc")
}
LINKS: dict[str, Any] = {"links": [{"between": ["alps", "jsc"], "delay_ms": 12.5, "gbps": 5}]}
EXPERIMENT: dict[str, Any] = {
    "name": "try",
    "model": {"architecture": "qwen3-0.6b"},
    "data": {"kind": "larger-digit"},
    "batch": {"samples": 64, "prompt_tokens": 16, "response_tokens": 32},
    "steps": 3,
    "topology": {"sites": ["alps.yaml", "jsc.yaml"], "links": "links.yaml"},
}
FILES: dict[str, Any] = {"experiment": EXPERIMENT, **SITES, "links": LINKS}

LIKELY = (
    "ppo",
    "async",
    "model",
    "both",
    "qwen3-8b",
    "l4",
    "vllm",
    "direct",
    "relay",
    "lognormal",
    "00:10:00",
    "99:99:99",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 9),
    st.floats(),
    st.sampled_from(LIKELY),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner), max_leaves=4
)


KEYS = sorted(
    {
        *(("experiment", *key) for key in keys(Experiment)),
        *((site, *key) for site in SITES for key in keys(SiteFile)),
        *(("links", *key) for key in keys(LinksFile)),
    },
    key=str,
)


def put(document: Any, key: Key, value: object) -> None:
    """Set the value of a key where the document has, or may have, the section that it is in."""
    for part in key[:-1]:
        if isinstance(document, list) and not (isinstance(part, int) and part < len(document)):
            return
        document = document.setdefault(part, {}) if isinstance(document, dict) else document[part]
        if not isinstance(document, (dict, list)):
            return
    if isinstance(document, dict) or (isinstance(key[-1], int) and key[-1] < len(document)):
        document[key[-1]] = value


@settings(max_examples=600, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
def test_files_are_read_or_the_error_is_ours(changes: list[tuple[Key, object]]) -> None:
    files = deepcopy(FILES)
    for (name, *key), value in changes:
        put(files[str(name)], tuple(key), value)
    with tempfile.TemporaryDirectory() as work:
        for name, document in files.items():
            (Path(work) / f"{name}.yaml").write_text(yaml.safe_dump(document))
        try:
            problem = read_problem(Path(work) / "experiment.yaml")
        except HetrlError as error:
            assert str(error)
        else:
            assert problem.topology.devices and problem.workload.samples
