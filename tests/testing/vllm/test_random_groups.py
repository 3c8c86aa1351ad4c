"""Random clients of vLLM without the connector. The rig detects no wrong KV with vLLM's own
scheduler, even with several KV groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_scripts import play_each
from tests.testing.vllm.random_clients import play_script


@pytest.mark.scripts(60, nightly=4_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)
