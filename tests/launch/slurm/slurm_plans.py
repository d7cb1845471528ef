"""Plans and site files of Slurm clusters, for the tests of what is submitted there."""

from __future__ import annotations

from collections.abc import Sequence

from hetrl.describe.sites import ScenarioFile, topology_of
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Replica, Route, Solver, Stage, TaskPlan, WeightSync
from hetrl.problem import Files, Problem
from launch.slurm.render import SiteScript, site_scripts
from tests.launch.launch_cases import quick_experiment, quick_plan
from tests.plan.plan_cases import workload

RUN = "quick-20260101-000000"
LAYERS = (0, 28)


def problem(*sites: dict[str, object], **changes: object) -> Problem:
    """Return a problem over sites with these files; `changes` are of the experiment."""
    scenario = ScenarioFile.model_validate({"sites": [{"scratch": "/scratch/ada", **site} for site in sites]})
    return Problem(topology_of(scenario), workload(), files=Files(quick_experiment(**changes), scenario))


def scripts(plan: Plan, problem: Problem, **more: object) -> dict[str, SiteScript]:
    """Render a plan; the scripts are named `site/name`."""
    directories = {site: f"/scratch/ada/hetrl/{RUN}/{site}" for site in plan.site_order}
    return {f"{one.site}/{one.name}": one for one in site_scripts(plan, problem, RUN, directories, **more)}


def plan(trainers: Sequence[str], rollouts: Sequence[Sequence[str]], job: str = "array") -> Plan:
    """Return a plan that trains on some devices, one replica each, and generates on others, a replica per entry."""
    sites = tuple(dict.fromkeys(device.split("/")[0] for device in (*trainers, *(one[0] for one in rollouts))))
    used = [Replica(8, (Stage(tuple(one), LAYERS),), 1.0, 8) for one in rollouts]
    trained = [Replica(8, (Stage((device,), LAYERS),)) for device in trainers]
    return Plan(
        algorithm=Algorithm("grpo", "sync", 0, 1),
        groups=(
            Group(("actor_training",), tuple(trainers)),
            Group(("actor_generation",), tuple(device for one in rollouts for device in one), job),
        ),
        tasks={
            "actor_generation": TaskPlan("vllm", tuple(used)),
            "actor_training": TaskPlan("megatron", tuple(trained)),
        },
        weight_sync=WeightSync("full", tuple(Route(sites[0], site) for site in sites[1:])),
        site_order=sites,
        predicted=Predicted(1.0, 16.0),
        solver=Solver("verl", 0, 0.1, 1),
    )


def lab() -> tuple[Plan, Problem]:
    """Three clusters of the lab: Slurm's GPUs there are fake, and the devices of the plan are CPU cores."""

    def site(name: str, gres: str, cpus: int) -> dict[str, object]:
        nodes = [{"name": f"{name}-0", "gpu": "cpu", "gpus": cpus, "host_memory_gb": 8}]
        return {"name": name, "ssh": name, "allocation": "gpu", "gres": {gres: "cpu"}, "nodes": nodes}

    sites = (site("alpha", "a100", 4), site("beta", "l40s", 2), site("gamma", "l4", 1))
    return quick_plan(), problem(*sites)


def two_node_types() -> tuple[Plan, Problem]:
    """One site: training on two whole nodes of A100 and one of L40S, a replica beside it, others on their own nodes."""
    site = {
        "name": "alps",
        "account": "physics rl",
        "qos": "normal",
        "partitions": ["gpu", "gpu-long"],
        "gres": {"a100": "a100-80gb", "l40s": "l40s"},
        "modules": ["gcc/13.2", "cuda/12.8"],
        "python": "/home/ada/envs/hetrl/bin/python",
        "mpi": "pmi2",
        "sbatch": ["--reservation=rl", "--comment=it's ours"],
        "nodes": [
            {"name": "a100", "gpu": "a100-80gb", "gpus": 4, "count": 3},
            {"name": "l40s", "gpu": "l40s", "gpus": 2, "count": 2},
        ],
    }
    trainers = [f"alps/a100-{node}/{gpu}" for node in (0, 1) for gpu in range(4)] + ["alps/l40s-0/0"]
    rollouts = [["alps/l40s-0/1"], *([f"alps/a100-2/{gpu}"] for gpu in range(4)), ["alps/l40s-1/0", "alps/l40s-1/1"]]
    return plan(trainers, rollouts), problem(site, launch={"restarts": 3})


