"""From a plan to the sbatch scripts of every site, and the rows that their processes read. Pure functions.

The scripts come from `slurm_templates/*.sbatch.j2`, or from the user's own of the same name (`launch.templates`).
"""

from __future__ import annotations

import json
import shlex
import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2

from hetrl.describe.inventory import Inventory
from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.run.step import StepProcess
from hetrl.runtime.transport.mailbox import RunAborted
from hetrl.runtime.wire import CONTROLLER, GATEWAY
from launch.render import ARRAY, EMULATED, GANG, argv_of, environment_of
from launch.slurm.container import python_of, srun_options
from launch.slurm.layout import (
    ArrayLayout,
    GangLayout,
    Placed,
    Step,
    layouts,
    parts_of,
    spoken_replicas,
    spoken_steps,
)
from launch.slurm.resources import (
    Shape,
    max_array_size,
    notice_seconds,
    resource_options,
    sbatch_lines,
    unmanaged_gpus,
)
from launch.slurm.run import HELD

TEMPLATES = Path(__file__).resolve().parents[2] / "slurm_templates"
WIDTH = 118
HOLD_SECONDS = 600  # that a job keeps its nodes for a launcher that takes the run up: it may have to plan anew


@dataclass(frozen=True)
class SiteScript:
    """One submission: the text of the sbatch script and the rows that its processes read.

    Slurm knows the job by `key`, its name. `nodes` (at most) and `gpus` (charged) are those of all tasks of an array.
    """

    site: str
    name: str
    kind: str  # gang | array
    key: str
    text: str
    rows: Mapping[str, tuple[StepProcess, ...]]  # by step, or by index of the array
    nodes: int = 0
    gpus: int = 0
    array_tasks: int = 0
    heterogeneous: bool = False

    @property
    def processes(self) -> tuple[str, ...]:
        """Return the names of all processes: each prints to logs/<process>.log of the site's directory."""
        return tuple(row.name for rows in self.rows.values() for row in rows)

    @property
    def rows_text(self) -> str:
        """Return the file that `hetrl.runtime.run.step.read_processes` reads, a process on each line."""
        steps = []
        for step, rows in self.rows.items():
            lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
            steps.append(f" {json.dumps(step)}: [\n{lines}\n ]")
        joined = ",\n".join(steps)
        return f'{{"steps": {{\n{joined}\n}}}}\n'


@dataclass(frozen=True)
class _Run:
    """What all scripts of a run share."""

    id: str
    problem: Problem
    directories: Mapping[str, str]
    inventories: Mapping[str, Inventory]
    files: Mapping[str, SiteFile]
    templates: jinja2.Environment
    walltime: str
    notice_seconds: int = 0
    hold_seconds: int = 0

    @cached_property
    def gpu_by_device(self) -> Mapping[str, str]:
        """Return the catalogue GPU of every device."""
        return {device.id: device.gpu for device in self.problem.topology.devices}

    def rows(self, site: str, placed: Sequence[Placed]) -> tuple[StepProcess, ...]:
        """Return what the nodes of these processes start."""
        gpus, interface = self.gpu_by_device, self.files[site].interface
        return tuple(
            StepProcess(
                one.process.name,
                argv_of(one.process),
                environment_of(one.process, self.id, gpus, one.positions, interface),
            )
            for one in placed
        )

    def options(self, site: str, shape: Shape, nodes: int) -> tuple[str, ...]:
        """Return what sbatch is asked for so many nodes."""
        return resource_options(self.files[site], shape, nodes, self.walltime, self.inventories.get(site))


def site_scripts(
    plan: Plan,
    problem: Problem,
    run_id: str,
    directories: Mapping[str, str],
    inventories: Mapping[str, Inventory] = {},
    templates: Path | None = None,
) -> tuple[SiteScript, ...]:
    """Return the scripts of all sites: the lead site's gang, the other gangs, the arrays.

    `directories` are the sites' own directories at their clusters (absolute), `inventories` what `hetrl discover` found
    there. Raises UsageError for a plan that cannot be started, and for a template of the user's that does not render.
    """
    files = {site.name: site for site in problem.scenario.sites}
    walltime = problem.experiment.launch.walltime
    notice = notice_seconds(plan.predicted.iteration_seconds, problem.experiment.launch.walltime_seconds)
    hold = HOLD_SECONDS if problem.experiment.launch.restarts else 0
    run = _Run(run_id, problem, directories, inventories, files, _environment(templates), walltime, notice, hold)
    gangs, arrays = layouts(plan, problem.topology, files, emulates=problem.experiment.launch.emulates)
    tasks = {site: sum(len(array.tasks) for array in arrays if array.site == site) for site in plan.site_order}
    scripts = [_gang(run, gang, tasks[gang.site]) for gang in gangs]
    for array in arrays:
        scripts += [_array(run, part) for part in parts_of(array, max_array_size(inventories.get(array.site)))]
    return tuple(scripts)


def task_script(
    problem: Problem,
    site: str,
    name: str,
    shape: Shape,
    process: StepProcess,
    *,
    run_id: str,
    directory: str,
    walltime: str,
    inventories: Mapping[str, Inventory] = {},
) -> SiteScript:
    """Return the script of an array with a single task of this shape, which runs one process; no run is needed.

    Raises UsageError where the inventory has no such node.
    """
    files = {one.name: one for one in problem.scenario.sites}
    run = _Run(run_id, problem, {site: directory}, inventories, files, _environment(None), walltime)
    return _array_script(run, site, name, shape, {"0": (process,)}, process.name)


