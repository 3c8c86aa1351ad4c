"""The contract of a transfer backend: what moves pages between VRAM and the CPU pool.

The worker half submits jobs from the engine's thread and polls for what became of them;
the backend moves bytes on threads or streams of its own. Backends are tested by
subclassing ``tiered_kv.testing.transfer.TransferConformance``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    SAVE = "save"
    """VRAM → CPU slot."""
    LOAD = "load"
    """CPU slot → VRAM."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy ``blocks[i]`` of a page group to ``slots[i]``, or the other way round.

    No two jobs under way may write the same block or slot, nor one write what another
    reads: the planner's two phases see to that.
    """

    job_id: int
    direction: Direction
    blocks: Sequence[int]
    slots: Sequence[int]
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.slots):
            raise ValueError(f"{len(self.blocks)} blocks for {len(self.slots)} slots")


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A finished job.

    Attributes:
        failed: indices whose bytes must not be trusted.
        nbytes: bytes copied.
        seconds: time spent copying; 0 when unknown.
    """

    job_id: int
    failed: frozenset[int]
    nbytes: int
    seconds: float


class TransferBackend(ABC):
    """Moves whole pages. All methods are called on the engine's thread."""

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Begin a copy and return at once.

        A SAVE reads what the work enqueued so far has written to the blocks; a LOAD
        writes after that work has read them. Never raises: a copy that cannot be made
        is reported as failed.
        """

    @abstractmethod
    def run(self, job: CopyJob) -> CopyResult:
        """Make a copy that work enqueued after this call will see. May block."""

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Jobs finished since the last call, each reported once. Does not block."""

    @abstractmethod
    def drain(self) -> None:
        """Block until every submitted job is finished; ``poll`` then reports them."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then stop threads and free streams. Idempotent."""
