"""`hetrl resume`: follow a run again that goes on without a launcher, or go on where one ended, in a run of its own.

a run that this launcher followed has failed, or its time was up: the same of it, up to `launch.restarts` times
not where what it was given is wrong, or where it took no step: another start would end likewise
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from hetrl.describe.experiment import Experiment
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError, PartialError, SiteUnreachableError, TimeUpError, UsageError
from hetrl.files import EventLog, read_lines, replace_json
from hetrl.plan.document import read_plan
from hetrl.plan.plan import Plan
from hetrl.problem import without
from hetrl.runtime.checkpoints.files import METRICS_BEFORE, TAKES_UP
from hetrl.runtime.run.support import check_runnable
from hetrl.workload import ACTOR_TRAINING
from launch.executor import HERE, SLURM, ExecutorName, Prepared, choose_executor
from launch.follow import Outcome
from launch.life import Manner, begin, bring_up, only_launcher
from launch.local import carrying, processes_of, stop_processes
from launch.render import check_startable
from launch.run_directory import Run, find_run
from launch.screen import say
from launch.slurm.executor import SlurmExecutor
from launch.slurm.handing_on import not_taken
from launch.slurm.run import SlurmRun, read_slurm_run
from launch.slurm.watch import cancel_everywhere, refresh
from launch.state import CANCELLED, FINISHED, State
from launch.verbs.checkpoints import everywhere, history_of, trained_at
from launch.verbs.planning import given_plan, print_plan, problem_at, solve_problem
from launch.verbs.prepare import prepare
from launch.verbs.runs import current_state
from launch.verbs.stored import Stored, newest_of

LEFT_OUT_SECONDS, LOOK_AGAIN_SECONDS = 30.0, 5.0  # of silence
ANSWER_SECONDS, AGAIN_SECONDS = 3600.0, 60.0  # a run that nobody watches outlives the maintenance of a login node
_Made = TypeVar("_Made")
# How a run may end that another start of it may mend: by a process, a node, a site, with nodes that it still has; or
# by the time that it was given.
_MENDED_THERE = (HetrlError.exit_code, SiteUnreachableError.exit_code)
_MENDED = (*_MENDED_THERE, TimeUpError.exit_code)


@dataclass(frozen=True)
class _Wanted:
    """What a run that goes on has of its own: an experiment, a plan, none of some sites."""

    config: Path | None = None
    plan: Path | None = None
    replan: bool = False
    without: tuple[str, ...] = ()


def resume_command(arguments: argparse.Namespace) -> int:
    """Take a run up where the last launcher, or the run itself, left it; returns the exit code of its end."""
    run = find_run(arguments.run)
    slurm, state = read_slurm_run(run), current_state(run)
    check_detach(arguments.detach, HERE if slurm is None else SLURM)
    changed = arguments.config is not None or arguments.plan is not None or arguments.replan
    if slurm is not None and not state.ended and changed and not arguments.without:
        state = _ended_by_now(run, slurm)
    if slurm is not None and not state.ended and not arguments.without:
        plan = read_plan(run.path / "plan.json")
        console = Console()
        manner = _manner(run, _allowed(run), detach=arguments.detach)
        code = bring_up(run, plan, partial(SlurmExecutor, run, slurm), console, manner)
        return _restarted(run, code, console, run.path / "config.yaml")
    if slurm is None:
        left = _end_local(run, state)
    else:
        with only_launcher(run):
            left = _end_jobs(run, slurm, state, arguments.without)
    if state.phase == FINISHED and arguments.config is None:
        print(f"{left}; --config EXPERIMENT with more steps goes on from it")
        return 0
    console, wanted = Console(), _Wanted(arguments.config, arguments.plan, arguments.replan, tuple(arguments.without))
    prepared, plan = _go_on(run, slurm, wanted, console)
    config = arguments.config or run.path / "config.yaml"
    return begin_and_restart(prepared, plan, config, console, yes=arguments.yes, detach=arguments.detach)


def check_detach(detach: bool, executor: ExecutorName) -> None:
    """Raise UsageError where nobody is to follow a run that ends with its launcher."""
    if detach and executor != SLURM:
        raise UsageError("--detach: these sites are this machine, where a run ends with its launcher; leave it out")


def _ended_by_now(run: Run, slurm: SlurmRun) -> State:
    """Return the state of a run that nobody followed to its end; raises UsageError where it has none yet."""
    state = refresh(run, slurm, "resume")
    if not state.ended:
        raise UsageError(
            f"{run.id}: it has not ended; `hetrl cancel {run.id}` first, or leave --config, --plan and --replan out "
            "to follow it"
        )
    return state


def begin_and_restart(
    prepared: Prepared, plan: Plan, config: Path, console: Console, *, yes: bool, detach: bool
) -> int:
    """Start the run of an experiment file, follow it, and take it up again where that helps.

    Returns the exit code of the last end.
    """
    manner = _manner(prepared.run, _allowed(prepared.run), yes=yes, detach=detach)
    code = begin(prepared, plan, console, manner)
    return _restarted(prepared.run, code, console, config)


def _restarted(run: Run, code: int, console: Console, config: Path) -> int:
    """Take a run up that ended with this code, and what goes on from it, as often as its experiment allows.

    Names in `config` are relative to where it lies, while it says what the run has of it.
    """
    kept = run.path / "config.yaml"
    allowed = _allowed(run)
    for number in range(1, allowed + 1):
        state = current_state(run)
        if state.phase != "failed" or state.exit_code not in _MENDED or not _took_steps(run):
            break
        say(console, f"{run.id} is taken up again, {number} of at most {allowed} times (launch.restarts)")
        same = config.exists() and config.read_bytes() == kept.read_bytes()
        with only_launcher(run):  # nobody else takes it up, as long as what goes on from it does
            prepared, plan = _again(run, config if same else kept, console)
            manner = _manner(prepared.run, allowed - number, yes=True)
            code = begin(_unless_cancelled(run, patient(prepared)), plan, console, manner)
        run = prepared.run
    return code


def _unless_cancelled(run: Run, prepared: Prepared) -> Prepared:
    """Return what goes on from a run; it is not submitted where `hetrl cancel` was said of that one meanwhile."""

    def agree(console: Console, yes: bool) -> bool:
        agreed = prepared.agree(console, yes)
        if any(event["kind"] == CANCELLED for event in read_lines(run.events)):
            raise HetrlError(f"{run.id} was cancelled: {prepared.run.id} is not submitted")
        return agreed

    return replace(prepared, agree=agree)


def _again(run: Run, config: Path, console: Console) -> tuple[Prepared, Plan]:
    """Make the run that takes up one that failed, once its sites answer, without those that stay silent.

    Nothing is left of the one that failed but jobs that hold their nodes for this one.
    """
    if (slurm := read_slurm_run(run)) is None:
        return _go_on(run, None, _Wanted(config), console)
    state = once_all_answer(partial(refresh, run, slurm, "resume"))
    lost = tuple(state.silent)
    holds = state.exit_code in _MENDED_THERE
    try:
        made = _go_on(run, slurm, _Wanted(config, without=lost), console, holding=run if holds else None)
    except BaseException:
        cancel_everywhere(slurm)
        raise
    taken = read_slurm_run(made[0].run)
    rest = not_taken(slurm, taken) if taken else slurm
    once_sites_answer(partial(_end_jobs, run, rest, state, lost), console)
    return made


def _allowed(run: Run) -> int:
    return read_yaml(run.path / "config.yaml", Experiment).launch.restarts


def _manner(run: Run, attempts: int, *, yes: bool = False, detach: bool = False) -> Manner:
    """Follow a run whose jobs keep their nodes where it failed, and another one of so many starts may mend that."""

    def keep(outcome: Outcome) -> bool:
        mends = outcome.phase == "failed" and outcome.exit_code in _MENDED_THERE and attempts > 0
        return mends and run.slurm.exists() and _took_steps(run)

    return Manner(yes, detach, keep)


def once_all_answer(look: Callable[[], State]) -> State:
    """Return a run's state when no site is silent, or as it is a while later: those that are still silent are lost."""
    deadline = time.monotonic() + LEFT_OUT_SECONDS
    while (state := look()).silent and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_SECONDS)
    return state


