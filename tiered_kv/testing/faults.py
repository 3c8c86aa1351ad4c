"""A transfer backend whose copies go wrong when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

NO_SLOT = -1
"""A slot that no pool has: its copy fails."""


class FaultyTransfer(TransferBackend):
    """Passes jobs on to ``inner``, but for the faults asked for.

    Each fault strikes one job and is then spent, so that what comes after it is right
    again. Faults may be asked for from any thread; the rest as for every backend.

    Attributes:
        struck: faults spent so far, for a test that must know that its fault happened.
        held: jobs kept back.
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
        """The next job of that direction fails at ``indices``, or everywhere.

        Nothing is copied for them, so the destination keeps what it held.
        """
        self._failures[direction].append(None if indices is None else frozenset(indices))

    def corrupt_next_load(self) -> None:
        """The next load delivers wrong bytes and reports that all went well.

        Every page of the load arrives with the bytes of the page before it: bytes that a
        model can compute with, and that are wrong. A page loaded alone does not arrive:
        its block keeps the bytes of whoever had it before.
        """
        self._corruptions.append(None)

    def hold(self, direction: Direction) -> None:
        """Keep back what is submitted in that direction until ``let_go``, as if its copies were
        slow. Whoever waits for them lets them go."""
        self._slow = direction

    def let_go(self) -> None:
        """Begin the copies that were kept back; no others are."""
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
