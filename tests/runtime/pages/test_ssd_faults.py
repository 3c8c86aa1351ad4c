"""Disk faults: outputs stay right, the engine continues, and a counter increases."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import ask_again, tiers
from tests.runtime.stories.test_tiers import CONTEXT, push_out
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.files import FaultyFiles
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path, files: FaultyFiles) -> Rig:
    """An engine with a real store, on a disk whose calls can be made to fail."""
    made = make_rig(extra=tiers(tmp_path), max_batched_tokens=64)
    io = made.worker.worker_half.stores[SSD].io
    options = io.store.options
    io.store.close()
    io.store = SegmentStore(options, RawCodec(options.page_format), from_table, files)
    return made


def full(files: FaultyFiles) -> None:
    files.fail_writing(errno.ENOSPC)


def over_quota(files: FaultyFiles) -> None:
    files.fail_writing(errno.EDQUOT)


def read_only(files: FaultyFiles) -> None:
    files.fail_writing(errno.EROFS)


def broken(files: FaultyFiles) -> None:
    files.fail_writing(errno.EIO)


@pytest.mark.parametrize("fault", [full, over_quota, read_only, broken])
def test_a_disk_that_accepts_no_writes(
    rig: Rig, files: FaultyFiles, fault: Callable[[FaultyFiles], None]
) -> None:
    fault(files)
    rig.ask("first", CONTEXT)
    push_out(rig)
    assert rig.count("demotion_failures") > 0
    ask_again(rig)
    assert rig.count("prompt_tokens_ssd") == 0
    rig.check_clean()


@pytest.mark.parametrize("fault", [full, broken])
def test_a_disk_that_stops_accepting_writes_is_still_read(
    rig: Rig, files: FaultyFiles, fault: Callable[[FaultyFiles], None]
) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    fault(files)
    ask_again(rig)
    assert rig.count("prompt_tokens_ssd") >= 256
    rig.check_clean()


def test_a_disk_that_returns_errors(rig: Rig, files: FaultyFiles) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    files.fail("pread", errno.EIO, times=float("inf"))
    ask_again(rig)
    assert rig.count("promotion_failures") > 0
    assert rig.count("ssd_errors") > 0
    assert rig.count("prompt_tokens_ssd") == 0
    rig.check_clean()


def test_a_folder_that_vanishes(rig: Rig, tmp_path: Path) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    shutil.rmtree(tmp_path / "ssd")
    ask_again(rig)
    push_out(rig)
    ask_again(rig, "third")
    rig.check_clean()


def test_a_disk_that_recovers_is_used_again(rig: Rig, files: FaultyFiles) -> None:
    full(files)
    rig.ask("first", CONTEXT)
    push_out(rig)
    files.heal()
    rig.now += 100.0
    ask_again(rig)
    push_out(rig)
    ask_again(rig, "third")
    assert rig.count("prompt_tokens_ssd") >= 256
    rig.check_clean()