def once_sites_answer(ask: Callable[[], _Made], console: Console) -> _Made:
    """Return what `ask` does, which asks sites; it is called again, for an hour, where one of them does not answer."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return ask()
        except (SiteUnreachableError, PartialError) as error:
            if time.monotonic() > deadline:
                raise
            say(console, f"{error}; trying again in {AGAIN_SECONDS:g} s, Ctrl-C ends this")
            time.sleep(AGAIN_SECONDS)


def patient(prepared: Prepared) -> Prepared:
    """Return a run whose sites are asked again, before it is started, where one of them does not answer."""

    def agree(console: Console, yes: bool) -> bool:
        return once_sites_answer(partial(prepared.agree, console, yes), console)

    return replace(prepared, agree=agree)


def _took_steps(run: Run) -> bool:
    return any(event["kind"] == "step" for event in read_lines(run.events))


def _end_local(run: Run, state: State) -> str:
    """See that nothing of a run lives on here; raises UsageError where something does.

    What is left of one that has ended, its gateways, had to be ended by a launcher that is gone.
    """
    launcher = processes_of([state.launcher] if state.launcher else [])
    left = processes_of(state.processes)
    if state.ended and not launcher:
        stop_processes(run, left)
    elif launcher or left or carrying(run):
        raise UsageError(f"{run.id}: it runs; `hetrl status {run.id}` shows it, `hetrl cancel {run.id}` ends it")
    if not state.ended:
        cause = "its processes are gone without a last word"
        EventLog(run.events, "resume").append("failed", cause=cause, exit_code=1)
    return f"{run.id} is {state.phase} already"


def _end_jobs(run: Run, slurm: SlurmRun, state: State, lost: Collection[str]) -> str:
    """Cancel what may be left of a run; raises PartialError where some may live on, but for sites that are lost."""
    if not state.ended:
        EventLog(run.events, "resume").append("failed", cause=f"went on without {', '.join(lost)}", exit_code=1)
    asked = tuple(site for site in slurm.sites if site.name not in lost)
    count, remains = cancel_everywhere(replace(slurm, sites=asked))
    left = (
        f"{count} job{'' if count == 1 else 's'} that had been left: cancelled" if count else "nothing of it was left"
    )
    ended = f"{run.id} is {state.phase} already; {left}"
    if remains:
        raise PartialError("\n".join([ended, *remains]))
    return ended


def _go_on(
    run: Run, slurm: SlurmRun | None, wanted: _Wanted, console: Console, holding: Run | None = None
) -> tuple[Prepared, Plan]:
    """Make a run that takes up the last checkpoints of another one, by its plan or another."""
    config = wanted.config or run.path / "config.yaml"
    problem = problem_at(config)
    if wanted.without:
        problem = without(problem, wanted.without)
    executor = choose_executor(problem.experiment.launch.executor, problem.scenario.sites)
    if (executor == SLURM) != (slurm is not None):
        where = "at its Slurm sites" if slurm is not None else "in its directory here"
        raise UsageError(f"{run.id}: its checkpoints are {where}, where launch.executor of {config} starts nothing")
    check_runnable(problem.experiment)
    given = wanted.plan or run.path / "plan.json"
    replans = wanted.replan or (wanted.without and not wanted.plan)
    plan = solve_problem(problem) if replans else given_plan(given, problem)
    taken = _taken_up(run, plan, wanted.without)
    print_plan(console, plan, problem)
    check_startable(plan, problem.experiment.launch.start_with)
    after = f", after step {taken.step}, whose checkpoint is at {taken.site}" if taken else ""
    say(console, f"going on from {run.id}{after}")
    sites = [site for site in plan.site_order if site not in wanted.without]
    continues = history_of(run, slurm, sites)
    prepared = prepare(problem, plan, config, executor, console, continues=continues, holding=holding)
    if taken:
        seen = {"step": taken.step, "site": taken.site}
        replace_json(prepared.run.site(plan.lead_site) / TAKES_UP, seen)
    if run.metrics.exists():
        shutil.copyfile(run.metrics, prepared.run.site(plan.lead_site) / METRICS_BEFORE)
    return prepared, plan


def _taken_up(run: Run, plan: Plan, lost: Collection[str]) -> Stored | None:
    """Return which one of the actor a run by this plan takes up; UsageError where all are at sites that it leaves out.

    None where there is none at any site that answers: the run begins again then, and says so itself.
    """
    stored, errors = everywhere(run, lost)
    for error in errors.values():
        print(f"warning: what is there is not known: {error}", file=sys.stderr)
    taken = newest_of(stored, trained_at(plan), plan.site_order)
    if taken:
        return taken[ACTOR_TRAINING]
    if sites := sorted({one.site for one in stored if one.whole}):
        raise UsageError(
            f"{run.id}: its checkpoints are at {', '.join(sites)}, where the plan has nothing; take a plan that uses "
            "one of these sites, or resume without --replan"
        )
    return None
