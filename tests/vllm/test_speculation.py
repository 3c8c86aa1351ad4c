"""The log of a server with speculative decoding states its costs and the defects of vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SpeculativeConfig, VllmConfig

from tests.testing.vllm.models import FULL, STATE
from tiered_kv.connectors.vllm.engine_config import report_speculation
from tiered_kv.testing.vllm.engine import EngineSize, engine_config
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.vllm_versions import SPECULATED_STATES

LOOKAHEAD = hasattr(VllmConfig, "num_hash_lookahead_tokens")
"""True since vLLM 0.33, in which EAGLE and MTP lose no block if there is no connector."""


def speculating(folder: Path, groups: tuple[GroupSpec, ...], method: str, **options: Any) -> Any:
    size = EngineSize(64, 16, 8, 512, 8, 256, "fcfs", groups=groups)
    config = engine_config(folder / "model", size, {})
    # Created without __init__, which would read a model's configuration.
    drafter: Any = object.__new__(SpeculativeConfig)
    drafter.method, drafter.num_speculative_tokens = method, 1
    for name, value in options.items():
        setattr(drafter, name, value)
    config.speculative_config = drafter
    return config


def logged(config: Any, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO, "tiered_kv"):
        report_speculation(config)
    ours = (one for one in caplog.records if one.name.startswith("tiered_kv"))
    return [(one.levelno, one.getMessage()) for one in ours]


def test_states_with_speculation_cause_a_warning_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = logged(speculating(tmp_path, (FULL, STATE), "ngram"), caplog)
    ((level, words),) = found
    assert level == logging.WARNING
    assert words.endswith(SPECULATED_STATES)
    assert "remove --speculative-config" in words


@pytest.mark.skipif(not LOOKAHEAD, reason="since vLLM 0.33")
@pytest.mark.parametrize(("method", "lost"), [("eagle", True), ("mtp", True), ("ngram", False)])
def test_the_block_that_vllm_drops_for_any_connector_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, lost: bool
) -> None:
    config = speculating(tmp_path, (FULL,), method)
    assert config.num_hash_lookahead_tokens == 0, "a connector is configured"
    found = logged(config, caplog)
    assert [level for level, _ in found] == [logging.INFO] * lost
    assert all("any KV connector" in words for _, words in found)
    config.kv_transfer_config = None
    assert (config.num_hash_lookahead_tokens > 0) is lost


def test_without_speculation_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = speculating(tmp_path, (FULL, STATE), "ngram")
    config.speculative_config = None
    assert logged(config, caplog) == []
