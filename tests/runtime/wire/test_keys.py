from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.wire.keys import SiteKeys, make_run_keys, read_keys, write_keys

_ALPHA = SiteKeys(site="alpha", public="p" * 40, secret="s" * 40, peers={"beta": "q" * 40})


def test_keys_survive_a_file_that_only_the_owner_reads(tmp_path: Path) -> None:
    write_keys(tmp_path / "alpha.key", _ALPHA)
    assert stat.S_IMODE((tmp_path / "alpha.key").stat().st_mode) == 0o600
    assert read_keys(tmp_path / "alpha.key") == _ALPHA


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    write_keys(tmp_path / "alpha.key", _ALPHA)
    with pytest.raises(HetrlError, match="exists already"):
        write_keys(tmp_path / "alpha.key", _ALPHA)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    write_keys(tmp_path / "alpha.key", _ALPHA)
    (tmp_path / "alpha.key").chmod(mode)
    with pytest.raises(HetrlError, match="chmod 600"):
        read_keys(tmp_path / "alpha.key")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HetrlError, match=r"alpha\.key: cannot read the key file \(No such file"):
        read_keys(tmp_path / "alpha.key")


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "[]",
        "{}",
        '{"site": "alpha"',
        json.dumps({"site": 1, "public": "", "secret": "", "peers": {}}),
        json.dumps({"site": "alpha", "public": "p", "secret": "topsecret", "peers": {}}),
    ],
)
def test_another_file_is_refused_without_quoting_it(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "alpha.key"
    path.touch(0o600)
    path.write_text(raw)
    with pytest.raises(HetrlError, match="not a key file") as error:
        read_keys(path)
    assert "topsecret" not in str(error.value)
    assert error.value.__suppress_context__


def test_no_representation_shows_the_secret() -> None:
    assert _ALPHA.secret not in repr(_ALPHA)
    assert _ALPHA.secret not in f"{_ALPHA}"


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(HetrlError, match="install pyzmq"):
        make_run_keys(["alpha"])