@cache
def _environment(templates: Path | None) -> jinja2.Environment:
    folders = [TEMPLATES] if templates is None else [templates, TEMPLATES]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # Jinja's own is bash, as in ${#array[@]}
        comment_end_string="#%}",
    )
    environment.filters["quote"] = shlex.quote
    return environment


def _gang(run: _Run, gang: GangLayout, array_tasks: int) -> SiteScript:
    """Return the gang's script; `array_tasks` is how many tasks of the site's arrays need its gateway."""
    heterogeneous = len(gang.components) > 1
    blocks = [sbatch_lines(run.options(gang.site, one.shape, len(one.slots))) for one in gang.components]
    members = [step for step in gang.steps if step.name != GATEWAY]
    mpi = run.files[gang.site].mpi
    steps = "\n".join(_start(step, mpi, heterogeneous) for step in members)
    described = (f"{len(one.slots)} {one.shape.spoken(len(one.slots))}" for one in gang.components)
    job = f"the gang of site {gang.site}, on {' and '.join(described)}"
    values = {
        "head": _head(run, f"{job}: {spoken_steps(gang.steps)}."),
        "resources": "\n#SBATCH hetjob\n".join(blocks),
        "unmanaged": unmanaged_gpus(run.files[gang.site], [one.shape for one in gang.components]),
        "heterogeneous": heterogeneous,
        "steps": steps,
        "array_tasks": array_tasks,
        "notice_seconds": run.notice_seconds,
    }
    rows = {step.name: run.rows(gang.site, step.members) for step in gang.steps}
    return replace(
        _script(run, gang.site, GANG, GANG, "%j", values, rows),
        nodes=sum(len(one.slots) for one in gang.components),
        gpus=sum(one.shape.gpus * len(one.slots) for one in gang.components),
        heterogeneous=heterogeneous,
    )


def _start(step: Step, mpi: str, heterogeneous: bool) -> str:
    """Return the line that starts a step."""
    places = [f"{node}:{tasks}" for node, tasks in step.tasks_by_node.items()]
    # A step is granted all GPUs of its job unless it says that it needs none (srun(1), --gres).
    options = ["--gres=none"] if step.name in (CONTROLLER, EMULATED) else []
    options += [f"--mpi={mpi if step.members[0].process.world else 'none'}"]
    options += [f"--het-group={step.component}"] if heterogeneous else []
    return shlex.join(["start", step.name, *places, "--", *options])


def _array(run: _Run, array: ArrayLayout) -> SiteScript:
    replicas = [one.process for task in array.tasks for one in task]
    rows = {str(index): run.rows(array.site, task) for index, task in enumerate(array.tasks)}
    return _array_script(run, array.site, array.name, array.shape, rows, spoken_replicas(replicas))


def _array_script(
    run: _Run, site: str, name: str, shape: Shape, rows: Mapping[str, tuple[StepProcess, ...]], contents: str
) -> SiteScript:
    """Return the script of an array: a row of processes for each of its tasks."""
    tasks = len(rows)
    job = f"{tasks} {'task' if tasks == 1 else 'tasks'} of site {site}, each on a {shape.spoken(1)}"
    values = {
        "head": _head(run, f"{job}: {contents}."),
        "resources": sbatch_lines(run.options(site, shape, 1)),
        "unmanaged": unmanaged_gpus(run.files[site], [shape]),
        "processes": len(next(iter(rows.values()))),
        "last": tasks - 1,
    }
    script = _script(run, site, ARRAY, name, "%A_%a", values, rows)
    return replace(script, nodes=tasks, gpus=tasks * shape.gpus, array_tasks=tasks)


def _script(
    run: _Run,
    site: str,
    kind: str,
    name: str,
    job_pattern: str,
    more: Mapping[str, Any],
    rows: Mapping[str, tuple[StepProcess, ...]],
) -> SiteScript:
    """Render the template of this kind, its sizes still open; raises UsageError where the user's own cannot be."""
    directory, file, key = run.directories[site], run.files[site], f"hetrl-{run.id}-{site}-{name}"
    launch = run.problem.experiment.launch
    values = {
        "run": run.id,
        "site": site,
        "name": name,
        "key": key,
        "directory": directory,
        "script": f"{directory}/scripts/{name}.sbatch",
        "log": f"{directory}/logs/{name}-{job_pattern}.log",
        "hold_seconds": run.hold_seconds,
        "held": HELD,
        "least_seconds": 2 * run.notice_seconds,
        "ended_from_elsewhere": f"^({RunAborted.exit_code}|{128 + signal.SIGTERM})$",
        "code": f"{directory}/code",
        "rows": f"scripts/{name}.json",
        "queue_timeout": launch.queue_timeout,
        "setup": _lines(file.setup_lines),
        "cpu_bind": file.cpu_bind,
        "python": shlex.join(python_of(file, directory)),
        "container": _lines(srun_options(file, directory)),
        **more,
    }
    try:
        text = run.templates.get_template(f"{kind}.sbatch.j2").render(values)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f"{kind}.sbatch.j2{f', line {line}' if line else ''}"
        raise UsageError(f"launch.templates: {where}: {error}; it may use {', '.join(sorted(values))}") from None
    return SiteScript(site, name, kind, key, text, rows)


def _lines(lines: Sequence[str]) -> str:
    """Return the elements of an array of bash, one on each line where there are several."""
    return shlex.join(lines) if len(lines) < 2 else "".join(f"\n    {shlex.quote(line)}" for line in lines) + "\n"


def _head(run: _Run, contents: str) -> str:
    """Return the comment that says what a script is."""
    text = f"hetrl run {run.id}: {contents}"
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
