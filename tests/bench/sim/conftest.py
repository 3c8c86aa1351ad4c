from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tiered_kv.bench.sim.study.cells import Bench, running


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A process that runs simulations for all tests, because importing vLLM takes seconds. It is
    started before the first test, so that its threads do not count as left behind by a test."""
    with running(1, tmp_path_factory.mktemp("cells")) as made:
        made.processes.submit(os.getpid).result()  # the process starts with its first call
        yield made
