"""The command line `hetrl VERB`: each verb names the function that does it.

stdout is data, stderr is talk.

Exit codes: 0 ok, 1 failure, 2 usage, 3 no feasible plan, 4 site unreachable, 5 partial, 6 gang timeout,
7 time is up, 130 cancelled.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from hetrl.errors import HetrlError
from launch.verbs.arguments import at_least_one, count, positive, share
from launch.verbs.ask import add_calibration, add_questions

_Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

USAGE, INTERRUPTED = 2, 130
OBJECTIVES = ("throughput", "cost", "time-to-result")
SOLVERS = {  # one line each; docs/planner.md, docs/ilp.md and docs/baselines.md have the rest
    "sha-ea": "successive halving over groupings, evolution below: the default",
    "ilp": "an integer program in a smaller space, with a bound: small cases",
    "verl": "baseline: all tasks on all GPUs, one uniform layout",
    "verl-expert": "baseline: as verl, on the hosts and in the order an expert takes",
    "streamrl": "baseline: generation apart from the rest, each uniform",
    "areal-hex": "baseline: generation apart, a MILP and graph partitioning",
    "deap": "baseline: a plain evolutionary search with the DEAP library",
    "random": "baseline: the best of random plans",
}
_WHAT_IFS = "plan again for other hardware, so many seconds each (3)"
_BUDGETS = "plan again for other prices per hour, so many seconds each (3)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; an error is one short message on stderr."""
    if not (sys.argv[1:] if argv is None else argv):
        parser().print_help(sys.stderr)
        return USAGE
    arguments = parser().parse_args(argv)
    # Imported only now, so that --help does not wait for what a verb needs.
    module, function = arguments.command.split(":")
    try:
        return int(getattr(importlib.import_module(module), function)(arguments))
    except HetrlError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'input or output'}: {error.strerror}", 1)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        return _complain(f"this is a defect of hetrl: {type(error).__name__}: {error} ({where})", 1)


def _complain(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    top = argparse.ArgumentParser(prog="hetrl", description="One RL post-training of an LLM over several sites.")
    top.add_argument("--version", action="version", version=f"hetrl {_version()}")
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for add in (_add_planning, _add_measuring, _add_reading, _add_starting, _add_running, _add_changing, _add_kept):
        add(verbs)
    return top


def _add_planning(verbs: _Verbs) -> None:
    """Add the verbs that predict."""
    plan = _verb(verbs, "plan", "launch.verbs.planning:plan_command", "print the plan of an experiment")
    plan.formatter_class = argparse.RawDescriptionHelpFormatter
    plan.epilog = "solvers:\n" + "\n".join(f"  {name:<12} {text}" for name, text in SOLVERS.items())
    plan.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    plan.add_argument("--json", action="store_true", help="print the plan file instead of a table")
    plan.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the plan file there too")
    plan.add_argument("--solver", help="instead of planner.solver")
    plan.add_argument("--seed", type=count, help="instead of planner.seed")
    plan.add_argument("--budget", dest="budget_seconds", metavar="SECONDS", type=positive, help="of the search")
    plan.add_argument("--evaluations", metavar="N", type=count, help="of sha-ea, for a plan that can be repeated")
    plan.add_argument("--processes", metavar="N", type=count, help="that sha-ea searches in, instead of one")
    plan.add_argument("--objective", choices=OBJECTIVES, help="instead of planner.objective")
    plan.add_argument("--budget-per-hour", metavar="PRICE", type=positive, help="the most throughput for that price")
    plan.add_argument(
        "--at-least",
        "--min-samples-per-second",
        dest="min_samples_per_second",
        metavar="RATE",
        type=positive,
        help="the least cost at so many samples per second",
    )
    plan.add_argument(
        "--max-iteration-seconds", metavar="SECONDS", type=positive, help="the same, as an iteration's time"
    )
    plan.add_argument("--budget-gpu-hours", metavar="HOURS", type=positive, help="of the run, for time-to-result")
    plan.add_argument("--space", choices=("full", "ilp"), default="full", help="keep sha-ea to the plan space of ilp")

    predict = _verb(verbs, "predict", "launch.verbs.ask:predict_command", "answer one question: how fast, does it fit")
    add_questions(predict)
    add_calibration(
        _verb(verbs, "calibrate", "launch.verbs.ask:calibrate_command", "fit the efficiencies to measurements")
    )


def _add_measuring(verbs: _Verbs) -> None:
    """Add the verbs that measure machines and links."""
    profile = _verb(verbs, "profile", "launch.measure.verbs:profile_command", "measure this machine for the cost model")
    profile.add_argument("--gpu", metavar="TYPE", help="catalogue type of the device (default: by its driver's name)")
    profile.add_argument("--out", metavar="PATH", type=Path, help="file or directory (default: topology/measured)")
    profile.add_argument("--quick", action="store_true", help="fewer repetitions, and not the engines")
    profile.add_argument("--architecture", metavar="MODEL", help="whose layer (qwen3-8b on a GPU, qwen3-0.6b on a CPU)")
    profile.add_argument("--json", action="store_true", help="print the file instead of tables")

    profile.add_argument("--site", metavar="NAME", help="measure a node of each GPU type there, by jobs")
    profile.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="experiment file with that site")

    probe = _verb(
        verbs, "probe", "launch.measure.verbs:probe_command", "measure the links between the sites of an experiment"
    )
    probe.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    probe.add_argument("--gpus", action="store_true", help="run `hetrl profile` on a node of each GPU type, too")
    probe.add_argument("--quick", action="store_true", help="of `hetrl profile`")
    probe.add_argument("--streams", metavar="N", type=at_least_one, action="append", help="number of streams (1, 4, 8)")
    probe.add_argument("--seconds", type=positive, default=4.0, help="of full load each (default %(default)g)")
    probe.add_argument("--round-trips", metavar="N", type=at_least_one, default=50, help="each (default %(default)s)")
    probe.add_argument("--wait", metavar="SECONDS", type=positive, help="for the jobs to start (launch.queue_timeout)")
    probe.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("topology/measured"))
    probe.add_argument("--json", action="store_true", help="print the file instead of tables")

    remote = _verb(
        verbs, "remote-task", "launch.measure.remote_task:remote_task_command", "start tasks at a site (for hetrl)"
    )
    remote.add_argument("file", metavar="FILE", type=Path, help="tasks.json, as hetrl writes it")


