"""Random saves, loads and block overwrites, compared with a model, for any transfer backend.

Operations follow the planner's contract: no job writes what another unfinished job reads or writes,
and no block is overwritten while a job uses it. Everything else is random: what is submitted, what
is run, and when results are polled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout
from tiered_kv.testing.conformance.transfer import Bytes, addresses
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import CpuPool

CHECK_EVERY = 1000
MOST_PAGES = 6
PATTERNS = 512


class RandomTransfers:
    """One random run.

    Args:
        write: enqueues a write of a page to the given indices of the storage, after all work
            enqueued so far. The same few pages are written repeatedly.
        read: returns a copy of the storage after all work enqueued so far.
    """

    def __init__(
        self,
        layout: PageLayout,
        pool: CpuPool,
        backend: TransferBackend,
        write: Callable[[int, NDArray[np.int64], Bytes], None],
        read: Callable[[], Bytes],
        seed: int = 0,
    ) -> None:
        self._layout, self._pool, self._backend = layout, pool, backend
        self._write, self._read = write, read
        self._rng = np.random.default_rng(seed)
        self._where = [addresses(layout, block) for block in range(layout.num_blocks)]
        size = (PATTERNS, layout.page_bytes)
        self._patterns = self._rng.integers(0, 256, size, dtype=np.uint8)
        self._sums = [xxhash.xxh3_64_intdigest(pattern.data) for pattern in self._patterns]
        self._blocks = [0] * layout.num_blocks
        self._slots = [0] * len(pool.slots)
        for block in range(layout.num_blocks):
            self._write(block, self._where[block], self._patterns[0])
        pool.slots[:] = self._patterns[0]
        self._under_way: dict[int, CopyJob] = {}
        self._read_blocks: Counter[int] = Counter()
        self._read_slots: Counter[int] = Counter()
        self._written_blocks: set[int] = set()
        self._written_slots: set[int] = set()
        self._jobs = 0

    def go(self, operations: int) -> None:
        """Run ``operations`` random operations, then check all slots and blocks.

        Raises:
            AssertionError: a page has the wrong bytes.
        """
        for number in range(operations):
            choice = self._rng.random()
            if choice < 0.15:
                self._rewrite()
            elif choice < 0.85:
                self._job(submit=choice < 0.65)
            else:
                self._settle(self._backend.poll())
            if number % CHECK_EVERY == CHECK_EVERY - 1:
                self._check()
        self._check()

    def _rewrite(self) -> None:
        """Overwrite a block that no job copies, as a forward pass does."""
        block = int(self._rng.integers(len(self._blocks)))
        if block in self._written_blocks or self._read_blocks[block]:
            return
        self._blocks[block] = int(self._rng.integers(PATTERNS))
        self._write(block, self._where[block], self._patterns[self._blocks[block]])

    def _job(self, *, submit: bool) -> None:
        job = self._allowed(
            Direction.SAVE if self._rng.random() < 0.5 else Direction.LOAD,
            int(self._rng.integers(1, MOST_PAGES + 1)),
        )
        saving = job.direction is Direction.SAVE
        for block, slot in zip(job.blocks, job.slots, strict=True):
            if saving:
                self._slots[slot] = self._blocks[block]
            else:
                self._blocks[block] = self._slots[slot]
        if not submit:
            assert not self._backend.run(job).failed
            return
        self._under_way[job.job_id] = job
        (self._read_blocks if saving else self._read_slots).update(
            job.blocks if saving else job.slots
        )
        (self._written_slots if saving else self._written_blocks).update(
            job.slots if saving else job.blocks
        )
        self._backend.submit(job)

    def _allowed(self, direction: Direction, pages: int) -> CopyJob:
        saving = direction is Direction.SAVE
        blocks = [
            block
            for block in self._rng.permutation(len(self._blocks)).tolist()
            if block not in self._written_blocks and (saving or not self._read_blocks[block])
        ]
        slots = [
            slot
            for slot in self._rng.permutation(len(self._slots)).tolist()
            if slot not in self._written_slots and (not saving or not self._read_slots[slot])
        ]
        pages = min(pages, len(blocks), len(slots))
        self._jobs += 1
        return CopyJob(self._jobs, direction, blocks[:pages], slots[:pages])

    def _settle(self, results: list[CopyResult]) -> None:
        """Finish reported jobs. The CPU can read the slots of a reported save immediately."""
        for result in results:
            job = self._under_way.pop(result.job_id)
            assert not result.failed
            if job.direction is Direction.LOAD:
                self._read_slots.subtract(job.slots)
                self._written_blocks.difference_update(job.blocks)
                continue
            self._read_blocks.subtract(job.blocks)
            self._written_slots.difference_update(job.slots)
            for slot in job.slots:
                self._check_slot(slot)

    def _check_slot(self, slot: int) -> None:
        found = xxhash.xxh3_64_intdigest(self._pool.slots[slot].data)
        assert found == self._sums[self._slots[slot]], f"slot {slot}"

    def _check(self) -> None:
        self._backend.drain()
        self._settle(self._backend.poll())
        assert not self._under_way
        storage = self._read()
        for slot in range(len(self._slots)):
            self._check_slot(slot)
        for block, pattern in enumerate(self._blocks):
            found = xxhash.xxh3_64_intdigest(storage[self._where[block]].data)
            assert found == self._sums[pattern], f"block {block}"
