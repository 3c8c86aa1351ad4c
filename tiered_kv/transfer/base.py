"""Contract of transfer backends, which move pages between VRAM and the CPU pool.

The worker half submits jobs from the engine's thread and polls for their results; the backend moves
the bytes on its own threads or streams. Backends are tested by subclassing
``tiered_kv.testing.conformance.transfer.TransferConformance``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Direction of a copy."""

    SAVE = "save"
    """Copy from VRAM to a CPU slot."""
    LOAD = "load"
    """Copy from a CPU slot to VRAM."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy ``blocks[i]`` of a page group to ``slots[i]``, or in the opposite direction.

    No two jobs in flight may write the same block or slot, and no job may write a block or slot
    that another job reads. The scheduler half guarantees this, because it reserves blocks and slots
    until their job is reported.

    Raises:
        ValueError: the numbers of blocks and of slots differ.
    """

    job_id: int
    direction: Direction
    blocks: Sequence[int]
    slots: Sequence[int]
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.slots):
            raise ValueError(
                f"a copy job has {len(self.blocks)} blocks, but {len(self.slots)} slots"
            )


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of a finished copy job.

    Attributes:
        failed: indices of the pages that were not copied completely, whose targets have undefined
            contents.
        nbytes: bytes copied.
        seconds: duration of the copy, seconds; 0 if unknown.
    """

    job_id: int
    failed: frozenset[int]
    nbytes: int
    seconds: float

    @classmethod
    def refusal(cls, job: CopyJob) -> CopyResult:
        """Return the result of a job of which no page was copied."""
        return cls(job.job_id, frozenset(range(len(job.blocks))), 0, 0.0)


class TransferBackend(ABC):
    """Copies whole pages. All methods are called on one thread: the engine's thread, or another
    thread that has its own backend."""

    def fence(self) -> AbstractContextManager[None]:
        """Return a context manager that orders copies after the work that the engine has enqueued
        so far. Called on the engine's thread. Another thread with its own backend enters the
        context manager once: copies that it submits within ``with fence:`` wait for this work, as
        they do on the engine's thread."""
        return nullcontext()

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Start a copy and return immediately.

        A SAVE reads the blocks as written by the work enqueued so far. A LOAD writes the blocks
        after that work has read them. Never raises: an impossible copy is reported as failed.
        """

    @abstractmethod
    def run(self, job: CopyJob) -> CopyResult:
        """Perform a copy that is visible to work enqueued after this call. May block."""

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Return the results of the jobs that finished since the last call, each result once. Does
        not block."""

    @abstractmethod
    def drain(self) -> None:
        """Block until every submitted job is finished. ``poll`` then reports these jobs."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then stop threads and free streams. Idempotent."""
