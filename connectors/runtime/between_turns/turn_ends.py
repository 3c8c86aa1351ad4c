"""Between two turns: where each job's KV waits, from the end of a turn until the next one arrives.

The policy is asked where it waits, and told what came of it. A pin must be taken while a turn ends,
before its tool call can be read: so it is provisional, and the decision is revised once the call
was read, off this thread. Contexts in lower tiers are promoted before their job is expected back.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiered_kv.connectors.runtime.base import Request
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.job_table import Job, JobTable, KnownJobs
from tiered_kv.connectors.runtime.parts import AdmissionGroup, Pages
from tiered_kv.connectors.runtime.turn import NO_GAP, EndedGap, Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.base import EvictionOrder
from tiered_kv.policies.base import (
    Decision,
    GapClass,
    JobKey,
    Tier,
    ToolUse,
    TurnEnd,
    TurnPolicy,
    job_scope,
)
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.policies.pins.release_order import pin_value
from tiered_kv.policies.tools.calls import ToolCall
from tiered_kv.policies.tools.tool_use import tool_use
from tiered_kv.trace.turn_record import PinEnd, StoryEnd

from .cost_model import CostModel
from .open_gaps import OpenGap, OpenGaps, PrefixSketch
from .turn_log import TurnLog

PROVISIONAL_S = 2.0
"""Seconds that a turn is pinned at most while its tool call is being read: its blocks are gone
right after the turn's end if they are not pinned."""
MOST_RECENT = 256
"""Decisions that are remembered."""


class Kind(NamedTuple):
    """Kind of a decision: the class of its gap, None without classes, and its tier."""

    gap_class: GapClass | None
    tier: Tier


class RecentDecisions:
    """The last decisions. One thread."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, Kind]] = deque()
        self._counts: Counter[Kind] = Counter()

    def __len__(self) -> int:
        return len(self._last)

    def add(self, decision: Decision, now: float) -> None:
        """Remember a decision, and forget the oldest of too many."""
        kind = Kind(decision.gap_class, decision.tier)
        self._last.append((now, kind))
        self._counts[kind] += 1
        if len(self._last) > MOST_RECENT:
            _, oldest = self._last.popleft()
            self._counts[oldest] -= 1

    @property
    def since(self) -> float | None:
        """Time of the oldest that is remembered; None if there is none."""
        return self._last[0][0] if self._last else None

    def counts(self) -> Iterator[tuple[Kind, int]]:
        """Number of decisions of each kind, the most frequent first."""
        return ((kind, times) for kind, times in self._counts.most_common() if times)


SPARE_ENTRIES = 64
"""Entries of jobs that are no longer expected which the heap may keep beyond one for each job that
is. The time that a client names may be days ahead."""


class PrefetchQueue:
    """Contexts by the time they should come up. One thread; no clock.

    Whoever takes one out orders its promotion: when it is due, or ahead of that if the engine
    falls idle, since no hook runs then.
    """

    def __init__(self) -> None:
        self._keys: dict[JobKey, tuple[float, Sequence[PageKey]]] = {}
        self._heap: list[tuple[float, JobKey]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def expect(self, job: JobKey, due: float, keys: Sequence[PageKey]) -> None:
        """Expect the job back soon after ``due``, in place of the time before."""
        self._keys[job] = (due, keys)
        heapq.heappush(self._heap, (due, job))
        if len(self._heap) > 2 * len(self._keys) + SPARE_ENTRIES:
            self._heap = [(due, job) for job, (due, _) in self._keys.items()]
            heapq.heapify(self._heap)

    def forget(self, job: JobKey) -> None:
        """Expect the job no longer. Unknown jobs are ignored."""
        self._keys.pop(job, None)

    def take(self, until: float) -> list[tuple[JobKey, float, Sequence[PageKey]]]:
        """Take out the contexts that are due until then, in that order: job, time and pages."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            due, job = heapq.heappop(self._heap)
            found = self._keys.get(job)
            if found is not None and found[0] == due:
                del self._keys[job]
                taken.append((job, *found))
        return taken


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

    def forget_pages(self) -> None:
        """Forget all pages after a cache reset; the gaps stay open."""
        for job in self._gaps.jobs():
            self._order.on_job_ended(job)
            gap = self._gaps[job]
            gap.pages, gap.sketch, gap.save, gap.saved = (), PrefixSketch(), None, False


IDLE_AHEAD_S = 3600.0
"""An engine that falls idle promotes what is due in this time: no hook may run until then."""


