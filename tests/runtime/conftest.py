from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.testing.vllm.rig import Rig, RigOptions

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that creates rigs, which are closed after the test. Admission is off unless
    a test sets it."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        extra = options.get("extra", {"cpu_gib": 0.001})
        if extra is not None:
            options["extra"] = {"admission": "off", **extra}
        rigs.append(Rig(tmp_path / "model", RigOptions(**options)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
