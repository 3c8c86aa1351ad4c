"""The engines on which these tests run: vLLM's scheduler, and an engine independent of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.testing.engine.rig import RigOptions as SecondOptions
from tiered_kv.testing.engine.rig import SecondRig
from tiered_kv.testing.rig import EngineRig

MakeEngine = Callable[..., EngineRig]


def vllm_engine(folder: Path, options: dict[str, Any]) -> EngineRig:
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    return Rig(folder / "model", RigOptions(**options))


def second_engine(folder: Path, options: dict[str, Any]) -> EngineRig:
    # vLLM's pool has a null block, which is never allocated.
    return SecondRig(SecondOptions(**{**options, "blocks": options.get("blocks", 64) - 1}))


@pytest.fixture(params=[vllm_engine, second_engine], ids=["vLLM", "second"])
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeEngine]:
    """Return a function that creates engines, which are closed after the test. Admission is off
    unless a test sets it."""
    made: list[EngineRig] = []

    def make(**options: Any) -> EngineRig:
        extra = options.get("extra", {"cpu_gib": 0.001})
        if extra is not None:
            options["extra"] = {"admission": "off", **extra}
        made.append(request.param(tmp_path, options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
