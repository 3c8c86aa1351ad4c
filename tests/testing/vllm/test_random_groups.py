"""Random clients of vLLM alone, without our connector: with several groups of KV as well, the rig
finds nothing wrong in what vLLM's own scheduler does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_scripts import play_each
from tests.testing.vllm.random_clients import play_script


@pytest.mark.scripts(60, nightly=4_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)
