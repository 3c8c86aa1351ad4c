from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.testing.vllm_rig import Rig, RigOptions

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Rigs by options, closed at the end of the test."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path / "model", RigOptions(**options)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