def _add_reading(verbs: _Verbs) -> None:
    """Add the verbs that look at a plan."""
    simulate = _verb(verbs, "simulate", "launch.verbs.simulate:simulate_command", "play a plan event by event")
    simulate.add_argument("plan", metavar="PLAN", type=Path, help="plan file, as `hetrl plan -o` writes it")
    simulate.add_argument("--config", metavar="CONFIG", type=Path, required=True, help="its experiment file (YAML)")
    simulate.add_argument("--trace", metavar="FILE", type=Path, help="write a Chrome trace there (opens in Perfetto)")
    simulate.add_argument("--seed", type=count, default=0, help="of the response lengths (default 0)")
    simulate.add_argument("--iterations", type=count, default=0, help="to play (default 0: until they are steady)")
    simulate.add_argument("--noise", metavar="SHARE", type=share, default=0.0, help="of rates and lengths (default 0)")
    simulate.add_argument("--json", action="store_true", help="print the seconds as JSON")

    explain = _verb(verbs, "explain", "launch.verbs.explain:explain_command", "say why a plan is as it is")
    explain.add_argument("plan", metavar="PLAN", type=Path, help="plan file, as `hetrl plan -o` writes it")
    explain.add_argument(
        "--config", metavar="CONFIG", type=Path, help="its experiment (default: config.yaml beside it)"
    )
    explain.add_argument("--what-ifs", metavar="SECONDS", type=positive, nargs="?", const=3.0, help=_WHAT_IFS)
    explain.add_argument("--budgets", metavar="SECONDS", type=positive, nargs="?", const=3.0, help=_BUDGETS)
    explain.add_argument("--html", metavar="FILE", type=Path, help="write the page of the plan there")
    explain.add_argument("--play", action="store_true", help="draw an iteration on the page as it is simulated")
    explain.add_argument("--seed", type=count, default=0, help="of what-ifs, budgets and simulation (default 0)")
    explain.add_argument("--json", action="store_true", help="print the explanation as JSON")


