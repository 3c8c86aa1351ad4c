"""Random saves, loads and rewritten blocks against a model, on any transfer backend.

The contract is kept as the planner keeps it: no job writes what another one that is under way
reads or writes, and no block is rewritten under a job. Everything else is left to chance: what
is submitted, what is run, when results are asked for.
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
    """One run.

    Args:
        write: puts a page at indices of the storage, behind all work enqueued so far; the
            same pages come again and again.
        read: a copy of the storage, when all work enqueued so far is done.
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
        """Make that many operations, then finish and check everything.

        Raises:
            AssertionError: a page is not what it should be.
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
        """Rewrite a block that no job copies, as a forward pass does."""
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
        """The CPU can read a reported save immediately."""
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
