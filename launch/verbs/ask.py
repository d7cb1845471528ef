"""`hetrl predict` and `hetrl calibrate`: questions to the cost model, and where its numbers come from."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetrl.cost.efficiency import Efficiencies
    from hetrl.hardware import Topology
    from hetrl.measure.points import Residual
    from hetrl.questions.answer import Answer

_SERVING = ("architecture", "gpu", "tp")
TASKS: dict[str, tuple[str, ...]] = {  # task -> its options
    "generation": (*_SERVING, "pp", "batch", "prompt", "response", "engine"),
    "decode-layer": (*_SERVING, "batch", "context"),
    "prefill-layer": (*_SERVING, "tokens", "context"),
    "training": (
        *("architecture", "gpu", "gpus", "sequence", "samples", "tp", "pp", "dp", "micro_batch", "recompute"),
        *("sharding", "offload", "gradient_dtype", "trainer", "optimizer_dtype", "node_gpus", "nic_gbps"),
    ),
    "inference": (*_SERVING, "pp", "samples", "sequence", "micro_batch"),
    "weight-sync": ("architecture", "topology", "source", "target", "encoding", "changed"),
}
_REQUIRED = {
    "prefill-layer": ("tokens",),
    "training": ("gpus", "sequence"),
    "weight-sync": ("topology", "source", "target"),
}
_FLAGS = {"source": "--from", "target": "--to"}


def add_questions(verb: argparse.ArgumentParser) -> None:
    """Add the options of `hetrl predict`."""
    verb.add_argument("--task", required=True, choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    verb.add_argument("--architecture", metavar="MODEL", help="catalogue name, or a directory with a config.json")
    verb.add_argument("--gpu", metavar="TYPE", help="GPU type of the catalogue")
    for name, text in _NUMBERS.items():
        verb.add_argument(f"--{name}", metavar="N", type=int, help=text)
    verb.add_argument("--context", metavar="TOKENS", type=float, help="tokens per sequence of a layer (880)")
    verb.add_argument("--engine", help="release whose speed counts, as vllm-0.6")
    verb.add_argument("--recompute", choices=("none", "full"), help="activations, in training")
    verb.add_argument("--sharding", choices=("none", "optimizer", "full"), help="full: FSDP; optimizer: ZeRO-1")
    verb.add_argument("--offload", choices=("none", "optimizer", "all"), help="to host memory, in training")
    verb.add_argument("--gradient-dtype", choices=("fp32", "bf16"), help="what the reduction sends")
    verb.add_argument("--trainer", help="whose speed counts, as torchtitan (hetrl's own: Megatron-core)")
    verb.add_argument("--optimizer-dtype", choices=("fp32", "bf16"), help="of Adam's state; bf16 has no master")
    verb.add_argument("--nic-gbps", type=float, help="network of a node, one direction")
    verb.add_argument("--topology", type=Path, nargs="+", metavar="FILE", help="a scenario, or sites and a links file")
    verb.add_argument("--from", dest="source", nargs="+", metavar="SITE", help="sites that train")
    verb.add_argument("--to", dest="target", nargs="+", metavar="SITE", help="sites that generate")
    verb.add_argument("--encoding", choices=("full", "delta"), help="of a weight version (full)")
    verb.add_argument("--changed", type=float, metavar="SHARE", help="share of weights that a delta carries")
    verb.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help="of `hetrl profile`, or directories")
    verb.add_argument("--json", action="store_true", help="print the answer as JSON")


_NUMBERS = {
    "tp": "tensor-parallel GPUs",
    "pp": "pipeline stages",
    "dp": "data-parallel replicas",
    "gpus": "GPUs of a training",
    "node-gpus": "GPUs of a node (8)",
    "batch": "sequences at once",
    "prompt": "prompt tokens of each sequence",
    "response": "response tokens of each sequence",
    "tokens": "tokens of a prefill",
    "sequence": "tokens of a training or inference sequence",
    "samples": "sequences of an optimiser step or of an inference",
    "micro-batch": "sequences of a micro-batch",
}


def add_calibration(verb: argparse.ArgumentParser) -> None:
    """Add the options of `hetrl calibrate`."""
    verb.add_argument("--points", type=Path, metavar="FILE", help="measurements (default: those of the catalogue)")
    verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there (default: into the catalogue)")


def predict_command(arguments: argparse.Namespace) -> int:
    """Print the answer to one question as a table or JSON."""
    found = answer(arguments)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(table(found))
    return 0


def _efficiencies(files: Sequence[Path] | None) -> Efficiencies:
    """Return the calibrated efficiencies, with those of measured files before them; warns of old files."""
    from hetrl.cost.efficiency import calibrated
    from hetrl.describe.measured import Measured, merge
    from hetrl.describe.measured_files import read_all
    from launch.verbs.planning import warn_of_stale

    if not files:
        return calibrated()
    found = read_all(files)
    warn_of_stale(found)
    return calibrated().with_measured(merge(one for one in found.values() if isinstance(one, Measured)))


def answer(arguments: argparse.Namespace) -> Answer:
    """Return the answer; raises UsageError for options that the task does not take, or lacks."""
    from hetrl.questions import serving
    from hetrl.questions.step import SoloTraining
    from hetrl.questions.training import training
    from hetrl.questions.weight_sync import weight_sync
    from hetrl.workload import architecture

    asked = _asked(arguments) | {"efficiencies": _efficiencies(arguments.measured)}
    asked["model"] = architecture(asked.pop("architecture"))
    if arguments.task == "training":
        names = {"model": "architecture", "tp": "tensor", "pp": "pipeline", "dp": "data"}
        return training(SoloTraining(**{names.get(name, name): value for name, value in asked.items()}))
    if arguments.task == "weight-sync":
        asked["topology"] = _topology(asked["topology"])
        names = {"source": "sources", "target": "targets"}
        return weight_sync(**{names.get(name, name): value for name, value in asked.items()})
    if arguments.task == "prefill-layer" and "context" in asked:
        asked["sequence"] = asked.pop("context")
    functions: dict[str, Callable[..., Answer]] = {
        "generation": serving.generation,
        "decode-layer": serving.decode_layer,
        "prefill-layer": serving.prefill_layer,
        "inference": serving.inference,
    }
    return functions[arguments.task](**asked)


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by their names."""
    from hetrl.errors import UsageError

    known = TASKS[arguments.task]
    given = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in ("task", "measured", "json", "command")
    }
    for name in given:
        if name not in known:
            takes = ", ".join(map(_flag, known))
            raise UsageError(f"--task {arguments.task} does not take {_flag(name)}; it takes {takes}")
    first = ("architecture",) if arguments.task == "weight-sync" else ("architecture", "gpu")
    for name in (*first, *_REQUIRED.get(arguments.task, ())):
        if name not in given:
            raise UsageError(f"--task {arguments.task} needs {_flag(name)}")
    return given


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _topology(paths: Sequence[Path]) -> Topology:
    """Read one scenario, or site files with a links file among them."""
    import yaml

    from hetrl.describe.sites import read_scenario, read_sites, topology_of
    from hetrl.errors import UsageError

    keys = {}
    for path in paths:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--topology {path}: {getattr(error, 'strerror', None) or 'not YAML'}") from None
        keys[path] = set(found) if isinstance(found, dict) else set()
    if len(paths) == 1 and "sites" in keys[paths[0]]:
        return topology_of(read_scenario(paths[0]))
    links = [path for path in paths if keys[path] == {"links"}]
    if len(links) > 1:
        raise UsageError(f"--topology: {' and '.join(map(str, links))} are both links files; give one")
    return topology_of(read_sites([path for path in paths if path not in links], links[0] if links else None))


