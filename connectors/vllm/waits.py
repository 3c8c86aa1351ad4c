"""Jobs between two turns: what was decided for each, and what comes of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiered_kv.connectors.vllm.prices import Prices
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.policies.eviction import ByWorth
from tiered_kv.policies.signals import Costs, Decision, JobKey, ToolUse, TurnEnd, TurnPolicy

LONGEST_S = 4 * 3600.0
"""A job silent for so long is not waited for any longer: its gap is censored."""


@dataclass(slots=True)
class Wait:
    """A job whose last turn ended.

    Attributes:
        pages: of its context, first to last.
        save: the order that saves the last of them, if there is one.
        since: when the turn ended, on the scheduler half's clock.
        unread: whether the tool call is still being read.
    """

    request_id: str
    end: TurnEnd
    costs: Costs
    decision: Decision
    pages: Sequence[PageKey]
    save: OrderId | None
    since: float
    unread: bool


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
        save: OrderId | None,
        *,
        unread: bool,
    ) -> Wait:
        """A turn ended: decide where its KV waits."""
        costs = self._prices.costs(end.context_tokens)
        decision = self.policy.decide(end, costs)
        now = self._clock()
        wait = Wait(request_id, end, costs, decision, pages, save, now, unread)
        if end.job is not None and not end.is_last_step:
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
        if job is not None and forecast is not None and wait.pages:
            page_s = wait.costs.recompute_s / len(wait.pages)
            self._order.waits(job, wait.pages, forecast, wait.since, page_s)

    def returned(self, job: JobKey) -> tuple[Wait, float] | None:
        """The job's next turn arrived: what it was waiting with, and for how long. None if it
        was not waited for."""
        wait = self._pop(job)
        if wait is None:
            return None
        gap_s = self._clock() - wait.since
        self.policy.observe(wait.end, gap_s, ended=True)
        return wait, gap_s

    def over(self, job: JobKey) -> tuple[Wait, float] | None:
        """The job is not waited for any longer; if it was, what with and for how long."""
        self._order.over(job)
        wait = self._pop(job)
        if wait is None:
            return None
        gap_s = self._clock() - wait.since
        self.policy.observe(wait.end, gap_s, ended=False)
        return wait, gap_s

    def oldest_late(self) -> JobKey | None:
        """A job that has been silent for too long."""
        oldest = next(iter(self._waits.values()), None)
        if oldest is None or self._clock() - oldest.since < LONGEST_S:
            return None
        return oldest.end.job

    def forget_pages(self) -> None:
        """A cache reset: what jobs wait with is gone, the waiting goes on."""
        for job, wait in self._waits.items():
            self._order.over(job)
            wait.pages, wait.save = (), None

    def jobs(self) -> list[JobKey]:
        """Those that are waited for."""
        return list(self._waits)

    def _pop(self, job: JobKey) -> Wait | None:
        wait = self._waits.pop(job, None)
        if wait is not None:
            self._by_request.pop(wait.request_id, None)
        return wait
