"""Open gaps: the jobs between two turns, and the state of each gap."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.policies.base import Costs, Decision, JobKey, TurnEnd
from tiered_kv.policies.distribution import Forecast

LONGEST_S = 4 * 3600.0
"""Time of silence after which a job is no longer expected, seconds. Its gap is then closed as
censored, because only a lower bound of its length is known."""
MOST_CHILDREN = 256
"""Maximum number of children of a job that are tracked."""
MOST_OPEN = 8192
"""Maximum number of open gaps, to bound memory. If there are more, the oldest gap is closed as
censored."""
SKETCH_EVERY = 8
"""Number of blocks per hash of a sketch, to limit the memory of open gaps."""


@dataclass(frozen=True, slots=True)
class PrefixSketch:
    """The start of a context, for comparison with other contexts: the hash of every
    ``SKETCH_EVERY``-th block. Each hash covers all blocks before its own."""

    hashes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, block_hashes: Sequence[bytes]) -> PrefixSketch:
        """Return the sketch of a context with these block hashes."""
        return cls(tuple(block_hashes[SKETCH_EVERY - 1 :: SKETCH_EVERY]))

    def common_blocks(self, other: PrefixSketch) -> int:
        """Return the length of the common prefix in blocks of ``hash_tokens`` tokens, a multiple of
        ``SKETCH_EVERY``."""
        return SKETCH_EVERY * bisect_left(
            range(min(len(self.hashes), len(other.hashes))),
            True,
            key=lambda at: self.hashes[at] != other.hashes[at],
        )


class Retention(NamedTuple):
    """Key of a retained context in the eviction order. The entry of the job's last context has the
    job's ``JobKey`` as its key.

    Attributes:
        job: the job whose context is retained; its name is empty if the hint named only pages.
        last: the last retained page if the hint named only pages; empty for a job.
    """

    job: JobKey
    last: bytes = b""


@dataclass(slots=True)
class OpenGap:
    """A job whose last turn ended. Written by ``turn_ends``.

    Attributes:
        request_id: id of the turn's request; empty once the decision is final.
        end: the turn's end.
        costs: costs of each tier at that time.
        decision: where the turn's KV is kept.
        pages: pages of the context, first to last; emptied once the decision is final, to save
            memory.
        sketch: sketch of the context.
        save: order after which all pages are in CPU memory; None if they already are.
        since: when the turn ended, seconds on the scheduler's clock.
        news_at: moment from which the durations in the gap's last decision are counted, seconds on
            the scheduler's clock: when the gap started, the first child started, the last child
            ended, or a client revised the gap.
        learned: if a client revised the gap, the turn's end and the time from which the policy
            learns the gap's length, because a revision must not be learned as a shorter gap;
            otherwise None.
        children: jobs that started in this gap as children of this job, and have not ended.
        unread: True while the tool call is being read.
        saved: True if the context has pages outside VRAM.
        pinned: number of blocks pinned for the job.
        sent_down: number of pages that the decision demoted.
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
    news_at: float
    children: set[JobKey] = field(default_factory=set)
    pinned: int = 0
    sent_down: int = 0
    learned: tuple[TurnEnd, float] | None = None


class OpenGaps:
    """Open gaps by job, oldest first. Used on one thread."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[JobKey, OpenGap] = OrderedDict()
        self._unread: dict[str, JobKey] = {}

    def __len__(self) -> int:
        return len(self._gaps)

    def __getitem__(self, job: JobKey) -> OpenGap:
        return self._gaps[job]

    def get(self, job: JobKey) -> OpenGap | None:
        """Return a job's open gap; None if it has none."""
        return self._gaps.get(job)

    def holds(self, gap: OpenGap) -> bool:
        """True if that gap is open."""
        return gap.end.job is not None and self._gaps.get(gap.end.job) is gap

    def open(self, job: JobKey, gap: OpenGap) -> None:
        """Open a job's gap, replacing the previous one."""
        self._gaps[job] = gap
        self._gaps.move_to_end(job)
        if gap.unread:
            self._unread[gap.request_id] = job

    def take_unread(self, request_id: str) -> OpenGap | None:
        """Return the open gap whose tool call was being read for that request; None if it was
        closed."""
        job = self._unread.pop(request_id, None)
        gap = self._gaps.get(job) if job is not None else None
        return gap if gap is not None and gap.request_id == request_id else None

    def close(self, job: JobKey) -> OpenGap | None:
        """Close and return a job's gap; None if it has none."""
        gap = self._gaps.pop(job, None)
        if gap is not None:
            self._unread.pop(gap.request_id, None)
        return gap

    def forecast(self, job: JobKey) -> Forecast | None:
        """Return the forecast of a job's gap, measured from its start; None without a gap or a
        forecast."""
        gap = self._gaps.get(job)
        return gap.decision.forecast if gap is not None else None

    def oldest_late(self, now: float) -> JobKey | None:
        """Return the job of the oldest gap if it has been silent for too long or too many gaps are
        open; otherwise None."""
        oldest = next(iter(self._gaps.values()), None)
        if oldest is None:
            return None
        late = now - oldest.since >= LONGEST_S or len(self._gaps) > MOST_OPEN
        return oldest.end.job if late else None

    def jobs(self) -> list[JobKey]:
        """Return the jobs with an open gap, oldest first."""
        return list(self._gaps)
