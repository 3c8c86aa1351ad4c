"""Open gaps: the jobs between two turns, and what is known of each."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.policies.base import Costs, Decision, JobKey, TurnEnd
from tiered_kv.policies.distribution import Forecast

LONGEST_S = 4 * 3600.0
"""A job silent for so long is not waited for any longer: its gap is censored."""
MOST_OPEN = 8192
"""Open gaps kept; beyond this the oldest is closed as censored: each takes memory."""
SKETCH_EVERY = 8
"""Blocks between two hashes of a sketch: with fewer, open gaps would take more memory."""


@dataclass(frozen=True, slots=True)
class PrefixSketch:
    """A context's beginning, to compare with others: the hash of every so many blocks, each of
    which covers all before it."""

    hashes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, block_hashes: Sequence[bytes]) -> PrefixSketch:
        """The sketch of a context with these blocks."""
        return cls(tuple(block_hashes[SKETCH_EVERY - 1 :: SKETCH_EVERY]))

    def common_blocks(self, other: PrefixSketch) -> int:
        """Blocks with which both begin, in steps of ``SKETCH_EVERY``."""
        return SKETCH_EVERY * bisect_left(
            range(min(len(self.hashes), len(other.hashes))),
            True,
            key=lambda at: self.hashes[at] != other.hashes[at],
        )


@dataclass(slots=True)
class OpenGap:
    """A job whose last turn ended. Written by ``turn_ends``.

    Attributes:
        request_id: its request; empty once the gap was decided for good.
        end: the turn's end.
        costs: costs of each tier then.
        decision: where the turn's KV waits.
        pages: pages of its context, first to last, until that is decided for good; those of all
            open gaps would take much memory.
        sketch: beginning of its context.
        save: the order after which all its pages are in CPU memory; None if they are.
        since: when the turn ended, seconds on the scheduler's clock.
        unread: True while the tool call is being read.
        saved: True if its context has pages outside VRAM.
        pinned: blocks pinned for it.
        sent_down: pages of its context that the decision sent down.
    """

    request_id: str
    end: TurnEnd
    costs: Costs
    decision: Decision
    pages: Sequence[PageKey]
    sketch: PrefixSketch
    save: OrderId | None
    since: float
    unread: bool
    saved: bool
    pinned: int = 0
    sent_down: int = 0


class OpenGaps:
    """Open gaps by job, the oldest first. One thread."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[JobKey, OpenGap] = OrderedDict()
        self._unread: dict[str, JobKey] = {}

    def __len__(self) -> int:
        return len(self._gaps)

    def __getitem__(self, job: JobKey) -> OpenGap:
        return self._gaps[job]

    def get(self, job: JobKey) -> OpenGap | None:
        """A job's open gap; None if there is none."""
        return self._gaps.get(job)

    def holds(self, gap: OpenGap) -> bool:
        """True if that gap is open."""
        return gap.end.job is not None and self._gaps.get(gap.end.job) is gap

    def open(self, job: JobKey, gap: OpenGap) -> None:
        """Begin a job's gap, in place of the one before."""
        self._gaps[job] = gap
        self._gaps.move_to_end(job)
        if gap.unread:
            self._unread[gap.request_id] = job

    def take_unread(self, request_id: str) -> OpenGap | None:
        """The open gap whose tool call was being read for that request; None if it was closed."""
        job = self._unread.pop(request_id, None)
        gap = self._gaps.get(job) if job is not None else None
        return gap if gap is not None and gap.request_id == request_id else None

    def close(self, job: JobKey) -> OpenGap | None:
        """End a job's gap; None if there is none."""
        gap = self._gaps.pop(job, None)
        if gap is not None:
            self._unread.pop(gap.request_id, None)
        return gap

    def forecast(self, job: JobKey) -> Forecast | None:
        """Forecast of a job's gap, from its begin; None if there is no gap or no forecast."""
        gap = self._gaps.get(job)
        return gap.decision.forecast if gap is not None else None

    def oldest_late(self, now: float) -> JobKey | None:
        """A job that has been silent for too long, or for longest while too many are."""
        oldest = next(iter(self._gaps.values()), None)
        if oldest is None:
            return None
        late = now - oldest.since >= LONGEST_S or len(self._gaps) > MOST_OPEN
        return oldest.end.job if late else None

    def jobs(self) -> list[JobKey]:
        """Jobs with an open gap, the oldest first."""
        return list(self._gaps)
