"""Jobs between two turns: what was decided for each, and what comes of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.policies.base import Costs, Decision, JobKey, ToolUse, TurnEnd, TurnPolicy
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.distribution import Forecast

from .cost_model import Prices

LONGEST_S = 4 * 3600.0
"""A job silent for so long is not waited for any longer: its gap is censored."""
MARK_EVERY = 8
"""Blocks between two marks of a context: with fewer, what waits would take more memory."""
MOST = 8192
"""Jobs waited for; of more, the one that waits the longest is not waited for any longer."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What tells how far two contexts agree: the hash of every so many blocks, each of which
    covers all before it."""

    hashes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, block_hashes: Sequence[bytes]) -> Marks:
        return cls(tuple(block_hashes[MARK_EVERY - 1 :: MARK_EVERY]))

    def common_blocks(self, other: Marks) -> int:
        """Blocks with which both begin, in steps of ``MARK_EVERY``."""
        return MARK_EVERY * bisect_left(
            range(min(len(self.hashes), len(other.hashes))),
            True,
            key=lambda at: self.hashes[at] != other.hashes[at],
        )


@dataclass(slots=True)
class Wait:
    """A job whose last turn ended.

    Attributes:
        pages: of its context, first to last, while it is not decided for good what becomes of
            them; those of all who wait would take much memory. saved: whether there were any.
        marks: of its context, see ``Marks``.
        save: the order that saves the last of them, if there is one.
        since: when the turn ended, on the scheduler half's clock.
        unread: whether the tool call is still being read.
        pinned: blocks that were pinned for it.
    """

    request_id: str
    end: TurnEnd
    costs: Costs
    decision: Decision
    pages: Sequence[PageKey]
    marks: Marks
    save: OrderId | None
    since: float
    unread: bool
    saved: bool
    pinned: int = 0


class Waits:
    """Asks the policy, and tells it what became of its decisions. One thread.

    Args:
        order: of the pages in CPU memory, which is told who waits for which.
    """

    def __init__(
        self, policy: TurnPolicy, prices: Prices, order: ByWorth, clock: Callable[[], float]
    ) -> None:
        self.policy = policy
        self._prices = prices
        self._order = order
        self._clock = clock
        self._waits: OrderedDict[JobKey, Wait] = OrderedDict()  # the longest waiting first
        self._by_request: dict[str, JobKey] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def begin(
        self,
        request_id: str,
        end: TurnEnd,
        pages: Sequence[PageKey],
        marks: Marks,
        save: OrderId | None,
        *,
        unread: bool,
        away: bool,
    ) -> Wait:
        """A turn ended: decide where its KV waits.

        Args:
            away: whether the job is waited for now: no other turn of it is running, and this
                one got as far as having KV.
        """
        costs = self._prices.costs(end.context_tokens, end.job)
        decision = self.policy.decide(end, costs)
        now = self._clock()
        saved = bool(pages)
        wait = Wait(request_id, end, costs, decision, pages, marks, save, now, unread, saved)
        if end.job is not None and away:
            self._waits[end.job] = wait
            self._waits.move_to_end(end.job)
            if unread:
                self._by_request[request_id] = end.job
            self._rank(wait)
        return wait

    def read(self, request_id: str, tool: ToolUse) -> Wait | None:
        """The turn's tool call was read: decide anew. None if nobody waits any more."""
        job = self._by_request.pop(request_id, None)
        wait = self._waits.get(job) if job is not None else None
        if wait is None or wait.request_id != request_id:
            return None
        wait.end, wait.unread = replace(wait.end, tool=tool), False
        wait.decision = self.policy.decide(wait.end, wait.costs)
        self._rank(wait)
        return wait

    def _rank(self, wait: Wait) -> None:
        job, forecast = wait.end.job, wait.decision.forecast
        if job is not None and forecast is None:
            self._order.lose(job)
        elif job is not None and forecast is not None and wait.pages:
            page_s = wait.costs.recompute_s / len(wait.pages)
            self._order.waits(job, wait.pages, forecast, wait.since, page_s)

    def returned(self, job: JobKey) -> tuple[Wait, float] | None:
        """The job's next turn arrived: what it was waiting with, and for how long. None if it
        was not waited for."""
        self._order.back(job)
        return self._end(job, ended=True)

    def over(self, job: JobKey, own: Sequence[PageKey] = ()) -> tuple[Wait, float] | None:
        """The job is not waited for any longer; if it was, what with and for how long.

        Args:
            own: pages of its last turn that no other job begins with.
        """
        self._order.over(job, own)
        return self._end(job, ended=False)

    def _end(self, job: JobKey, *, ended: bool) -> tuple[Wait, float] | None:
        wait = self._waits.pop(job, None)
        if wait is None:
            return None
        self._by_request.pop(wait.request_id, None)
        gap_s = self._clock() - wait.since
        if not wait.end.aborted:  # what follows then is a client that tries again
            self.policy.observe(wait.end, gap_s, ended=ended)
        return wait, gap_s

    def forecast(self, job: JobKey) -> Forecast | None:
        """Forecast of a job's gap, from its begin; None if there is no wait or no forecast."""
        wait = self._waits.get(job)
        return wait.decision.forecast if wait is not None else None

    def oldest_late(self) -> JobKey | None:
        """A job that has been silent for too long, or for longest while too many are."""
        oldest = next(iter(self._waits.values()), None)
        if oldest is None:
            return None
        late = len(self._waits) > MOST or self._clock() - oldest.since >= LONGEST_S
        return oldest.end.job if late else None

    def lose(self, job: JobKey) -> None:
        """A turn of the job ended before it had any KV."""
        self._order.lose(job)

    def forget_pages(self) -> None:
        """A cache reset: what jobs wait with is gone, the waiting goes on."""
        for job, wait in self._waits.items():
            self._order.over(job)
            wait.pages, wait.marks, wait.save, wait.saved = (), Marks(), None, False

    def jobs(self) -> list[JobKey]:
        """Those that are waited for."""
        return list(self._waits)
