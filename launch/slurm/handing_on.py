"""Which jobs of a run that failed go on, with the nodes that they have, as those of the run that takes it up.

The scripts of a run with `launch.restarts` keep their nodes for a while once it has failed (`handing_on.sh.j2`). A job
of the next run takes them over where it has the same name and asks Slurm for the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.run_directory import Run
from launch.slurm.run import SlurmJob, SlurmRun, SlurmSite

# What differs between two runs whatever they ask for: sbatch(1).
_ITS_OWN = ("--job-name=", "--chdir=", "--output=")


def taking_over(slurm: SlurmRun, run: Run, earlier: SlurmRun, earlier_run: Run) -> SlurmRun:
    """Return where a run lies, each of its jobs with the one of an earlier run whose nodes it may take over."""
    before = {site.name: site for site in earlier.sites}

    def with_earlier(site: SlurmSite) -> SlurmSite:
        if (old := before.get(site.name)) is None or (old.host, old.cluster) != (site.host, site.cluster):
            return site
        keys = {job.name: job.key for job in old.jobs}
        asked, given = run.site(site.name), earlier_run.site(site.name)
        jobs = tuple(
            replace(job, takes=keys[job.name]) if job.name in keys and _asks(asked, job) == _asks(given, job) else job
            for job in site.jobs
        )
        return replace(site, jobs=jobs, earlier=old.directory)

    return replace(slurm, sites=tuple(map(with_earlier, slurm.sites)))


def not_taken(earlier: SlurmRun, slurm: SlurmRun) -> SlurmRun:
    """Return an earlier run with those of its jobs alone that no job of the next one may take over."""
    taken = {job.takes for site in slurm.sites for job in site.jobs}
    sites = (replace(site, jobs=tuple(job for job in site.jobs if job.key not in taken)) for site in earlier.sites)
    return replace(earlier, sites=tuple(site for site in sites if site.jobs))


def _asks(directory: Path, job: SlurmJob) -> list[str]:
    """Return what a job's script asks Slurm for."""
    lines = (directory / "scripts" / f"{job.name}.sbatch").read_text().splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH ")]
    return [line for line in asked if not line.removeprefix("#SBATCH ").startswith(_ITS_OWN)]
