"""A connector is closed completely, however far its construction got."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.tool_reader import THREAD_NAME, ToolReader
from tiered_kv.errors import ConfigError
from tiered_kv.testing.checked_kv import CELL
from tiered_kv.testing.vllm.changes import given
from tiered_kv.testing.vllm.engine import EngineSize, engine_config, kv_config, make_scheduler

SIZE = EngineSize(64, 16, CELL, 512, 64, 256, "fcfs")


def reader() -> ToolReader:
    return ToolReader(lambda: None)


def reading() -> Sequence[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def with_reader(found: Dependencies) -> Dependencies:
    return replace(found, tools=reader())


def scheduler_side(folder: Path, extra: dict[str, Any]) -> Any:
    """Return the connector as vLLM's scheduler constructs it, before the block pool exists."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    with given(lambda: 0.0, with_reader):
        return KVConnectorFactory.create_connector(
            engine_config(folder, SIZE, extra), KVConnectorRole.SCHEDULER, kv_config(SIZE)
        )


def test_a_connector_without_blocks_can_be_closed(tmp_path: Path) -> None:
    extra = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1, "policy": "occupancy"}
    connector = scheduler_side(tmp_path / "model", extra)
    assert connector.scheduler_half is None
    assert connector.get_kv_connector_stats() is None
    assert reading()
    for _ in range(2):
        connector.shutdown()
        assert not reading()


def test_a_hook_before_the_blocks_does_not_raise(tmp_path: Path) -> None:
    connector = scheduler_side(tmp_path / "model", {"cpu_gib": 0})
    assert connector.has_pending_push_work() is False
    assert connector.reset_cache() is False
    connector.shutdown()


def test_what_was_started_is_closed_if_the_components_cannot_be_built(tmp_path: Path) -> None:
    # A folder cannot be written as a trace file.
    config = engine_config(tmp_path / "model", SIZE, {"trace": str(tmp_path)})
    with (
        pytest.raises(ConfigError, match=r"TIERED_KV_TRACE=.*cannot be written"),
        given(lambda: 0.0, with_reader),
    ):
        make_scheduler(config, kv_config(SIZE), log_stats=False)
    assert not reading()
