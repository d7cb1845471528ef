from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# The same examples every time, and no limit on their time: a busy machine must not fail a test.
settings.register_profile("hetrl", deadline=None, derandomize=True)
settings.load_profile("hetrl")

# A shell starts what runs in the background deaf to Ctrl-C and hangups, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
# The layers of tests that start services, and the seconds that one test of each may take.
LAYER_SECONDS = {"engines": 600, "rehearsal": 600, "end_to_end": 900, "lab": 900, "slurm": 900}
LONGEST = {  # tests of the fast layer and files of others, in processes that share them
    "test_sha_ea_finds_nearly_every_optimum_of_the_space",
    "test_equal_nodes_may_change_places",
    "test_value_and_bounds_are_those_of_the_decoded_plan",
    "test_one_more_gpu_never_makes_an_optimum_worse",
    "test_four_thousand_gpus_are_planned_for",
    "test_every_plan_passes_check",
    "test_controller_that_is_gone_or_hangs_undoes_the_others[hang]",
    "test_no_version_but_a_published_one_is_ever_served[agent]",
    "slurm/test_run.py",
    "end_to_end/test_one_device.py",
    "slurm/test_submit.py",
    "slurm/test_faults.py",
}
REQUIRE_ALL = os.environ.get("REQUIRE_ALL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Begun first, they do not end last, with a core idle.
    items.sort(key=lambda item: LONGEST.isdisjoint({item.name, item.path.relative_to(HERE).as_posix()}))
    for item in items:
        layer = item.path.relative_to(HERE).parts[0]
        if layer not in LAYER_SECONDS:
            continue
        item.add_marker(layer)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LAYER_SECONDS[layer]))


@pytest.fixture(scope="module")
def bench_file() -> Iterator[Callable[[str], ModuleType]]:
    """Give what imports a file of benchmarks/ by its name, as they import each other; afterwards none is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield import_module
    for path in BENCHMARKS.glob("*.py"):
        module = sys.modules.get(path.stem)  # or a package of the program, whose name a bench has, too
        if module is not None and module.__file__ == str(path):
            del sys.modules[path.stem]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    return _fail_if_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report: pytest.CollectReport = yield  # type: ignore[misc]
    return _fail_if_skipped(report)


def _fail_if_skipped(report):
    """Under REQUIRE_ALL=1 a test that did not run is a failure; an expected failure (xfail) did run."""
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_ALL=1 and {reason}"
    return report
