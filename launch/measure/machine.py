"""Measure this machine, derive the shares of the cost model, write a dated file of all of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from hetrl.describe.measured import Measured, Measurement, Skipped, file_name, gpu_of, write_measured
from hetrl.errors import HetrlError, UsageError
from hetrl.gpus import gpu_type
from launch.show import from_here, log_tail, telling_line

DIRECTORY = Path("topology/measured")
NOISY = 0.2  # distance of the quartiles over the median; an idle machine stays below a tenth
# A whole measurement takes minutes on a GPU, where loading the engines is most of it; what hangs is given up then.
DEADLINE_SECONDS = {"full": 900.0, "quick": 120.0}


@dataclass
class Collected:
    """What the measuring process has said so far."""

    device: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take up one line of `python -m hetrl.runtime.instruments.profile`."""
        if "kinds" in line:
            self.device, self.machine, self.software = line["device"], line["machine"], line["software"]
            self.unfinished = list(line["kinds"])
        elif "begin" in line:
            self.unfinished = self.unfinished[self.unfinished.index(line["begin"]) :]
        elif "measurement" in line:
            values = line["measurement"]
            self.measurements.append(Measurement(**{**values, "seconds": tuple(values["seconds"])}))
        elif "skipped" in line:
            self.skipped.append(Skipped(**line["skipped"]))
        else:
            self.unfinished = []


