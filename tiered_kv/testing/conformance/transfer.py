"""The conformance suite of transfer backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

Bytes = NDArray[np.uint8]

NUM_BLOCKS = 7
NUM_SLOTS = 9
LAYOUTS: dict[str, list[Placement]] = {
    "one layer": [Placement(1, NUM_BLOCKS * 64, 64, 0)],
    "layers outermost": [Placement(3, NUM_BLOCKS * 64, 64, 0)],
    "layers behind a gap": [Placement(2, NUM_BLOCKS * 64, 64, 96)],
    "head groups outside blocks": [Placement(2, 2 * NUM_BLOCKS * 32, 32, 0)],
    "layers of two sizes": [
        Placement(2, NUM_BLOCKS * 64, 64, 0),
        Placement(1, NUM_BLOCKS * 32, 32, 2 * NUM_BLOCKS * 64),
    ],
    "blocks outermost": [Placement(3, 48, 144, 0)],
    "blocks outermost, layers of two sizes": [Placement(2, 48, 128, 0), Placement(1, 32, 128, 96)],
}


@dataclass
class TransferBench:
    """A backend with its storage and pool, both full of random bytes.

    Attributes:
        read_storage: returns a copy of the storage.
        write_storage: replaces the storage's bytes.
        jobs: number of jobs created so far.
    """

    layout: PageLayout
    pool: CpuPool
    backend: TransferBackend
    read_storage: Callable[[], Bytes]
    write_storage: Callable[[Bytes], None]
    rng: np.random.Generator
    jobs: int = 0

    def job(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> CopyJob:
        self.jobs += 1
        return CopyJob(self.jobs, direction, tuple(blocks), tuple(slots))

    def page(self, block: int) -> bytes:
        """Return the content that the slot of a block must have after a save."""
        return self.read_storage()[addresses(self.layout, block)].tobytes()

    def slot(self, slot: int) -> bytes:
        return bytes(self.pool.slots[slot])

    def finish(self, *jobs: CopyJob) -> dict[int, CopyResult]:
        """Submit jobs, wait for them, and return the results of ``poll`` by job id."""
        for job in jobs:
            self.backend.submit(job)
        self.backend.drain()
        return {result.job_id: result for result in self.backend.poll()}


def addresses(layout: PageLayout, block: int) -> NDArray[np.int64]:
    """Return the addresses of a block's bytes in the storage, in slot order."""
    runs = [
        np.arange(region.nbytes) + region.offset + run * region.run_stride
        for region in layout.regions
        for run in range(region.count)
    ]
    shifts = [region.block_stride * block for region in layout.regions for _ in range(region.count)]
    return np.concatenate([run + shift for run, shift in zip(runs, shifts, strict=True)])


