"""No published name is removed or added unless a file in ``names/`` records it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.conftest import NAMES, Compare
from tests.golden.names import GATHERED
from tiered_kv.config import load_config


@pytest.mark.parametrize("kind", GATHERED)
def test_names_match_the_published_names(kind: str, compare: Compare) -> None:
    compare(kind, GATHERED[kind]())


OTHERS = {
    "cpu_gib": "2",
    "cpu_keep": "1",
    "ssd_gib": "16",
    "tiers": "tests.vllm.producers:Tier",
    "remote": "valkey://127.0.0.1:6379",
    "codec": "raw",
    "io_threads": "3",
    "policy": "lru",
    "eviction": "lru",
    "pin_fraction": "0.5",
    "admission": "off",
    "admission_max_wait_s": "60",
    "events": "off",
    "mode": "observe",
    "trace_steps": "1",
    "hide_restores": "1",
    "harmless_calls": "look,listen",
}
"""A value of each setting that differs from its default. Settings that are not listed get a
path."""
NEEDED = {"cpu_keep": "cpu_path", "trace_steps": "trace"}
"""For some settings, another setting that is required with it."""


def test_every_setting_is_read_by_its_variable_and_by_its_key(tmp_path: Path) -> None:
    known = json.loads((NAMES / "settings.json").read_text())["settings"]
    assert OTHERS.keys() <= known.keys()
    for key, one in known.items():
        keys = [key, *([NEEDED[key]] if key in NEEDED else [])]
        values = {name: OTHERS.get(name, str(tmp_path / name)) for name in keys}
        by_variable = load_config({known[name]["variable"]: values[name] for name in keys})
        by_key = load_config({}, dict(values))
        assert by_variable == by_key
        assert getattr(by_key, key) != one["default"]
