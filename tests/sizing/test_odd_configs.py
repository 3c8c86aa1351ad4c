"""Configurations that somebody got wrong are read, or refused in a sentence; nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sizing.published import (
    DEEPSEEK_V32,
    GEMMA3_12B,
    GPT2,
    GPT_OSS_120B,
    LLAMA4_SCOUT,
    LLAMA_8B,
    NEMOTRON_9B,
    QWEN3_NEXT_80B,
    write,
)
from tiered_kv.errors import TieredKVError
from tiered_kv.sizing.gpus import UTILISATION
from tiered_kv.sizing.model_shape import read_shape
from tiered_kv.sizing.tier_plan import Setup, make_plan

CONFIGS = (
    LLAMA_8B,
    GEMMA3_12B,
    GPT2,
    GPT_OSS_120B,
    LLAMA4_SCOUT,
    DEEPSEEK_V32,
    QWEN3_NEXT_80B,
    NEMOTRON_9B,
)
ODD: tuple[Any, ...] = (None, "x", "", 0, -7, 3, 1.5, True, [], [1], ["x"], {}, {"x": 1}, 10**30)
SETUP = Setup("h200-141", 5000, 3, None, 10.0, 3.0, UTILISATION)


def changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration with one field gone or odd, in its language part if it has one."""
    text = config.get("text_config")
    for name in text or config:
        for value in ODD:
            part = {**(text or config), name: value}
            yield {**config, "text_config": part} if text else part
        part = {key: kept for key, kept in (text or config).items() if key != name}
        yield {**config, "text_config": part} if text else part


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_a_field_that_is_wrong_is_no_surprise(tmp_path: Path, config: Mapping[str, Any]) -> None:
    said = []
    for odd in changed(config):
        try:
            make_plan(read_shape(write(tmp_path, odd), ranks=8), SETUP, 4.0)
        except TieredKVError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all(sentence.endswith((".", "?")) for sentence in said)