class TransferConformance:
    """Conformance suite of transfer backends. Create a subclass, name it ``Test…`` and define
    ``make_backend``.

    A backend whose storage is not a numpy array also overrides ``make_storage``, ``read`` and
    ``write``. A backend that needs pinned memory overrides ``make_pool``.
    """

    def make_backend(
        self, layouts: Sequence[PageLayout], storage: Any, pool: CpuPool
    ) -> TransferBackend:
        """Return the backend under test."""
        raise NotImplementedError

    def make_pool(self, num_slots: int, page_bytes: int) -> CpuPool:
        return CpuPool(AnonymousMemory(num_slots * page_bytes), page_bytes)

    def make_storage(self, nbytes: int) -> Any:
        """Create the memory that stands in for the engine's KV allocation."""
        return np.zeros(nbytes, dtype=np.uint8)

    def read(self, storage: Any) -> Bytes:
        """Wait for all work enqueued so far, and return a copy of the storage's bytes."""
        return np.array(storage)

    def write(self, storage: Any, content: Bytes) -> None:
        """Replace the storage's bytes."""
        storage[:] = content

    @pytest.fixture(params=list(LAYOUTS))
    def layout(self, request: pytest.FixtureRequest) -> PageLayout:
        return page_layout(LAYOUTS[request.param], NUM_BLOCKS)

    @pytest.fixture
    def bench(self, layout: PageLayout) -> Iterator[TransferBench]:
        rng = np.random.default_rng(0)
        storage = self.make_storage(layout.storage_bytes + 32)  # some bytes belong to no page
        self.write(storage, rng.integers(0, 256, layout.storage_bytes + 32, dtype=np.uint8))
        pool = self.make_pool(NUM_SLOTS, layout.page_bytes)
        with closing(
            pool
        ):  # closed even if creating the backend fails, because memory must not stay pinned
            pool.slots[:] = rng.integers(0, 256, pool.slots.shape, dtype=np.uint8)
            with closing(self.make_backend([layout], storage, pool)) as backend:
                yield TransferBench(
                    layout,
                    pool,
                    backend,
                    read_storage=lambda: self.read(storage),
                    write_storage=lambda content: self.write(storage, content),
                    rng=rng,
                )

    # -- the bytes ----------------------------------------------------------------

    def test_a_saved_page_comes_back_bit_for_bit_in_another_block(
        self, bench: TransferBench
    ) -> None:
        saved = bench.page(2)
        bench.finish(bench.job(Direction.SAVE, [2], [5]))
        bench.write_storage(np.zeros_like(bench.read_storage()))

        bench.finish(bench.job(Direction.LOAD, [6], [5]))

        assert bench.page(6) == saved

    def test_a_slot_holds_the_regions_of_a_block_in_their_order(self, bench: TransferBench) -> None:
        pages = [bench.page(block) for block in (6, 0, 3)]

        bench.finish(bench.job(Direction.SAVE, [6, 0, 3], [0, 8, 4]))

        assert [bench.slot(slot) for slot in (0, 8, 4)] == pages

    def test_a_save_changes_its_slots_and_nothing_else(self, bench: TransferBench) -> None:
        storage, slots = bench.read_storage(), bench.pool.slots.copy()

        bench.finish(bench.job(Direction.SAVE, [1, 4], [3, 0]))

        assert np.array_equal(bench.read_storage(), storage)
        others = [slot for slot in range(NUM_SLOTS) if slot not in (3, 0)]
        assert np.array_equal(bench.pool.slots[others], slots[others])

    def test_a_load_changes_its_blocks_and_nothing_else(self, bench: TransferBench) -> None:
        storage, slots = bench.read_storage(), bench.pool.slots.copy()

        bench.finish(bench.job(Direction.LOAD, [1, 4], [3, 0]))

        for block, slot in ((1, 3), (4, 0)):
            storage[addresses(bench.layout, block)] = slots[slot]
        assert np.array_equal(bench.read_storage(), storage)
        assert np.array_equal(bench.pool.slots, slots)

    def test_a_saved_page_is_a_copy_and_not_a_view(self, bench: TransferBench) -> None:
        saved = bench.page(0)
        bench.finish(bench.job(Direction.SAVE, [0], [0]))

        bench.write_storage(np.zeros_like(bench.read_storage()))

        assert bench.slot(0) == saved

    def test_one_slot_may_fill_several_blocks(self, bench: TransferBench) -> None:
        bench.finish(bench.job(Direction.LOAD, [0, 3, 5], [7, 7, 7]))

        assert {bench.page(block) for block in (0, 3, 5)} == {bench.slot(7)}

    # -- jobs -----------------------------------------------------------------------

    def test_what_run_has_copied_is_there_at_once(self, bench: TransferBench) -> None:
        saved = bench.page(3)

        save = bench.backend.run(bench.job(Direction.SAVE, [3], [1]))
        load = bench.backend.run(bench.job(Direction.LOAD, [5], [1]))

        assert bench.page(5) == saved
        assert (save.failed, load.failed) == (frozenset(), frozenset())
        assert bench.backend.poll() == [], "run returns its result, poll must not repeat it"

    def test_many_jobs_in_flight_are_each_reported_once(self, bench: TransferBench) -> None:
        saves = [bench.job(Direction.SAVE, [i], [i]) for i in range(NUM_BLOCKS)]
        pages = [bench.page(block) for block in range(NUM_BLOCKS)]
        reported = []
        for job in saves:
            bench.backend.submit(job)
            reported += bench.backend.poll()
        bench.backend.drain()
        reported += bench.backend.poll()
        loads = [
            bench.job(Direction.LOAD, [(i * 3) % NUM_BLOCKS], [(i * 5) % NUM_BLOCKS])
            for i in range(NUM_BLOCKS)
        ]

        reported += bench.finish(*loads).values()

        assert sorted(result.job_id for result in reported) == list(range(1, bench.jobs + 1))
        assert not any(result.failed for result in reported)
        for i in range(NUM_BLOCKS):
            assert bench.page((i * 3) % NUM_BLOCKS) == pages[(i * 5) % NUM_BLOCKS]
        assert bench.backend.poll() == []

    def test_a_run_does_not_disturb_the_jobs_in_flight(self, bench: TransferBench) -> None:
        pages = [bench.page(block) for block in range(NUM_BLOCKS)]
        bench.backend.run(bench.job(Direction.SAVE, [0], [8]))
        flying = [bench.job(Direction.SAVE, [i], [i]) for i in range(NUM_BLOCKS - 1)]
        for job in flying:
            bench.backend.submit(job)

        bench.backend.run(bench.job(Direction.LOAD, [NUM_BLOCKS - 1], [8]))

        bench.backend.drain()
        assert {r.job_id for r in bench.backend.poll()} == {job.job_id for job in flying}
        assert bench.page(NUM_BLOCKS - 1) == pages[0]
        assert [bench.slot(i) for i in range(NUM_BLOCKS - 1)] == pages[:-1]

    def test_a_result_says_how_many_bytes_were_copied(self, bench: TransferBench) -> None:
        job = bench.job(Direction.SAVE, [0, 1, NUM_BLOCKS], [0, 1, 2])

        result = bench.finish(job)[job.job_id]

        assert result.nbytes == 2 * bench.layout.page_bytes
        assert result.seconds >= 0

    def test_an_empty_job_is_reported_like_any_other(self, bench: TransferBench) -> None:
        job = bench.job(Direction.LOAD, [], [])

        assert bench.finish(job)[job.job_id].failed == frozenset()
        assert bench.backend.run(bench.job(Direction.SAVE, [], [])).nbytes == 0

    def test_poll_reports_nothing_where_nothing_was_submitted(self, bench: TransferBench) -> None:
        assert bench.backend.poll() == []

    # -- what cannot be copied --------------------------------------------------------

    @pytest.mark.parametrize("direction", list(Direction))
    @pytest.mark.parametrize(
        ("block", "slot"),
        [(-1, 1), (NUM_BLOCKS, 1), (1 << 40, 1), (4, -1), (4, NUM_SLOTS), (4, 1 << 40)],
    )
    def test_a_page_that_cannot_be_copied_fails_alone(
        self, bench: TransferBench, direction: Direction, block: int, slot: int
    ) -> None:
        storage, slots = bench.read_storage(), bench.pool.slots.copy()
        job = bench.job(direction, [0, block, 2], [6, slot, 3])

        result = bench.finish(job)[job.job_id]

        assert result.failed == frozenset({1})
        for good_block, good_slot in ((0, 6), (2, 3)):
            where = addresses(bench.layout, good_block)
            if direction is Direction.SAVE:
                slots[good_slot] = storage[where]
            else:
                storage[where] = slots[good_slot]
        assert np.array_equal(bench.read_storage(), storage)
        assert np.array_equal(bench.pool.slots, slots)

    def test_run_reports_failures_like_submit(self, bench: TransferBench) -> None:
        result = bench.backend.run(bench.job(Direction.LOAD, [0, 1, 2], [-1, 0, NUM_SLOTS]))

        assert result.failed == frozenset({0, 2})
        assert bench.page(1) == bench.slot(0)

    def test_a_backend_goes_on_after_a_job_that_failed_as_a_whole(
        self, bench: TransferBench
    ) -> None:
        saved = bench.page(1)
        bad = bench.job(Direction.SAVE, [-1, NUM_BLOCKS], [0, 1])
        good = bench.job(Direction.SAVE, [1], [1])

        results = bench.finish(bad, good)

        assert results[bad.job_id].failed == frozenset({0, 1})
        assert results[good.job_id].failed == frozenset()
        assert bench.slot(1) == saved

    # -- the end ----------------------------------------------------------------------

    def test_drain_waits_for_every_job_and_may_be_called_again(self, bench: TransferBench) -> None:
        bench.backend.drain()
        jobs = [bench.job(Direction.SAVE, range(NUM_BLOCKS), range(NUM_BLOCKS)) for _ in range(20)]
        for job in jobs:
            bench.backend.submit(job)

        bench.backend.drain()
        bench.backend.drain()

        assert len(bench.backend.poll()) == 20
        assert bench.backend.poll() == []

    def test_pages_of_a_smaller_group_leave_the_rest_of_their_slots(self) -> None:
        """Two page groups share the same blocks, as attention layers and Mamba layers do in one
        block pool."""
        whole = page_layout([Placement(3, NUM_BLOCKS * 64, 64, 0)], NUM_BLOCKS)
        part = page_layout([Placement(1, NUM_BLOCKS * 64, 64, NUM_BLOCKS * 64)], NUM_BLOCKS)
        content = np.random.default_rng(1).integers(0, 256, whole.storage_bytes, dtype=np.uint8)
        storage = self.make_storage(whole.storage_bytes)
        self.write(storage, content)
        with closing(self.make_pool(NUM_SLOTS, whole.page_bytes)) as pool:
            pool.slots[:] = 9
            with closing(self.make_backend([whole, part], storage, pool)) as backend:
                blocks, slots = (1, 2, 4), (5, 6, 0)
                result = backend.run(CopyJob(1, Direction.SAVE, blocks, slots, group=1))
                backend.drain()
                assert (result.failed, result.nbytes) == (frozenset(), 3 * part.page_bytes)
                for block, slot in zip(blocks, slots, strict=True):
                    mine = content[addresses(part, block)]
                    assert (pool.slots[slot, : part.page_bytes] == mine).all()
                    assert (pool.slots[slot, part.page_bytes :] == 9).all()
                backend.run(CopyJob(2, Direction.LOAD, (3, 0, 6), slots, group=1))
                backend.drain()
                after = content.copy()
                for block, other in zip(blocks, (3, 0, 6), strict=True):
                    after[addresses(part, other)] = content[addresses(part, block)]
                assert (self.read(storage) == after).all()

    def test_close_finishes_what_was_submitted_and_leaves_no_thread(
        self, layout: PageLayout
    ) -> None:
        before = set(threading.enumerate())
        storage = self.make_storage(layout.storage_bytes)
        self.write(storage, np.full(layout.storage_bytes, 7, dtype=np.uint8))
        with closing(self.make_pool(NUM_SLOTS, layout.page_bytes)) as pool:
            backend = self.make_backend([layout], storage, pool)
            backend.submit(CopyJob(1, Direction.SAVE, (0, 1), (2, 3)))

            backend.close()
            backend.close()

            assert (pool.slots[2:4] == 7).all()
            assert set(threading.enumerate()) <= before
