"""Random clients of vLLM alone, without our connector: with several groups of KV as well, the rig
finds nothing wrong in what vLLM's own scheduler does."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.testing.vllm.random_clients import play, random_options
from tiered_kv.testing.vllm.rig import Rig

SCRIPTS = 60
NIGHTLY_SCRIPTS = 4_000


def play_script(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Rig(folder / "model", random_options(rng)) as rig:
        play(rig, rng)
        rig.check_clean()


@pytest.mark.parametrize("seed", range(SCRIPTS))
def test_random_scripts_end_well(tmp_path: Path, seed: int) -> None:
    play_script(tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_many_more_random_scripts_end_well(tmp_path: Path) -> None:
    for seed in range(SCRIPTS, NIGHTLY_SCRIPTS):
        play_script(tmp_path / f"{seed}", seed)
        shutil.rmtree(tmp_path / f"{seed}")
