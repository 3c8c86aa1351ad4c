"""Random clients of vLLM alone, without our connector: with several groups of KV as well, the rig
finds nothing wrong in what vLLM's own scheduler does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.random_scripts import play_each
from tests.testing.vllm.random_clients import play, random_options
from tiered_kv.testing.vllm.rig import Rig


def play_script(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Rig(folder / "model", random_options(rng)) as rig:
        play(rig, rng)
        rig.check_clean()


@pytest.mark.scripts(60, nightly=4_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)