class Arrival(NamedTuple):
    """A turn that arrives.

    Attributes:
        job: None if it belongs to none.
        gap: the gap that it ends.
    """

    job: Job | None = None
    gap: EndedGap = NO_GAP


class TurnEnds:
    """Jobs, and the KV of each between its turns.

    Attributes:
        jobs: the jobs that have been seen.
        open: the open gaps of jobs.
        prefetch: contexts in the tiers below that are to come up in time.
        decided: what was decided of late, for good.
    """

    def __init__(
        self,
        deps: Dependencies,
        engine: EngineState,
        pages: Pages,
        admission: AdmissionGroup,
        gaps: OpenGaps,
        costs: CostModel,
        log: TurnLog,
    ) -> None:
        self.jobs = JobTable()
        self.open = gaps
        self.prefetch = PrefetchQueue()
        self.decided = RecentDecisions()
        self._facts = engine.facts
        self._lineage = Lineage(engine.facts.hash_tokens)
        self._policy, self._pages = deps.policy, pages
        self._placement = KvPlacement(deps.policy, gaps, costs, pages.order, engine.clock)
        self._cost_model = costs
        self._pins = admission.pins
        self._boundaries = admission.boundaries
        self._gate = admission.gate
        self._tools = deps.tools
        self._known = KnownJobs(deps.notebook, self.jobs, self._lineage, engine.clock, deps.wall)
        self._policy_state = deps.policy_state
        self._log = log
        self._trace = log.trace
        self._counters = engine.counters
        self._clock = engine.clock

    # -- a turn arrives -------------------------------------------------------------

    def on_arrived(self, request: Request, hints: TurnHints) -> Arrival:
        """Find the job of a turn that arrives, and end that one's gap."""
        self.apply_tool_calls()  # the gap that ends here may be of one that was read meanwhile
        key = self._job_of(request, hints)
        if key is None:
            return Arrival()
        blocks = self._facts.blocks(request.num_prompt_tokens)
        self._known.find(key)
        job = self.jobs.turn_arrived(key, request.request_id, self._clock(), blocks)
        self._counters.add("concurrent_turns", len(job.running) > 1)
        self.prefetch.forget(key)
        back = self._placement.on_returned(key)
        if back is None:
            return Arrival(job)
        gap, gap_s = back
        self._gap_over(gap)
        self._log.returned(gap, gap_s)
        self.jobs.gap_ended(job, gap.decision)
        self._trace.over(key, gap_s, StoryEnd.RETURNED, in_vram=key in self._pins)
        self._pins.on_arrived(key)
        shared = 0
        if not gap.end.aborted:  # how far that had come is not known
            sketch = PrefixSketch.of(request.block_hashes)
            shared = gap.sketch.common_blocks(sketch)
            if not shared and gap.sketch.hashes and sketch.hashes:
                self._pins.release(key, PinEnd.RETURNED)  # or another text would wait for its pin
        decision = gap.decision
        in_vram = decision.tier is Tier.PIN and gap.pinned > 0 and gap_s < decision.ttl_s
        kept = in_vram or (gap.saved and decision.tier is not Tier.DROP)
        return Arrival(job, EndedGap(gap.end.context_tokens, shared, kept, gap.saved))

    def _job_of(self, request: Request, hints: TurnHints) -> JobKey | None:
        """The job that the client names, or that the prompt tells."""
        salt = job_scope(request.cache_salt)
        if hints.job_id is not None:
            key = JobKey(salt, hints.job_id)
            self._lineage.forget(key)  # it was adopted, and its client names it
            return key
        prompt = request.prompt_token_ids
        if prompt is None or not request.text_only:  # tokens alone do not tell such prompts apart
            return None
        inferred = self._lineage.arrived(salt, request.block_hashes, prompt)
        if inferred is None:
            return None
        self._counters.add("jobs_inferred", inferred.turn == 1)
        return inferred.job

    def on_admitted(self, turn: Turn) -> None:
        """Take in that a turn has its first blocks."""
        self._cost_model.on_admitted(turn)
        if turn.job is not None and self._pages.book.stores:
            # VRAM has its context, and a tier below keeps what CPU memory evicts.
            self._pages.order.on_forecast_lost(turn.job.key)

    def adopt(self, end: TurnEnd, named: Request, pages: Sequence[PageKey]) -> None:
        """Take in a job that comes from elsewhere, or from another job: it waits for its next turn.

        Args:
            end: the end of its last turn. It is said to be aborted: how long the job was away
                teaches nothing of gaps.
            named: a request of its context that never runs.
            pages: its pages, first to last.
        """
        assert end.job is not None
        blocks = self._facts.blocks(end.context_tokens)
        self.jobs.adopt(end.job, self._clock(), blocks, end.turn)
        prompt, answer = end.context_tokens - end.output_tokens, named.all_token_ids
        self._lineage.adopt(end.job, end.turn, named.block_hashes, answer[:prompt], answer[prompt:])
        sketch = PrefixSketch.of(named.block_hashes)
        gap = self._placement.decide(
            named.request_id, end, pages, sketch, None, unread=False, away=True
        )
        gap.pages, gap.request_id = (), ""

    # -- a turn ends ----------------------------------------------------------------

    def on_ended(self, turn: Turn) -> dict[str, Any] | None:
        """Decide where the KV of a turn that ended waits, and see to it; returns the answer to its
        client."""
        pages, save, has_kv = turn.save.pages, turn.save.last, turn.has_kv
        job = turn.job
        if job is not None:
            self.jobs.turn_ended(job, turn.request_id, over=turn.hints.is_last_step)
        end = _turn_end(turn, self._clock())
        away = has_kv and job is not None and not job.running and not end.is_last_step
        unread = away and end.tool is None and self._read_tool(turn, end)
        sketch = PrefixSketch.of(turn.request.block_hashes) if away else PrefixSketch()
        gap = self._placement.decide(
            turn.request_id, end, pages, sketch, save, unread=unread, away=away
        )
        if job is not None:
            if away:
                gap.pinned = self._act(job, turn, gap)
                if not gap.unread:
                    self._settle(gap)
            self._follow_up(job, turn, end, pages)
        if not away and has_kv:
            self._pages.tiers.share(pages[: self._found_by_others(turn)], self._while_saving(save))
        return self._log.turn(turn, gap)

    def _found_by_others(self, turn: Turn) -> int:
        """Pages at the begin of a first turn that others had computed, and a third may want."""
        if turn.number > 1 or self._facts.narrow:
            return 0
        return (turn.source.vram_tokens + turn.source.cpu_tokens) // self._facts.block_size

    def _read_tool(self, turn: Turn, end: TurnEnd) -> bool:
        """Have the tool call read, off this thread; False if nobody would use it."""
        if end.aborted or not self._policy.reads_tools:
            return False
        return self._tools.read(turn.request_id, turn.request.output_token_ids)

    def _act(self, job: Job, turn: Turn, gap: OpenGap) -> int:
        """Carry the decision out; returns the blocks that are pinned."""
        decision = gap.decision
        if gap.unread:  # the blocks are gone right after this hook
            return self._pin(job, turn, gap, min(PROVISIONAL_S, decision.ttl_s or PROVISIONAL_S))
        if decision.tier is Tier.PIN:
            return self._pin(job, turn, gap, decision.ttl_s)
        self._pins.release(job.key, PinEnd.REVISED)
        self._send_down(gap)
        return 0

    def _pin(self, job: Job, turn: Turn, gap: OpenGap, ttl_s: float) -> int:
        blocks = self._boundaries.of(turn)
        value = pin_value(gap.decision.forecast, gap.costs, ttl_s)
        until, whole = self._clock() + ttl_s, self._facts.narrow
        pinned = self._pins.pin(job.key, blocks, until, job.started_at, value, whole=whole)
        self._counters.add("pins", pinned > 0)
        self._counters.add("pins_refused", pinned < len(blocks))
        return pinned

    def _send_down(self, gap: OpenGap) -> None:
        """Send pages to the tiers below, if that was decided, and up again in time."""
        if not self._pages.book.stores or gap.decision.tier is not Tier.STORE:
            return
        gap.sent_down = len(gap.pages)
        self._pages.tiers.send_down(gap.pages, after=self._while_saving(gap.save))
        if gap.end.job is not None and gap.decision.back_s is not None:
            self.prefetch.expect(gap.end.job, gap.since + gap.decision.back_s, gap.pages)

    def _follow_up(self, job: Job, turn: Turn, end: TurnEnd, pages: Sequence[PageKey]) -> None:
        if turn.hints.job_id is None:
            self._lineage.ended(job.key, turn.request.output_token_ids, aborted=end.aborted)
        if not job.running and end.is_last_step:
            self._cost_model.memoryfulness.observe(job.turns)
            self.give_up(job.key, StoryEnd.OVER, pages[job.first_blocks :])
            self._known.forget(job.key)
            return
        self._known.note(job)
        if not job.running and not turn.source.admitted:
            self._pins.release(job.key, PinEnd.GIVEN_UP)  # what the job's last turn left for it
            self._pages.order.on_forecast_lost(job.key)

    def give_up(
        self, job: JobKey, why: StoryEnd = StoryEnd.GIVEN_UP, own: Sequence[PageKey] = ()
    ) -> None:
        """Wait for the job no longer.

        Args:
            own: pages of its last turn that no other job begins with.
        """
        self._pins.release(job, PinEnd.CLOSED if why is StoryEnd.CLOSED else PinEnd.GIVEN_UP)
        self._gate.on_over(job)
        self.prefetch.forget(job)
        if (found := self._placement.on_over(job, own)) is not None:
            gap, gap_s = found
            self._gap_over(gap)
            self._cost_model.memoryfulness.observe(gap.end.turn)
            self._trace.over(job, gap_s, why)

    # -- while they gap --------------------------------------------------------------

    def apply_tool_calls(self) -> None:
        """Decide anew where turns' KV waits whose tool calls were read since the last call."""
        for request_id, tool in self._tools.take():
            gap = self._placement.revise(request_id, tool)
            if gap is None or gap.end.job is None:
                continue
            made = gap.decision
            if made.tier is Tier.PIN:
                value = pin_value(made.forecast, gap.costs, made.ttl_s)
                self._pins.revise(gap.end.job, gap.since + made.ttl_s, value)
            else:
                self._pins.release(gap.end.job, PinEnd.REVISED)
                self._send_down(gap)
            self._settle(gap)

    def _while_saving(self, save: OrderId | None) -> OrderId | None:
        """The save, if it is not over."""
        return save if save is not None and self._pages.book.under_way(save) else None

    def _settle(self, gap: OpenGap) -> None:
        """Take in that a gap was decided for good. The job may return to another engine."""
        if gap.decision.tier is not Tier.DROP and not gap.end.aborted:
            self._pages.tiers.share(gap.pages, self._while_saving(gap.save))
        gap.pages, gap.request_id = (), ""  # a client may have made the name as long as it likes
        self._tell(gap)

    def _gap_over(self, gap: OpenGap) -> None:
        """Tell what was decided of a gap that ended before its tool call was read."""
        if gap.unread:
            self._tell(gap)

    def _tell(self, gap: OpenGap) -> None:
        self._log.decided(gap)
        self.decided.add(gap.decision, self._clock())

    def poll(self) -> None:
        """See to what need not be looked at in every step."""
        if self.prefetch:
            self._bring_back(until=self._clock())
        while (late := self.open.oldest_late(self._clock())) is not None:
            self.give_up(late)
        self._policy_state.save_if_due(self._clock())

    def on_idle(self) -> None:
        """Order ahead: no request is left, and perhaps no hook runs for long."""
        self.apply_tool_calls()
        if self.prefetch:
            self._bring_back(until=self._clock() + IDLE_AHEAD_S)

    def _bring_back(self, until: float) -> None:
        for job, due, pages in self.prefetch.take(until):
            ordered = self._pages.promotions.promote_ahead(pages, due)
            self._trace.brought_up(job, ordered)
            if not ordered and due > self._clock():  # they may yet leave CPU memory
                self.prefetch.expect(job, due, pages)

    def reset(self) -> None:
        """Forget every page; the jobs stay."""
        self._placement.forget_pages()
        self.prefetch = PrefetchQueue()

    def close_all(self) -> None:
        """Wait for nobody any longer. Idempotent."""
        for job in self.open.jobs():
            self.give_up(job, StoryEnd.CLOSED)


def _turn_end(turn: Turn, now: float) -> TurnEnd:
    request = turn.request
    return TurnEnd(
        job=turn.job.key if turn.job else None,
        turn=turn.number,
        is_last_step=turn.hints.is_last_step or (turn.job is not None and turn.job.over),
        aborted=not request.answered,
        context_tokens=request.num_tokens,
        new_tokens=max(0, request.num_prompt_tokens - turn.gap.context_tokens),
        output_tokens=request.num_output_tokens,
        tool=_said_tool(turn.hints),
        ended_at=now,
    )


def _said_tool(hints: TurnHints) -> ToolUse | None:
    """The tool that the client says it runs; None if it says none."""
    if hints.tool_name is None and hints.tool_command is None and hints.expected_s is None:
        return None
    command = hints.tool_command or ""
    call = ToolCall(hints.tool_name or ("bash" if command else "tool"), {}, command)
    return replace(tool_use([call]), expected_s=hints.expected_s)
