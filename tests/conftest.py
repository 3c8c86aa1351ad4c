"""Hypothesis profiles, the order of the tests, and a check for leaked threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.threads import leaked_threads, running_threads
from tiered_kv.codecs import autotune
from tiered_kv.connectors.runtime.worker import speed_probe
from tiered_kv.storage import ssd
from tiered_kv.storage.disk.probe import DiskSpeed, measure_disk

pytest.register_assert_rewrite("tiered_kv.testing")

# Use the same examples on every run, so that a failure is caused by the change under test.
# HYPOTHESIS_PROFILE=thorough runs more examples, new ones each time.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

SERVED = "tests/e2e/served/"
"""Folder whose tests share one server."""
LONGEST = (
    SERVED,
    "tests/e2e/test_demo.py",
    "tests/e2e/test_soak.py",
    "tests/e2e/test_ssd.py",
    "tests/vllm/test_versions.py",
)
"""Tests that occupy a worker for two minutes or longer."""


BATCH = 25
"""Number of random scripts per test. Each test creates its own folder, which costs as much as a
short script."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random scripts")
    group.addoption("--scripts", type=int, metavar="N", help="seeds of each random script")
    group.addoption("--first-seed", type=int, default=0, metavar="S", help="the first of them")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "e2e":
        split_cores(getattr(config, "workerinput", None))
    else:
        measure_briefly()


def split_cores(worker: dict[str, Any] | None) -> None:
    """Split the cores between workers that start engines.

    An engine binds a thread to each core that its process may use. Two engines on the same cores
    wait for each other in every layer. On separate cores, each is as fast as if it ran alone there.
    """
    if worker is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    os.sched_setaffinity(0, cores[number % count :: count] or cores)


def measure_briefly() -> None:
    """Shorten the measurements of a starting engine (codecs, arithmetic, disk), which otherwise
    take 0.3 s of CPU time. The tests start thousands of engines, with pages of a few KiB, on one
    disk."""
    autotune.MEASURE_S = speed_probe.MATMUL_S = 0.001
    speeds = dict[tuple[int, int], DiskSpeed]()

    def measure_once(folder: Path, threads: int) -> DiskSpeed:
        disk = folder.stat().st_dev, threads
        if disk not in speeds:
            speeds[disk] = measure_disk(folder, threads)
        return speeds[disk]

    ssd.measure_disk = measure_once  # type: ignore[attr-defined, assignment]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that have the ``scripts`` marker with batches of random seeds."""
    marker = metafunc.definition.get_closest_marker("scripts")
    if marker is None:
        return
    option = metafunc.config.option
    nightly = "nightly" in option.markexpr and "not nightly" not in option.markexpr
    count = option.scripts or (marker.kwargs["nightly"] if nightly else marker.args[0])
    end = option.first_seed + count
    marks = [pytest.mark.nightly, pytest.mark.timeout(0)] if nightly else []
    batches = [
        pytest.param(range(start, min(start + BATCH, end)), id=f"{start}", marks=marks)
        for start in range(option.first_seed, end, BATCH)
    ]
    metafunc.parametrize("seeds", batches)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker runs one of them alone at the end. Skip slow
    tests unless their marker is selected."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for name in ("nightly", "peer"):
        if name in config.option.markexpr:
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(f"takes long: -m {name}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of ``SERVED`` on one worker under ``--dist loadfile``, which otherwise assigns
    single files."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Engines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SERVED if nodeid.startswith(SERVED) else super()._split_scope(nodeid)

    return Engines(config, log)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose threads outlive it. Tests with real engines (``e2e``) are exempt, because
    those engines have threads of their own."""
    before = running_threads()
    yield
    if request.node.get_closest_marker("e2e") is None:
        leaked = leaked_threads(before)
        assert not leaked, f"threads left behind: {', '.join(leaked)}"
