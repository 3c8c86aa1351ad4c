"""The current engine continues with the files that an engine of commit 913b4b9 wrote.

Page keys are those of ``tiered_kv.testing.engine``. If that engine named its model or its blocks
differently, these files could no longer be read, just as if the product's own keys changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.golden.conftest import Copy
from tests.runtime.snapshots.asking import restore, result
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig

JOB = {"job_id": "agent"}
FIRST = text(300, seed=1)
SECOND = FIRST + expected(FIRST, 8) + text(30, seed=2)
CONTEXT = SECOND + expected(SECOND, 8)
"""Tokens of the job's two turns. The last token's KV was never computed."""
OTHER = text(100, seed=3)
BLOCK = 16


@contextmanager
def engine(**extra: Any) -> Iterator[SecondRig]:
    """Start an engine with the settings of the golden files."""
    settings = {"admission": "off", "cpu_gib": 0.0001, "codec": "raw", **extra}
    with SecondRig(RigOptions(extra=settings)) as rig:
        rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
        yield rig
        rig.check_clean()


def goes_on(rig: SecondRig, source: str, least: int) -> None:
    """Run the job's next turn, and assert its answer, and that KV for at least ``least`` tokens
    came from ``source``."""
    prompt = CONTEXT + text(20, seed=4)
    assert rig.ask("turn 3", prompt, params=JOB) == expected(prompt, 4)
    assert rig.ask("other", OTHER) == expected(OTHER, 4)
    assert rig.count(f"prompt_tokens_{source}") >= least
    rig.pins.release_all()


def test_cpu_memory_is_adopted(copy: Copy) -> None:
    with engine(cpu_path=str(copy("engine") / "memory")) as rig:
        assert len(rig.index) == 30
        goes_on(rig, "cpu", (len(CONTEXT) - 1) // BLOCK * BLOCK + len(OTHER) // BLOCK * BLOCK)


def test_pages_on_ssd_are_found(copy: Copy) -> None:
    with engine(ssd_path=str(copy("engine") / "ssd"), ssd_gib=0.02) as rig:
        goes_on(rig, "ssd", len(CONTEXT) // BLOCK * BLOCK)


def test_jobs_and_their_tails_are_remembered(copy: Copy) -> None:
    folder = copy("engine")
    with engine(cpu_path=str(folder / "memory"), ssd_path=str(folder / "ssd"), ssd_gib=0.02) as rig:
        goes_on(rig, "cpu", len(CONTEXT) - 1 + len(OTHER) - 1)
        turns = [job.turns for job in rig.gaps.manager.jobs.after(0, most=9)]
        assert sorted(turns) == [1, 1, 3], "this job went on; the other text began again"


def test_pages_in_the_shared_folder_are_found(copy: Copy) -> None:
    root = copy("engine") / "shared"
    with engine(remote=f"{root.as_uri()}?gib=0.01") as rig:
        goes_on(rig, "remote", len(CONTEXT) // BLOCK * BLOCK)


def test_the_snapshot_is_restored(copy: Copy, tmp_path: Path) -> None:
    root = copy("engine") / "snapshots"
    with open_snapshot(root / "night") as snapshot:
        manifest = snapshot.manifest
    assert list(manifest.token_ids) == CONTEXT
    assert (manifest.job, manifest.turns, manifest.kv_tokens) == ("agent", 2, len(CONTEXT) - 1)
    with engine(snapshot_path=str(root)) as rig:
        assert result(rig, restore(rig, "night"))["kv_tokens"] == len(CONTEXT) - 1
        goes_on(rig, "cpu", len(CONTEXT) - 1)


@pytest.mark.parametrize("name", ["memory", "ssd"])
def test_without_these_files_the_context_is_computed(name: str, copy: Copy) -> None:
    """The test shows that the tokens counted in the tests above come from the golden files
    alone."""
    folder = copy("engine") / name
    shutil.rmtree(folder)
    paths: dict[str, Any] = {"cpu_path": str(folder)}
    if name == "ssd":
        paths = {"ssd_path": str(folder), "ssd_gib": 0.02}
    with engine(**paths) as rig:
        prompt = CONTEXT + text(20, seed=4)
        assert rig.ask("turn 3", prompt, params=JOB) == expected(prompt, 4)
        assert rig.count("prompt_tokens_recomputed") == len(prompt)
        rig.pins.release_all()