def table(found: Answer) -> str:
    """Return an answer as aligned text."""
    from launch.show import columns

    values = found.to_json()
    rows = [["seconds", _figure(found.seconds)]]
    if found.tokens:
        rows.append(["tokens/s", _figure(values["tokens_per_second"])])
    if found.tokens and found.gpus > 1:
        rows.append(["tokens/s per GPU", _figure(values["tokens_per_second_per_gpu"])])
    for name, seconds in sorted(found.breakdown.items(), key=lambda part: -part[1]):
        rows.append([f"  {name}", f"{_figure(seconds)}  ({seconds / found.seconds:.0%})"])
    rows.append(["binds", found.binds])
    rows.append(
        ["memory", f"{found.memory_gb:.1f} of {found.usable_gb:.1f} GB: {'fits' if found.fits else 'too much'}"]
    )
    for name, value in found.details.items():
        rows.append([name.replace("_", " "), _figure(value) if isinstance(value, float) else str(value)])
    rows.append(["calibrated", _basis(found)])
    return columns(rows)


def _basis(found: Answer) -> str:
    """Return where the efficiencies behind an answer come from."""
    missing, measured = (
        ", ".join(f"{gpu} ({', '.join(phases)})" for gpu, phases in source.items())
        for source in (found.uncalibrated, found.measured)
    )
    said = f"no: inferred for {missing}" if missing else "yes"
    return said if not measured else f"measured: {measured}" + (f"; {said}" if missing else "")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def calibrate_command(arguments: argparse.Namespace) -> int:
    """Fit the efficiencies, write the file, print the residuals."""
    from importlib import resources

    from hetrl.cost.efficiency import FILE
    from hetrl.errors import HetrlError
    from hetrl.measure.calibrate import document, fit, rounded
    from hetrl.measure.points import read_points, residuals

    points = read_points(arguments.points)
    numbers = rounded(fit(points))
    found = residuals(points, numbers)
    output = arguments.output or Path(str(resources.files("hetrl.catalogue").joinpath(FILE)))
    try:
        output.write_text(document(numbers, found))
    except OSError as error:
        raise HetrlError(f"{output}: cannot write the fitted numbers ({error.strerror}); name a file with -o") from None
    print(residual_table(found))
    print(f"the fitted numbers are in {output}", file=sys.stderr)
    return 0


def residual_table(found: Sequence[Residual]) -> str:
    """Return the points with what was measured, what is predicted and the error, then median and worst."""
    from launch.show import columns

    rows = [["point", "unit", "measured", "predicted", "error"]]
    for one in found:
        figures = [_figure(one.point.value), _figure(one.predicted), f"{one.error:+.1%}"]
        rows.append([one.point.name, one.point.measure, *figures])
    errors = [abs(one.error) for one in found]
    return f"{columns(rows)}\nmedian {statistics.median(errors):.1%}, worst {max(errors):.1%}"
