"""A transfer backend whose copies fail, are held back, or deliver wrong bytes, on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

NO_SLOT = -1
"""A slot number that does not exist in any pool, so that its copy fails."""


class FaultyTransfer(TransferBackend):
    """Passes jobs on to ``inner``, except for requested faults.

    Each fault affects one job. Faults may be requested from any thread. Apart from the faults,
    this class keeps the contract of ``TransferBackend``.

    Attributes:
        struck: number of faults that have occurred, so that a test can check that its fault did.
        held: number of jobs that are held back.
    """

    def __init__(self, inner: TransferBackend) -> None:
        self.inner = inner
        self.struck = 0
        self._failures: dict[Direction, deque[frozenset[int] | None]] = {
            direction: deque() for direction in Direction
        }
        self._corruptions: deque[None] = deque()
        self._slow: Direction | None = None
        self._kept_back: deque[CopyJob] = deque()

    def fail_next(self, direction: Direction, indices: Collection[int] | None = None) -> None:
        """Make the next job in that direction fail for the pages at ``indices``, or for all pages.

        The failed pages are not copied, so the destination keeps its old bytes.
        """
        self._failures[direction].append(None if indices is None else frozenset(indices))

    def corrupt_next_load(self) -> None:
        """Make the next load deliver wrong bytes and report success.

        Each page of the load receives the bytes of the previous page, which are plausible KV. A
        load of a single page copies nothing: the block keeps its old bytes.
        """
        self._corruptions.append(None)

    def hold(self, direction: Direction) -> None:
        """Hold back submitted jobs in that direction until ``let_go``, as if their copies were
        slow. ``drain`` and ``close`` release the jobs too. Jobs passed to ``run`` are not held
        back. Only one direction can be held back at a time.
        """
        self._slow = direction

    def let_go(self) -> None:
        """Start the copies that are held back, and stop holding copies back."""
        self._slow = None
        while self._kept_back:
            self.inner.submit(self._kept_back.popleft())

    @property
    def held(self) -> int:
        return len(self._kept_back)

    def submit(self, job: CopyJob) -> None:
        job = self._spoil(job)
        if job.direction is self._slow:
            self._kept_back.append(job)
        else:
            self.inner.submit(job)

    def run(self, job: CopyJob) -> CopyResult:
        return self.inner.run(self._spoil(job))

    def poll(self) -> list[CopyResult]:
        return self.inner.poll()

    def drain(self) -> None:
        self.let_go()
        self.inner.drain()

    def close(self) -> None:
        self.let_go()
        self.inner.close()

    def _spoil(self, job: CopyJob) -> CopyJob:
        if self._failures[job.direction]:
            self.struck += 1
            chosen = self._failures[job.direction].popleft()
            job = replace(
                job,
                slots=[
                    NO_SLOT if chosen is None or i in chosen else slot
                    for i, slot in enumerate(job.slots)
                ],
            )
        if job.direction is Direction.LOAD and self._corruptions:
            self.struck += 1
            self._corruptions.popleft()
            if len(job.blocks) < 2:
                return replace(job, blocks=(), slots=())
            job = replace(job, slots=[*job.slots[-1:], *job.slots[:-1]])
        return job