def profile_machine(arguments: argparse.Namespace) -> int:
    """Measure this machine; print the figures on stdout, write the file."""
    from hetrl.cost.efficiency import calibrated
    from hetrl.report.tables import measured_tables

    _check(arguments)
    now = datetime.now(UTC)
    collected = _collect(arguments)
    gpu = _gpu(arguments.gpu, collected)
    measured = derive(collected, gpu, now, _command(arguments))
    path = _path(arguments.out, str(measured.machine["host"]), gpu, now)
    if arguments.json:
        print(json.dumps(measured.to_json(), indent=2))
    else:
        Console().print(measured_tables(measured, calibrated().of(gpu)))
    if not measured.measurements:
        raise HetrlError(f"{measured.machine['host']}: nothing could be measured; the reasons are above")
    _warn_of_noise(measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_measured(path, measured)
    except OSError as error:
        raise HetrlError(
            f"{path}: cannot write what was measured ({error.strerror}); name a place with --out"
        ) from None
    print(f"the measurements are in {from_here(path)}", file=sys.stderr)
    return 0


def _warn_of_noise(measured: Measured) -> None:
    used = [one for one in measured.measurements if one.use != "record"]
    noisy = [one for one in used if one.spread > NOISY]
    if noisy:
        what = f"{len(noisy)} of {len(used)} layer times vary by more than {NOISY:.0%}"
        print(f"warning: {what}; is the machine busy? measure again when it is idle", file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    """Raise what can be known to fail before minutes of measuring."""
    from hetrl.workload import architecture

    if arguments.config is not None:
        raise UsageError(f"{arguments.config}: an experiment goes with --site NAME; without, this machine is measured")
    if arguments.gpu is not None:
        gpu_type(arguments.gpu, "--gpu: ")
    if arguments.architecture is not None:
        architecture(arguments.architecture)
    if importlib.util.find_spec("torch") is None:
        raise HetrlError(
            "torch is not installed here, and measures; `make setup` installs it for CPU, environment.yml for GPUs"
        )
    directory = _path(arguments.out, "host", "gpu", datetime.now(UTC)).parent.absolute()
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "no permission to write there" if existing.is_dir() else "not a directory"
        raise HetrlError(f"{existing}: {why}; name another place with --out")


def _command(arguments: argparse.Namespace) -> str:
    given = {"--gpu": arguments.gpu, "--architecture": arguments.architecture}
    words = [word for flag, value in given.items() if value for word in (flag, str(value))]
    return " ".join(["hetrl profile", *(["--quick"] if arguments.quick else []), *words])


def _path(out: Path | None, host: str, gpu: str, now: datetime) -> Path:
    if out is not None and out.suffix == ".json" and not out.is_dir():
        return out
    return (out or DIRECTORY) / file_name(host, gpu, now)


def _gpu(asked: str | None, collected: Collected) -> str:
    """Return the catalogue type of what was measured; UsageError where its driver's name says none."""
    if collected.device == "cpu":
        return "cpu"
    device = str(collected.machine["device"])
    found = asked or gpu_of(device)
    if found is None:
        raise UsageError(
            f'the GPU calls itself "{device}", which is no type of the catalogue; name the type with --gpu'
        )
    return found


def derive(collected: Collected, gpu: str, now: datetime, command: str) -> Measured:
    """Return the file's content: what was measured, and the shares and the link that follow from it.

    A share above 1 is left out with its reason: no GPU exceeds its data sheet, so the type is wrong, or a cache was
    measured. The catalogue's `cpu` is an estimate that a processor may well exceed.
    """
    from hetrl.measure.profile_fit import check_held_out, fit_exchange, fit_shares

    shares = fit_shares(collected.measurements, gpu)
    impossible = {phase: share for phase, share in shares.items() if share > 1 and gpu != "cpu"}
    why = "{:.2f} of the data sheet of {}; is the type right (--gpu)?"
    skipped = [Skipped(f"share in {phase}", why.format(share, gpu)) for phase, share in impossible.items()]
    kept = {phase: share for phase, share in shares.items() if phase not in impossible}
    return Measured(
        gpu=gpu,
        measured_at=now,
        command=command,
        machine=collected.machine,
        software=collected.software,
        measurements=tuple(collected.measurements),
        skipped=(*collected.skipped, *skipped),
        shares=kept,
        checks=check_held_out(collected.measurements, gpu, kept),
        exchange=fit_exchange(collected.measurements),
    )


def _collect(arguments: argparse.Namespace) -> Collected:
    """Run the measuring process to its end or to the deadline; raises HetrlError where it dies early."""
    pace = "quick" if arguments.quick else "full"
    seconds = DEADLINE_SECONDS[pace]
    collected, deadline = Collected(), time.monotonic() + seconds
    talk = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with talk.status("loading torch") as status, _measuring(_argv(arguments), log, seconds) as lines:
            for line in lines:
                collected.take(line)
                _stop_early(arguments, collected)
                status.update(f"measuring: {(collected.unfinished or ['done'])[0]}")
        if not collected.machine:
            raise HetrlError(f"the measuring process ended at its start: {telling_line(log_tail(log))}")
        ended = f"the measuring process ended: {telling_line(log_tail(log))}"
    why = f"the deadline of {seconds:g} s passed" if time.monotonic() >= deadline else ended
    collected.skipped += [Skipped(kind, why) for kind in collected.unfinished]
    return collected


def _stop_early(arguments: argparse.Namespace, collected: Collected) -> None:
    if collected.device is None:
        host = collected.machine["host"]
        raise UsageError(f"--gpu {arguments.gpu}: torch sees no CUDA device on {host}; `--gpu cpu` measures the CPU")
    _gpu(arguments.gpu, collected)


def _argv(arguments: argparse.Namespace) -> list[str]:
    device = "auto" if arguments.gpu is None else ("cpu" if arguments.gpu == "cpu" else "cuda")
    words = ["--device", device]
    words += ["--quick"] if arguments.quick else []
    words += ["--architecture", arguments.architecture] if arguments.architecture else []
    return [sys.executable, "-m", "hetrl.runtime.instruments.profile", *words]


@contextmanager
def _measuring(argv: Sequence[str], log: Path, seconds: float) -> Iterator[Iterator[Mapping[str, Any]]]:
    """Give the lines of the measuring process; at the end, and after so many seconds, all its processes are ended."""
    with log.open("wb") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)  # whoever reads the lines waits for the next one, and sees no clock
    timer.start()
    assert process.stdout is not None
    try:
        yield (json.loads(line) for line in process.stdout if line.endswith("\n"))  # a part of one: it was ended
    finally:
        timer.cancel()
        end()
        process.stdout.close()
        process.wait()