def _add_starting(verbs: _Verbs) -> None:
    """Add the verbs from an inventory to a submission."""
    discover = _verb(verbs, "discover", "launch.slurm.discover:discover_command", "read what each cluster has")
    discover.add_argument("sites", metavar="SITE", type=Path, nargs="+", help="site file (topology/sites/NAME.yaml)")
    discover.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("topology/measured"))
    discover.add_argument("--json", action="store_true", help="print the inventories as JSON")

    doctor = _verb(
        verbs, "doctor", "launch.verbs.doctor:doctor_command", "ask every site whether a run could start there"
    )
    doctor.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    doctor.add_argument("--deep", action="store_true", help="by a short job on a node of each GPU type, too")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")

    rehearse = _verb(
        verbs, "rehearse", "launch.verbs.rehearse:rehearse_command", "run an experiment with emulated engines"
    )
    rehearse.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    where = rehearse.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="all sites on this machine (the default)")
    where.add_argument("--at-sites", action="store_true", help="a job of one core at each site, over the real links")
    rehearse.add_argument("--plan", metavar="FILE", type=Path, help="rehearse this plan instead of planning")
    rehearse.add_argument("--steps", metavar="N", type=at_least_one, help="to take (default: 4 that count)")
    rehearse.add_argument(
        "--speed", metavar="FACTOR", type=positive, help="of time (default: 90 seconds for all steps)"
    )
    rehearse.add_argument(
        "--bytes-share", metavar="SHARE", type=positive, help="of the bytes that cross (default: few)"
    )
    rehearse.add_argument("--noise", metavar="SHARE", type=share, default=0.1, help="of rates and lengths (0.1)")
    rehearse.add_argument("--json", action="store_true", help="print the seconds as JSON")

    submit = _verb(verbs, "submit", "launch.verbs.submit:submit_command", "plan an experiment, start it, follow it")
    submit.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    submit.add_argument("--plan", metavar="FILE", type=Path, help="start this plan instead of planning")
    submit.add_argument("--yes", action="store_true", help="ask nothing: Ctrl-C stops a local run at once")
    submit.add_argument("--detach", action="store_true", help="end once the jobs of all Slurm sites are accepted")
    submit.add_argument("--dry-run", action="store_true", help="write the run directory and start nothing")


def _add_running(verbs: _Verbs) -> None:
    """Add the verbs for what runs."""
    status = _verb(verbs, "status", "launch.verbs.runs:status_command", "where a run stands")
    _add_run(status)
    status.add_argument("--json", action="store_true", help="print the state as JSON")

    logs = _verb(verbs, "logs", "launch.verbs.logs:logs_command", "what the processes of a run printed")
    _add_run(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    logs.add_argument("--site", help="only this site")
    logs.add_argument("--process", help="only this process, as actor_training-0")
    logs.add_argument("-n", "--lines", type=count, default=20, help="last lines of each log (default 20)")

    relay = _verb(verbs, "relay", "launch.verbs.relay:relay_command", "connect sites that cannot dial each other")
    relay.add_argument("--listen", metavar="HOST:PORT", required=True, help="where the sites reach this host")
    relay.add_argument("--secret", metavar="FILE", type=Path, help="default: ~/.config/hetrl/relay.secret")
    relay.add_argument("--connections", type=count, default=512, help="of gateways, at once (default %(default)s)")
    relay.add_argument("--per-address", type=count, default=128, help="of them from one address (default %(default)s)")


def _add_changing(verbs: _Verbs) -> None:
    """Add the verbs that change what runs."""
    resume = _verb(
        verbs, "resume", "launch.verbs.resume:resume_command", "follow a run again, or go on where one ended"
    )
    _add_run(resume)
    resume.add_argument(
        "--config", metavar="CONFIG", type=Path, help="the experiment as it shall be (default: as it was)"
    )
    plans = resume.add_mutually_exclusive_group()
    plans.add_argument("--plan", metavar="FILE", type=Path, help="go on by this plan (default: that of the run)")
    plans.add_argument("--replan", action="store_true", help="go on by a plan made for the sites as they are")
    resume.add_argument(
        "--without", metavar="SITE", action="append", default=[], help="that does not come back; plan for the others"
    )
    resume.add_argument("--yes", action="store_true", help="ask nothing")
    resume.add_argument("--detach", action="store_true", help="submit what is missing, and follow nothing")

    for name, text in (
        ("release", "give the GPUs of a site's rollouts back; the run goes on without"),
        ("add", "submit a site's rollouts again, once they have ended; they join the run"),
    ):
        verb = _verb(verbs, name, f"launch.verbs.elastic:{name}_command", text)
        verb.add_argument("site", metavar="SITE", help="of the run's")
        _add_run(verb)

    cancel = _verb(verbs, "cancel", "launch.verbs.runs:cancel_command", "end a run and all its processes")
    _add_run(cancel)


def _add_kept(verbs: _Verbs) -> None:
    """Add the verbs for checkpoints."""
    checkpoints = _verb(
        verbs, "checkpoints", "launch.verbs.checkpoints:checkpoints_command", "which checkpoints of a run are where"
    )
    _add_run(checkpoints)
    checkpoints.add_argument("--json", action="store_true", help="print them as JSON")

    export = _verb(
        verbs,
        "export",
        "launch.verbs.checkpoints:export_command",
        "copy the model of a checkpoint, as Hugging Face has it",
    )
    export.add_argument("run", metavar="RUN", help="id or directory of a run")
    export.add_argument("--step", metavar="N", type=count, help="of which step (default: the last)")
    export.add_argument("directory", metavar="DIR", help="a directory that is not there yet")


def _verb(verbs: _Verbs, name: str, command: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(command=command)
    return verb


def _add_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run", metavar="RUN", nargs="?", help="id or directory of a run (default: the latest)")


def _version() -> str:
    try:
        return metadata.version("hetrl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