def single_gpus() -> tuple[Plan, Problem]:
    """Two sites that grant single GPUs; rollouts on one GPU and on two of them, in two arrays."""
    alps = {
        "name": "alps",
        "allocation": "gpu",
        "container": "/images/hetrl.sif",
        "python": "/opt/hetrl/bin/python",
        "nodes": [{"name": "a100", "gpu": "a100-80gb", "gpus": 8, "count": 2, "host_memory_gb": 960}],
    }
    jsc = {
        "name": "jsc",
        "ssh": "jsc-login",
        "allocation": "gpu",
        "gres": {"l40s": "l40s"},
        "cpus_per_gpu": 12,
        "nodes": [{"name": "l40s", "gpu": "l40s", "gpus": 4, "count": 2, "host_memory_gb": 480}],
    }
    trainers = [f"alps/a100-{node}/{gpu}" for node, gpu in ((0, 2), (0, 5), (1, 0), (1, 1), (1, 7))]
    rollouts = [["jsc/l40s-0/0"], ["jsc/l40s-0/2", "jsc/l40s-0/3"], ["jsc/l40s-1/3"], ["alps/a100-0/0"]]
    return plan(trainers, rollouts), problem(alps, jsc)


def university() -> tuple[Plan, Problem]:
    """A cluster whose Slurm knows of no GPUs: whole nodes of a partition, and an environment of conda."""
    site = {
        "name": "campus",
        "partitions": ["rl"],
        "gpu_request": "none",
        "setup": [
            "module use /opt/campus/modules  # the group's own",
            "module load cuda",
            "source /home/ada/miniforge3/etc/profile.d/conda.sh",
            "conda activate hetrl",
            "export HF_HOME='/work/ada/hf cache'",
        ],
        "cpu_bind": "rank_ldom",
        "gateway_sbatch": ["--partition=cpu", "--mem-per-cpu=2G"],
        "nodes": [
            {"name": "old", "gpu": "v100", "gpus": 2, "count": 2},
            {"name": "big", "gpu": "a100-80gb", "gpus": 4},
        ],
    }
    trainers = [f"campus/big/{gpu}" for gpu in range(4)]
    return plan(trainers, [["campus/old-0/0", "campus/old-0/1"], ["campus/old-1/1"]]), problem(site)


def cray() -> tuple[Plan, Problem]:
    """Whole nodes of GH200 behind x86 login nodes; srun starts the processes in a container (pyxis)."""
    site = {
        "name": "alps",
        "account": "a-rl",
        "gres": {"gh200": "gh200"},
        "container": {
            "image": "/capstor/scratch/ada/hetrl-aarch64.sqsh",
            "runtime": "pyxis",
            "binds": ["/capstor", "/iopsstor/ada/hf:/root/hf:ro"],
            "options": ["--no-container-mount-home"],
        },
        "setup": ["export NCCL_NET='AWS Libfabric' FI_CXI_DEFAULT_CQ_SIZE=131072"],
        "interface": "hsn0",
        "mpi": "pmix",
        "nodes": [{"name": "gh", "gpu": "gh200", "gpus": 4, "count": 3}],
    }
    trainers = [f"alps/gh-{node}/{gpu}" for node in (0, 1) for gpu in range(4)]
    return plan(trainers, [[f"alps/gh-2/{gpu}"] for gpu in range(4)]), problem(site)


def accounts() -> tuple[Plan, Problem]:
    """Whole nodes by account and QoS, asked for as GPUs per node; and a site whose gateway is a job of its own."""
    centre = {
        "name": "centre",
        "account": "phys042_g",
        "qos": "regular",
        "gpu_request": "gpus-per-node",
        "gres": {"a100": "a100-80gb"},
        "cpu_bind": "rank_ldom",
        "sbatch": ["--constraint=gpu&hbm80g", "--licenses=scratch"],
        "nodes": [{"name": "gpu", "gpu": "a100-80gb", "gpus": 4, "count": 2}],
    }
    rented = {
        "name": "rented",
        "allocation": "gpu",
        "partitions": ["gpu"],
        "gateway_sbatch": ["--partition=cpu"],
        "setup": ["source /opt/conda/etc/profile.d/conda.sh", "conda activate base"],
        "container": {
            "image": "/images/it's hetrl.sif",
            "binds": ["/datasets:/datasets:ro"],
            "options": ["--no-home", "--env=HF_HOME=/datasets/hf"],
        },
        "gres": {"l40s": "l40s"},
        "nodes": [{"name": "l40s", "gpu": "l40s", "gpus": 8, "host_memory_gb": 960}],
    }
    trainers = [f"centre/gpu-{node}/{gpu}" for node in (0, 1) for gpu in range(4)]
    return plan(trainers, [["rented/l40s/0"], ["rented/l40s/1"]]), problem(centre, rented)


CASES = {
    "lab": lab,
    "two_node_types": two_node_types,
    "single_gpus": single_gpus,
    "university": university,
    "accounts": accounts,
    "cray": cray,
}
