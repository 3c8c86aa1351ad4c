"""The fault-injecting test helpers behave as documented."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.threads import leaked_threads, running_threads
from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.testing.conformance.transfer import TransferConformance
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool


class TestFaultyTransferWithoutFaults(TransferConformance):
    """The conformance suite, on a faulty transfer from which no fault is requested."""

    def make_backend(
        self, layouts: Sequence[PageLayout], storage: Any, pool: CpuPool
    ) -> TransferBackend:
        return FaultyTransfer(CpuTransfer(layouts, storage, pool))


class Copies:
    """Four blocks that contain the bytes 1 to 4, and four slots that contain 11 to 14."""

    def __init__(self) -> None:
        self.pool = CpuPool(AnonymousMemory(4 * 8), 8)
        self.pool.slots[:] = np.arange(11, 15, dtype=np.uint8)[:, None]
        self.storage = np.repeat(np.arange(1, 5, dtype=np.uint8), 8)
        layout = page_layout([Placement(1, 32, 8, 0)], 4)
        self.faulty = FaultyTransfer(CpuTransfer([layout], self.storage, self.pool))

    def run(self, direction: Direction, blocks: list[int], slots: list[int]) -> set[int]:
        return set(self.faulty.run(CopyJob(1, direction, blocks, slots)).failed)

    @property
    def blocks(self) -> list[int]:
        return [int(n) for n in self.storage[::8]]

    @property
    def slots(self) -> list[int]:
        return [int(n) for n in self.pool.slots[:, 0]]


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies()
    yield made
    made.faulty.close()


def test_a_requested_failure_affects_the_next_job_of_its_direction_once(copies: Copies) -> None:
    copies.faulty.fail_next(Direction.LOAD, {1})

    assert copies.run(Direction.SAVE, [0, 1], [0, 1]) == set()
    assert copies.run(Direction.LOAD, [2, 3], [0, 1]) == {1}
    assert copies.blocks == [1, 2, 1, 4], "the block that failed keeps what it held"
    assert copies.run(Direction.LOAD, [2, 3], [0, 1]) == set()
    assert copies.blocks == [1, 2, 1, 2]
    assert copies.faulty.struck == 1


def test_a_whole_job_can_fail(copies: Copies) -> None:
    copies.faulty.fail_next(Direction.SAVE)
    assert copies.run(Direction.SAVE, [0, 1, 2], [0, 1, 2]) == {0, 1, 2}
    assert copies.slots == [11, 12, 13, 14]


def test_two_requested_failures_affect_two_jobs(copies: Copies) -> None:
    copies.faulty.fail_next(Direction.SAVE, {0})
    copies.faulty.fail_next(Direction.SAVE, {1, 7})
    assert copies.run(Direction.SAVE, [0, 1], [0, 1]) == {0}
    assert copies.run(Direction.SAVE, [0, 1], [0, 1]) == {1}


def test_a_job_in_the_background_fails_like_any_other(copies: Copies) -> None:
    copies.faulty.fail_next(Direction.LOAD, {0})
    copies.faulty.submit(CopyJob(7, Direction.LOAD, (0, 1), (0, 1)))
    copies.faulty.drain()
    (result,) = copies.faulty.poll()
    assert (result.job_id, result.failed) == (7, frozenset({0}))


def test_held_copies_are_made_when_they_are_released(copies: Copies) -> None:
    copies.faulty.hold(Direction.SAVE)
    copies.faulty.submit(CopyJob(7, Direction.SAVE, [0], [0]))
    copies.faulty.submit(CopyJob(8, Direction.LOAD, [3], [3]))
    assert copies.faulty.held == 1
    copies.storage[:8] = 9
    copies.faulty.let_go()
    copies.faulty.drain()
    assert (copies.slots[0], copies.blocks[3]) == (9, 14)


def test_waiting_for_copies_releases_held_ones(copies: Copies) -> None:
    copies.faulty.hold(Direction.SAVE)
    copies.faulty.submit(CopyJob(7, Direction.SAVE, [0], [0]))
    copies.faulty.drain()
    assert copies.slots[0] == 1


def test_a_corrupt_load_reports_success(copies: Copies) -> None:
    copies.faulty.corrupt_next_load()
    assert copies.run(Direction.LOAD, [0, 1, 2], [0, 1, 2]) == set()
    assert copies.blocks == [13, 11, 12, 4]
    assert copies.slots == [11, 12, 13, 14], "the pool itself is as it was"
    assert copies.run(Direction.LOAD, [0, 1, 2], [0, 1, 2]) == set()
    assert copies.blocks == [11, 12, 13, 4]


def test_a_lone_page_of_a_corrupt_load_does_not_arrive(copies: Copies) -> None:
    copies.faulty.corrupt_next_load()
    assert copies.run(Direction.LOAD, [3], [0]) == set()
    assert copies.blocks == [1, 2, 3, 4]
    assert copies.faulty.struck == 1


def test_saves_are_never_corrupt(copies: Copies) -> None:
    copies.faulty.corrupt_next_load()
    copies.run(Direction.SAVE, [0, 1], [0, 1])
    assert copies.slots == [1, 2, 13, 14]
    assert copies.faulty.struck == 0


def test_threads_left_behind_are_detected() -> None:
    before, stop = running_threads(), threading.Event()
    threads = [
        threading.Thread(target=stop.wait, name="anyone"),
        threading.Thread(target=stop.wait, name="tiered-kv-copy", daemon=True),
        threading.Thread(target=stop.wait, name="somebody's daemon", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        assert leaked_threads(before, patience_s=0.0) == ["anyone", "tiered-kv-copy"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert leaked_threads(before) == []
