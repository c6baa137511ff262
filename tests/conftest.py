"""How the tests run: several processes, the same examples in each run, and failures in five lines at the end.

``STOKER_SEED=n`` tries other examples, moments and data. A test that is marked ``alone`` runs after the others, while
no other test runs. The library is compiled once: where bytecode is not kept, each process they start would compile it.
"""

from __future__ import annotations

import compileall
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import stoker
from stoker.staging import isolate
from stoker.staging.library_objects import library_settings
from tests import huge_pages
from tests.helpers import note_children

pytest_plugins = ["tests.failures"]
PROCESSES_PER_CORE = 2  # most slow tests wait for a process or a clock; a fast one uses its core

isolate.NICE = 0  # else trials, for which tests wait, give way to all other tests
compileall.compile_dir(Path(stoker.__file__).parent, quiet=2)
# A job in the background is started with SIGINT ignored, and so would be the scripts that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Most tests define their datasets where only a forked worker finds them. Fork was the default on Linux before Python
# 3.14; tests/contract/test_contexts.py is about the other start methods, and about the default.
if sys.platform == "linux" and sys.version_info >= (3, 14):
    multiprocessing.set_start_method("fork")
# No example depends on the clock, nor on the run, unless others are asked for.
settings.register_profile(
    "stoker",
    deadline=None,
    derandomize="STOKER_SEED" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("stoker")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs are remembered, and profiles, go where nobody's own are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _children_of_earlier_tests() -> None:
    note_children()


@pytest.fixture(autouse=True)
def _no_setting_stays() -> Iterator[None]:
    """A later test in this process would find other inputs than the scripts that it starts."""
    before = library_settings()
    yield
    assert library_settings() == before


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A test that is named runs here, so that a debugger can stop it."""
    if any("::" in arg for arg in config.args):
        return 0
    cores = len(os.sched_getaffinity(0))
    return cores if "not slow" in config.option.markexpr else PROCESSES_PER_CORE * cores


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked ``alone`` waits until all other processes have run their last test."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    if not run:
        return (yield)
    path = Path(tempfile.gettempdir()) / f"stoker-tests-{run}.lock"
    with open(path, "a+") as file:  # of this process: no child inherits the lock
        fcntl.lockf(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """No later collection of garbage visits what was imported, here or in the workers that tests fork."""
    gc.collect()
    gc.freeze()
    huge_pages.collapse()  # a fork takes half as long


@pytest.hookimpl(tryfirst=True)  # before anything is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``few(n)``: that many of a test's parameter sets, one here and one there, are enough for the fast suite."""
    by_test: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            by_test.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for sets in by_test.values():
        marker = sets[0].get_closest_marker("few")
        assert marker is not None
        n = marker.args[0]
        stay = {k * len(sets) // n for k in range(n)}
        for k, item in enumerate(sets):
            if k not in stay:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
