from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.bench.servers.model import small_model as prepare


@pytest.fixture(scope="session")
def small_model() -> Path:
    """Path of the small real model, prepared once per machine."""
    return prepare()


@pytest.fixture(scope="session", autouse=True)
def sockets_go_with_the_session() -> Iterator[None]:
    """Put vLLM's sockets in a temporary folder, because engines with several ranks do not delete
    theirs. vLLM reads the variable once per process."""
    with (
        tempfile.TemporaryDirectory(prefix="vllm-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield
