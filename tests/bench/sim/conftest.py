from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tiered_kv.bench.sim.study.cells import Bench, running


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """One process for the cells of all tests, which keeps no results. It imports vLLM, which takes
    seconds, and is started here so that no test has threads that outlive it."""
    with running(1, None) as made:
        made.processes.submit(os.getpid).result()  # it starts with its first call
        yield made
