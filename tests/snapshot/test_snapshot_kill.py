"""A process that is killed at any moment leaves no partial snapshot, and damages no other
snapshot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.snapshot.killed_makers import STORIES

ROOT = Path(__file__).resolve().parents[2]
LEAST = {"writing": 90, "renewing": 50, "packing": 12, "unpacking": 25, "crowding": 60}
"""Minimum number of moments at which a maker must be killed, so that a test that kills none
fails."""


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_a_maker_is_killed_at_every_moment(tmp_path: Path, story: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.snapshot.killed_makers", str(tmp_path / "root"), story],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= LEAST[story], done.stdout
