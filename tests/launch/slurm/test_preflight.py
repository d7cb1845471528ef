"""What is asked before a submission, and what is shown."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from hetrl.describe.sites import SiteFile
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError, SiteUnreachableError
from hetrl.problem import read_problem
from launch.findings import Finding
from launch.slurm.doctor import Answer
from launch.slurm.preflight import preflight, preview_table
from launch.slurm.stage import stage_slurm
from tests.launch.launch_cases import quick_plan
from tests.launch.slurm.slurm_cases import environment, make_clusters


@pytest.fixture
def clusters(tmp_path):
    made = make_clusters(tmp_path)
    with environment(made):
        yield made


def prepared(clusters, gpus: int = 0):
    """Return the problem, and its scripts as if each job had so many GPUs."""
    problem = read_problem(clusters.config)
    scripts = stage_slurm(problem, quick_plan(), clusters.config).scripts
    return problem, [replace(script, gpus=gpus) for script in scripts]


def test_sites_say_what_holds_and_when_jobs_would_start(clusters):
    answers = preflight(*prepared(clusters))
    assert list(answers) == ["alpha", "beta", "gamma"]
    assert set(answers["beta"].starts) == {"gang", "array-cpu"}
    found = {finding.what: finding.verdict for finding in answers["beta"].findings}
    assert found["slurmctld"] == found["job gang"] == found["job array-cpu"] == "ok"
    assert found["nodes beta-0"] == "ok"


def test_controller_that_is_down_is_a_site_that_cannot_be_reached(clusters):
    clusters.fault("beta", "scontrol", "down")
    with pytest.raises(SiteUnreachableError, match="beta: slurmctld: "):
        preflight(*prepared(clusters))


def test_more_gpu_hours_than_the_budget_are_refused(clusters):
    site = clusters.path / "beta.yaml"
    budgeted = read_yaml(site, SiteFile).model_copy(update={"budget_gpu_hours": 10.0})
    site.write_text(budgeted.model_dump_json())
    with pytest.raises(HetrlError, match=r"beta: budget: the run may spend 16 GPU-hours, budget_gpu_hours is 10"):
        preflight(*prepared(clusters, gpus=8))  # two jobs for one hour


def test_preview_counts_what_the_sites_are_asked_for(clusters):
    problem, scripts = prepared(clusters, gpus=8)
    starts = {"alpha": {"gang": 0.0}, "beta": {"gang": 300.0, "array-cpu": 0.0}, "gamma": {}}
    busy = (Finding("gamma", "queue", "ok", "3 of 8 GPUs idle, 12 jobs wait"),)
    answers = {site: Answer(busy if site == "gamma" else (), expected) for site, expected in starts.items()}
    plan = quick_plan()
    traffic = {"alpha-beta": 1.5, "alpha-gamma": 2.0, "beta-alpha": 0.25}
    plan = replace(plan, predicted=replace(plan.predicted, wan_gb_per_iteration=traffic))
    console = Console(file=StringIO(), width=80)
    console.print(preview_table(problem, plan, scripts, answers))
    text = console.file.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    rows = {name: cells for name, *cells in lines if name}
    assert rows["alpha"][2:] == ["1", "8", "8", "0.7", "3.50"]
    assert rows["beta"][2:] == ["2", "16", "16", "0.7", "0.25"]
    assert rows["gamma"] == ["gang", "unknown", "1", "8", "8", "0.0", "0.00"]
    assert "gamma now: 3 of 8 GPUs idle, 12 jobs wait" in text
    assert "at worst 5" in text  # 32 GPUs for the 10 minutes of queue_timeout
