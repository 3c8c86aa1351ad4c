from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tiered_kv.bench.sim.study.cells import Bench, running


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One process that runs the simulator's cells for all tests, because it takes seconds to import
    vLLM. It is started before any test, so that no test has threads that outlive it."""
    with running(1, tmp_path_factory.mktemp("cells")) as made:
        made.processes.submit(os.getpid).result()  # the process starts with its first call
        yield made
