"""Placement: the policy is asked where a turn's KV waits, and told what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.base import EvictionOrder
from tiered_kv.policies.base import JobKey, ToolUse, TurnEnd, TurnPolicy

from .cost_model import CostModel
from .open_gaps import OpenGap, OpenGaps, PrefixSketch


class KvPlacement:
    """Asks the policy, and keeps the order of eviction informed. One thread.

    Args:
        order: ranks the pages in CPU memory; it is told which job waits for which.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: TurnPolicy,
        gaps: OpenGaps,
        cost_model: CostModel,
        order: EvictionOrder,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._gaps = gaps
        self._cost_model = cost_model
        self._order = order
        self._clock = clock

    @property
    def reads_tools(self) -> bool:
        """True if a turn's tool makes a difference to the policy."""
        return self._policy.reads_tools

    def decide(
        self,
        request_id: str,
        end: TurnEnd,
        pages: Sequence[PageKey],
        sketch: PrefixSketch,
        save: OrderId | None,
        *,
        unread: bool,
        away: bool,
    ) -> OpenGap:
        """Decide where the KV of a turn that ended waits.

        Args:
            away: True if the job's gap opens: no other turn of it is running, and this one got as
                far as having KV.
        """
        costs = self._cost_model.costs(end.context_tokens, end.job)
        decision = self._policy.decide(end, costs)
        now = self._clock()
        saved = bool(pages)
        gap = OpenGap(request_id, end, costs, decision, pages, sketch, save, now, unread, saved)
        if end.job is not None and away:
            self._gaps.open(end.job, gap)
            self._rank(gap)
        return gap

    def revise(self, request_id: str, tool: ToolUse) -> OpenGap | None:
        """Decide anew, now that the turn's tool call was read. None if its gap was closed."""
        gap = self._gaps.take_unread(request_id)
        if gap is None:
            return None
        gap.end, gap.unread = replace(gap.end, tool=tool), False
        gap.decision = self._policy.decide(gap.end, gap.costs)
        self._rank(gap)
        return gap

    def settle(self, gap: OpenGap) -> None:
        """Forget the pages of a gap that was decided for good, and its request's name, which a
        client may have made as long as it likes."""
        gap.pages, gap.request_id = (), ""

    def _rank(self, gap: OpenGap) -> None:
        job, forecast = gap.end.job, gap.decision.forecast
        if job is not None and forecast is None:
            self._order.on_forecast_lost(job)
        elif job is not None and forecast is not None and gap.pages:
            page_s = gap.costs.recompute_s / len(gap.pages)
            self._order.on_gap_begun(job, gap.pages, forecast, gap.since, page_s)

    def on_returned(self, job: JobKey) -> tuple[OpenGap, float] | None:
        """Close a job's gap: its next turn arrived. The gap with its length in seconds; None if
        there was none."""
        self._order.on_gap_ended(job)
        return self._close(job, ended=True)

    def on_admitted(self, job: JobKey) -> None:
        """Have pages of a job go from CPU memory like those that nobody waits for: VRAM has its
        context, and a tier below keeps what is evicted."""
        self._order.on_forecast_lost(job)

    def on_over(self, job: JobKey, own: Sequence[PageKey] = ()) -> tuple[OpenGap, float] | None:
        """Close a job's gap as censored: it is not waited for any longer.

        Args:
            own: pages of its last turn that no other job begins with.
        """
        self._order.on_job_ended(job, own)
        return self._close(job, ended=False)

    def _close(self, job: JobKey, *, ended: bool) -> tuple[OpenGap, float] | None:
        gap = self._gaps.close(job)
        if gap is None:
            return None
        gap_s = self._clock() - gap.since
        if not gap.end.aborted:  # what follows then is a client that tries again
            self._policy.observe(gap.end, gap_s, ended=ended)
        return gap, gap_s

    def on_lost(self, job: JobKey) -> None:
        """Forget the job's pages: a turn of it ended before it had any KV."""
        self._order.on_forecast_lost(job)

    def forget_pages(self) -> None:
        """Forget all pages after a cache reset; the gaps stay open."""
        for job in self._gaps.jobs():
            self._order.on_job_ended(job)
            gap = self._gaps[job]
            gap.pages, gap.sketch, gap.save, gap.saved = (), PrefixSketch(), None, False
