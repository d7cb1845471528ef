"""What is submitted at Slurm sites: golden scripts, shellcheck, and properties of any plan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.describe.inventory import ClusterNode, Inventory, Partition
from hetrl.errors import UsageError
from hetrl.runtime.run.step import environment_of as step_environment, read_processes
from launch.render import render
from launch.slurm.render import TEMPLATES
from launch.slurm.resources import notice_seconds
from tests.launch.slurm.slurm_plans import (
    CASES,
    RUN,
    accounts,
    plan,
    problem,
    scripts,
    single_gpus,
    two_node_types,
    university,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm_scripts"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
WRITE = os.environ.get("WRITE_GOLDEN")  # to a change that is meant: WRITE_GOLDEN=1 pytest


def cases() -> list[tuple[str, str]]:
    return [(case, script) for case, make in CASES.items() for script in scripts(*make())]


@pytest.mark.parametrize(("case", "name"), cases())
def test_scripts_and_rows_equal_the_golden_files(case, name):
    script = scripts(*CASES[case]())[name]
    path = GOLDEN / case / name.replace("/", "-")
    for suffix, text in ((".sbatch", script.text), (".json", script.rows_text)):
        file = path.with_name(path.name + suffix)
        if WRITE:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert text == file.read_text(), f"{file} differs"


def test_no_golden_file_is_left_over():
    expected = {f"{case}/{name.replace('/', '-')}{end}" for case, name in cases() for end in (".sbatch", ".json")}
    assert {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.*")} == expected


@pytest.mark.parametrize("case", CASES)
def test_scripts_pass_shellcheck(case, tmp_path):
    program = str(SHELLCHECK) if SHELLCHECK.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    files = []
    for name, script in scripts(*CASES[case]()).items():
        files.append(tmp_path / f"{name.replace('/', '-')}.sbatch")
        files[-1].write_text(script.text)
    done = subprocess.run([program, "--shell=bash", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["alps/gang", "alps/array-a100-80gb-4x1"])
def test_a_job_ends_where_a_module_does_not_load(name):
    beginning = scripts(*two_node_types())[name].text.partition("export PYTHONPATH")[0]
    for loads, code in (("true", 0), ('[ "$2" != cuda/12.8 ]', 1)):
        command = ["bash", "-c", f"module() {{ {loads}; }}\n{beginning}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert ("error: module load cuda/12.8 failed on " in done.stderr) == bool(code)


@pytest.mark.parametrize("end", ["", "echo 2020-01-01T00:00:00", "echo 2999-01-01T00:00:00"])
def test_a_job_holds_its_nodes_unless_it_is_known_to_end_soon(end):
    text = scripts(*two_node_types())["alps/gang"].text
    hold = text[text.index("hold() {") :].partition("\n}\n")[0]
    stand_ins = f"squeue() {{ {end or 'return 1'}; }}; scontrol() {{ echo $*; }}; take_over() {{ exit 9; }}; job=7\n"
    done = subprocess.run(["bash", "-uc", f"{stand_ins}{hold}\n}}\nhold"], capture_output=True, text=True, check=False)
    assert (done.returncode, "JobName=held-" in done.stdout) == ((0, False) if "2020" in end else (9, True))


@pytest.mark.parametrize("name", ["campus/gang", "campus/array-v100-x2"])
def test_lines_of_a_sites_setup_see_each_other_and_unset_variables(name):
    text = scripts(*university())[name].text
    beginning = text.partition("export PYTHONPATH")[0]
    stand_ins = (
        'module() { :; }; source() { conda() { [ -z "$NOT_SET" ] && export CONDA="$2"; }; }\n'
        "trap 'echo \"$CONDA, $HF_HOME\"' EXIT\n"
    )
    done = subprocess.run(["bash", "-c", stand_ins + beginning], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hetrl, /work/ada/hf cache\n", "")


def test_a_cluster_whose_slurm_knows_of_no_gpus_is_asked_for_nodes():
    for name, script in scripts(*university()).items():
        assert "gres=gpu" not in script.text and "gpus-per-node" not in script.text
        assert f"export CUDA_VISIBLE_DEVICES={'0,1,2,3' if name == 'campus/gang' else '0,1'} " in script.text
        assert "--cpu-bind=rank_ldom" in script.text
    assert scripts(*university())["campus/gang"].gpus == 4
    with pytest.raises(ValueError, match="needs allocation: node"):
        problem({"name": "campus", "allocation": "gpu", "gpu_request": "none"})


def test_the_gateways_own_job_has_options_of_its_own():
    jobs = scripts(*accounts())
    assert {"--partition=cpu", "--cpus-per-task=1"} <= set(options(jobs["rented/gang"]))
    assert "--partition=gpu" not in options(jobs["rented/gang"])
    assert "--partition=gpu" in options(jobs["rented/array-l40s"])
    assert "--gpus-per-node=a100:4" in options(jobs["centre/gang"])


def options(script) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.text.splitlines() if line.startswith("#SBATCH")]


# --- what is asked of Slurm -------------------------------------------------------------------------------------------


def test_whole_nodes_are_asked_for_with_all_their_gpus():
    gang = scripts(*two_node_types())["alps/gang"]
    asked = options(gang)
    assert asked.count("--exclusive") == 2
    assert [option for option in asked if option.startswith(("--nodes", "--gres", "hetjob"))] == [
        *("--nodes=2", "--gres=gpu:a100:4"),
        "hetjob",
        *("--nodes=1", "--gres=gpu:l40s:2"),
    ]
    assert (gang.nodes, gang.gpus, gang.heterogeneous) == (3, 10, True)


def test_single_gpus_are_asked_for_as_the_plan_uses_them():
    found = scripts(*single_gpus())
    gang = found["alps/gang"]
    assert [option for option in options(gang) if option.startswith(("--nodes", "--gres", "--cpus", "--mem"))] == [
        *("--nodes=1", "--cpus-per-task=8", "--mem=228881M", "--gres=gpu:2"),
        *("--nodes=1", "--cpus-per-task=12", "--mem=343322M", "--gres=gpu:3"),
    ]
    assert "--cpus-per-task=24" in options(found["jsc/array-l40s-x2"])
    assert not any("gres" in option or "exclusive" in option for option in options(found["jsc/gang"]))


def test_gpus_of_a_row_count_those_that_slurm_grants():
    found = scripts(*single_gpus())
    visible = {row.name: row.environment["CUDA_VISIBLE_DEVICES"] for row in found["alps/gang"].rows["actor_training.1"]}
    assert visible == dict.fromkeys(("actor_training-2", "actor_training-3", "actor_training-4"), "0,1,2")
    (pair,) = found["jsc/array-l40s-x2"].rows["0"]
    assert pair.environment["CUDA_VISIBLE_DEVICES"] == "0,1"  # of the plan 2 and 3
    whole = scripts(*two_node_types())
    assert whole["alps/gang"].rows["actor_generation-0"][0].environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_site_of_whole_nodes_puts_its_gateway_beside_rollouts():
    nodes = [{"name": "l4", "gpu": "l4", "gpus": 2, "count": 2}]
    trainer = {"name": "a", "nodes": [{"name": "h", "gpu": "a100-80gb", "gpus": 1}]}
    asked = problem(trainer, {"name": "b", "nodes": nodes})
    found = scripts(plan(["a/h/0"], [[f"b/l4-{node}/{gpu}"] for node in range(2) for gpu in range(2)]), asked)
    assert found["b/gang"].processes == ("gateway", "actor_generation-0", "actor_generation-1")
    assert found["b/array-l4-2x1"].rows["0"][1].name == "actor_generation-3"


@pytest.mark.parametrize("allocation", ["gpu", "node"])
@pytest.mark.parametrize("trains", ["slow", "fast", None])
def test_a_gateway_stands_on_the_best_connected_node_of_its_site(allocation, trains):
    nodes = [
        {"name": "slow", "gpu": "l4", "gpus": 4, "wan_gbps": 0.5},
        {"name": "fast", "gpu": "l40s", "gpus": 2},
    ]
    lead = {"name": "a", "nodes": [{"name": "h", "gpu": "a100-80gb", "gpus": 1}]}
    trainers = [f"b/{trains}/0"] if trains else ["a/h/0"]
    rollouts = [["b/slow/1"], ["b/slow/2"], ["b/fast/1"]]
    site = {"name": "b", "allocation": allocation, "nodes": nodes, "gres": {"l4": "l4", "l40s": "l40s"}}
    gang = scripts(plan(trainers, rollouts), problem(lead, site))["b/gang"]
    assert "gpu:l40s:" in gang.text.partition("#SBATCH hetjob")[0]
    assert gang.heterogeneous == (trains == "slow")
    beside = [int(name.rpartition("-")[2]) for name in gang.processes if name.startswith("actor_generation")]
    on_its_nodes = {"slow": [0, 1, 2], "fast": [2], None: [2]}[trains]
    joins = [] if trains == "fast" else [2]
    assert beside == (on_its_nodes if allocation == "node" else joins)


def test_nodes_that_are_connected_alike_leave_the_gateway_alone():
    nodes = [{"name": name, "gpu": gpu, "gpus": 2} for name, gpu in (("n", "l4"), ("m", "l40s"))]
    lead = {"name": "a", "nodes": [{"name": "h", "gpu": "a100-80gb", "gpus": 1}]}
    asked = problem(lead, {"name": "b", "allocation": "gpu", "nodes": nodes})
    assert scripts(plan(["a/h/0"], [["b/n/0"], ["b/m/0"]]), asked)["b/gang"].processes == ("gateway",)


def test_an_array_is_split_where_the_cluster_allows_fewer_tasks():
    site = {"name": "b", "allocation": "gpu", "gres": {"l4": "l4"}, "nodes": [{"name": "l4", "gpu": "l4", "gpus": 8}]}
    trainer = {"name": "a", "nodes": [{"name": "h", "gpu": "a100-80gb", "gpus": 1}]}
    asked, five = problem(trainer, site), plan(["a/h/0"], [[f"b/l4/{gpu}"] for gpu in range(5)])
    found = scripts(five, asked, inventories={"b": inventory("b", {"": 8}, ("l4",), max_array_size=2)})
    parts = [name for name in found if "array" in name]
    assert parts == ["b/array-l4-part0", "b/array-l4-part1", "b/array-l4-part2"]
    assert [options(found[name])[1] for name in parts] == ["--array=0-1", "--array=0-1", "--array=0-0"]
    assert ">= 5))" in found["b/gang"].text
    with pytest.raises(UsageError, match="b: the cluster takes no job arrays .*and array-l4 is one"):
        scripts(five, asked, inventories={"b": inventory("b", {"": 8}, ("l4",), max_array_size=0)})


def test_an_inventory_tells_type_feature_and_partition():
    site = {
        "name": "b",
        "allocation": "gpu",
        "gres": {"gpu_mem_24": "l4", "a100": "a100-40gb"},
        "partitions": ["big", "small"],
        "nodes": [{"name": "l4", "gpu": "l4", "gpus": 2}, {"name": "a100", "gpu": "a100-40gb", "gpus": 4}],
    }
    untyped = inventory("b", {"": 2}, ("gpu_mem_24",), partition="small")
    typed = inventory("b", {"a100": 4}, (), partition="big")
    known = Inventory(**{**vars(untyped), "nodes": (*untyped.nodes, *typed.nodes)})
    found = scripts(plan(["b/a100/0"], [["b/l4/1"]]), problem(site), inventories={"b": known})
    assert {"--gres=gpu:1", "--constraint=gpu_mem_24", "--partition=small"} <= set(options(found["b/array-l4"]))
    assert {"--gres=gpu:a100:1", "--partition=big"} <= set(options(found["b/gang"]))
    assert not any("constraint" in option for option in options(found["b/gang"]))


def test_two_gres_types_of_one_gpu_are_asked_for_apart():
    nodes = [{"name": gres, "gpu": "a100-80gb", "gpus": 2, "gres": gres} for gres in ("sxm", "pcie")]
    site = {"name": "b", "allocation": "gpu", "gres": {"sxm": "a100-80gb", "pcie": "a100-80gb"}, "nodes": nodes}
    trained = plan([f"b/{gres}/{gpu}" for gres in ("sxm", "pcie") for gpu in range(2)], [])
    text = scripts(trained, problem(site))["b/gang"].text
    assert text.count("#SBATCH hetjob") == 1
    assert "#SBATCH --gres=gpu:sxm:2\n" in text
    assert "#SBATCH --gres=gpu:pcie:2\n" in text


@pytest.mark.parametrize("allocation", ["gpu", "node"])
@pytest.mark.parametrize("measured", [True, False])
def test_slices_are_asked_for_by_the_name_that_slurm_gives_them(allocation, measured):
    gpu, gres = "a100-40gb-3g.20gb", "nvidia_a100_3g.20gb"
    site = {"name": "b", "allocation": allocation, "nodes": [{"name": "mig", "gpu": gpu, "gpus": 4, "count": 2}]}
    asked = problem({"name": "a", "nodes": [{"name": "h", "gpu": "h100", "gpus": 1}]}, {**site, "gres": {gres: gpu}})
    servers = plan(["a/h/0"], [[f"b/mig-1/{index}"] for index in (1, 3)])
    known = {"b": inventory("b", {gres: 4}, ("a100",))} if measured else {}
    found = scripts(servers, asked, inventories=known)
    name = "b/gang" if allocation == "node" else f"b/array-{gpu}"
    assert f"--gres=gpu:{gres}:{4 if allocation == 'node' else 1}" in options(found[name])
    assert not any("constraint" in option for option in options(found[name]))
    rows = [row for rows in found[name].rows.values() for row in rows if row.name.startswith("actor_generation")]
    granted = ",".join(f"MIG-{index}" for index in range(4)) if allocation == "node" else "MIG-x"
    seen = [step_environment(row, {"CUDA_VISIBLE_DEVICES": granted})["CUDA_VISIBLE_DEVICES"] for row in rows]
    assert seen == (["MIG-1", "MIG-3"] if allocation == "node" else ["MIG-x", "MIG-x"])


def inventory(site, gpus, features, partition="small", max_array_size=1001) -> Inventory:
    node = ClusterNode("n1", gpus, {}, 16, 128.0, features, (partition,), ("IDLE",))
    partitions = tuple(Partition(name, True, True, None, None, 0, None, None) for name in ("big", "small"))
    return Inventory(
        site, site, "23.11", "2026-01-01T00:00:00+00:00", max_array_size, "none", False, partitions, (node,)
    )


def test_every_job_is_bound_to_the_cluster_that_a_site_names():
    two_types, asked = two_node_types()
    (site,) = asked.scenario.sites
    named = site.model_copy(update={"cluster": "north"})
    asked = replace(asked, files=replace(asked.files, scenario=asked.scenario.model_copy(update={"sites": (named,)})))
    for script in scripts(two_types, asked).values():
        components = script.text.count("#SBATCH hetjob") + 1
        assert options(script).count("--clusters=north") == components


def test_nodes_that_the_cluster_does_not_have_are_refused_by_name():
    site = {"name": "b", "allocation": "gpu", "nodes": [{"name": "l4", "gpu": "l4", "gpus": 8}]}
    known = {"b": inventory("b", {"": 2}, ("l4",))}
    with pytest.raises(UsageError, match="b: no node in service has 3 x l4; run `hetrl discover`"):
        scripts(
            plan(["b/l4/0", "b/l4/1", "b/l4/2"], [["b/l4/3"]]),
            problem({**site, "gres": {"l4": "l4"}}),
            inventories=known,
        )


@pytest.mark.parametrize("option", ["reservation=rl", "-p gpu", "--wrap=a\nrm -rf b", "--x y"])
def test_what_is_no_option_of_sbatch_is_refused(option):
    with pytest.raises(ValueError, match="sbatch"):
        problem({"name": "a", "sbatch": [option], "nodes": [{"name": "n", "gpu": "l4", "gpus": 1}]})


@pytest.mark.parametrize(
    ("key", "option", "message"),
    [
        ("sbatch", "--job-name=rl", "it is set for each job"),
        ("sbatch", "--job=rl", "it is set for each job"),
        ("sbatch", "--clus=other", "write it under `cluster`"),
        ("sbatch", "--partition=gpu", "write it under `partitions`"),
        ("sbatch", "--time=1", "write it under `launch.walltime`"),
        ("gateway_sbatch", "--output=/dev/null", "it is set for each job"),
    ],
)
def test_options_that_a_run_finds_its_jobs_by_are_refused(key, option, message):
    with pytest.raises(ValueError, match=f"{key}: {option}: take it out, {message}"):
        problem({"name": "a", key: [option], "nodes": [{"name": "n", "gpu": "l4", "gpus": 1}]})


def test_a_constraint_of_the_site_stands_beside_that_of_the_gpu():
    site = {"name": "b", "allocation": "gpu", "gres": {"l4": "l4"}, "nodes": [{"name": "l4", "gpu": "l4", "gpus": 2}]}
    more = ["--constraint=ib|opa", "--mail-type=FAIL", "--time-min=10", "--nodelist=n1"]
    known = {"b": inventory("b", {"": 2}, ("l4",))}
    found = scripts(plan(["b/l4/0"], [["b/l4/1"]]), problem({**site, "sbatch": more}), inventories=known)
    for script in found.values():
        constraints = [line for line in script.text.splitlines() if line.startswith("#SBATCH --constraint")]
        assert constraints == ["#SBATCH --constraint='l4&(ib|opa)'"]
        assert "#SBATCH --mail-type=FAIL" in script.text


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iteration", "walltime", "seconds"),
    [(40.0, 8 * 3600, 300), (200.0, 8 * 3600, 500), (40.0, 360, 180), (float("inf"), 10**6, 65535)],
)
def test_a_job_is_told_of_its_end_while_there_is_time_for_a_step(iteration, walltime, seconds):
    assert notice_seconds(iteration, walltime) == seconds


def test_templates_have_no_logic_but_if():
    for path in TEMPLATES.glob("*.j2"):
        words = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("{%")]
        assert set(words) <= {"if", "else", "endif", "include"}, path.name
    assert {path.name for path in TEMPLATES.iterdir()} == {"gang.sbatch.j2", "array.sbatch.j2", "handing_on.sh.j2"}


def test_a_user_may_bring_one_template_of_their_own(tmp_path):
    (tmp_path / "array.sbatch.j2").write_text("#!/bin/bash\n# mine, for {{ key }}\n")
    found = scripts(*CASES["lab"](), templates=tmp_path)
    assert found["beta/array-cpu"].text == f"#!/bin/bash\n# mine, for hetrl-{RUN}-beta-array-cpu\n"
    assert found["beta/gang"].text == scripts(*CASES["lab"]())["beta/gang"].text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ account }}\n", "array.sbatch.j2: 'account' is undefined; it may use .*directory"),
        ("a\n{% if key %}", "array.sbatch.j2, line 2: Unexpected end"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named(tmp_path, text, said):
    (tmp_path / "array.sbatch.j2").write_text(text)
    with pytest.raises(UsageError, match=said):
        scripts(*CASES["lab"](), templates=tmp_path)


# --- any plan ---------------------------------------------------------------------------------------------------------


@st.composite
def placements(draw):
    """Draw sites with nodes of different sizes, a task that trains at the first one, and replicas anywhere."""
    sites, devices = [], []
    for index in range(draw(st.integers(1, 3))):
        name = f"s{index}"
        nodes = []
        for number in range(draw(st.integers(1, 2))):
            entry = {
                "name": f"n{number}",
                "gpu": draw(st.sampled_from(["l4", "l40s", "cpu"])),
                "gpus": draw(st.integers(1, 4)),
                "count": draw(st.integers(1, 2)),
            }
            nodes.append(entry)
            slots = [entry["name"]] if entry["count"] == 1 else [f"{entry['name']}-{i}" for i in range(entry["count"])]
            devices += [[f"{name}/{slot}/{gpu}" for gpu in range(entry["gpus"])] for slot in slots]
        allocation = draw(st.sampled_from(["node", "gpu"]))
        sites.append(
            {"name": name, "allocation": allocation, "nodes": nodes, "modules": draw(st.sampled_from([(), ("a b",)]))}
        )
    first = [device for node in devices for device in node if device.startswith("s0/")]
    trainers = draw(st.lists(st.sampled_from(first), min_size=1, unique=True))
    rollouts = []
    for node in devices:
        free = [device for device in node if device not in trainers or draw(st.booleans())]
        while free and draw(st.booleans()):
            size = draw(st.integers(1, len(free)))
            rollouts.append(free[:size])
            free = free[size:]
    if not rollouts:
        rollouts = [[trainers[0]]]
    return sites, trainers, rollouts, draw(st.sampled_from(["gang", "array"]))


@settings(max_examples=30, deadline=None)
@given(placements())
def test_any_plan_gives_scripts_that_bash_reads_and_starts_each_process_once(tmp_path_factory, placement):
    sites, trainers, rollouts, job = placement
    asked, found_plan = problem(*sites), plan(trainers, rollouts, job)
    found = scripts(found_plan, asked)
    gpus = {device.id: device.gpu for device in asked.topology.devices}
    expected = Counter((one.site, process.name) for one in render(found_plan, gpus) for process in one.tasks)
    assert Counter((script.site, name) for script in found.values() for name in script.processes) == expected
    folder = tmp_path_factory.mktemp("scripts")
    files = []
    for name, script in found.items():
        path = folder / name.replace("/", "-")
        path.with_suffix(".json").write_text(script.rows_text)
        assert read_processes(path.with_suffix(".json")).steps == script.rows
        assert max(map(len, script.text.splitlines())) <= 300
        files.append(path.with_suffix(".sbatch"))
        files[-1].write_text(script.text)
    read_all = 'for file in "$@"; do bash -n "$file" || exit; done'
    done = subprocess.run(["bash", "-c", read_all, "-", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@settings(max_examples=60, deadline=None)
@given(placements())
def test_any_step_gets_gpus_that_its_job_asks_for(placement):
    sites, trainers, rollouts, job = placement
    for script in scripts(plan(trainers, rollouts, job), problem(*sites)).values():
        granted = [int(option.rpartition(":")[2]) for option in options(script) if option.startswith("--gres")]
        for rows in script.rows.values():
            for row in rows:
                positions = [int(one) for one in row.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
                assert len(set(positions)) == len(positions)
                assert not positions or max(positions) < max(granted)


def test_emulated_engines_take_a_core_of_each_site_and_no_gpu() -> None:
    made = plan(["alps/a100-0/0", "alps/a100-0/1"], [["jsc/l40s-0/0"], ["jsc/l40s-0/1"]])
    sites = [
        {"name": "alps", "nodes": [{"name": "a100-0", "gpu": "a100-40gb", "gpus": 4}]},
        {"name": "jsc", "nodes": [{"name": "l40s-0", "gpu": "l40s", "gpus": 2}], "gateway_sbatch": ["--partition=cpu"]},
    ]
    found = scripts(made, problem(*sites, launch={"engines": "emulated"}))
    assert set(found) == {"alps/gang", "jsc/gang"}, "no arrays"
    assert [*found["alps/gang"].rows] == ["gateway", "controller", "emulated"]
    for script in found.values():
        assert (script.nodes, script.gpus, script.array_tasks) == (1, 0, 0)
        assert "--cpus-per-task=1" in script.text and "#SBATCH --gres" not in script.text
        assert "start emulated 0:1 -- --gres=none --mpi=none" in script.text
        (process,) = script.rows["emulated"]
        assert process.argv == ("python", "-m", "hetrl.runtime.emulated.site", ".")
    assert "#SBATCH --partition=cpu" in found["jsc/gang"].text, "as a job that is a gateway alone"
