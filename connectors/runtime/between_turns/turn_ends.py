"""Work between two turns: where each job's KV is kept, from the end of a turn until the next one.

The policy decides where the KV is kept, and learns the length of the gap. A pin must be taken while
a turn ends, before its tool call can be read on another thread. The pin is therefore provisional,
and the decision is revised once the call has been read. Contexts in lower tiers are promoted before
their job is expected back.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from tiered_kv.connectors.runtime.base import Request
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.job_table import Job, JobTable, KnownJobs, Responses
from tiered_kv.connectors.runtime.pages.promotions import PAGES_A_STEP
from tiered_kv.connectors.runtime.parts import AdmissionGroup, Pages
from tiered_kv.connectors.runtime.turn import NO_GAP, EndedGap, Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.base import EvictionOrder
from tiered_kv.policies.base import (
    NO_TOOL,
    Decision,
    GapClass,
    JobKey,
    Rule,
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
from .open_gaps import MOST_CHILDREN, OpenGap, OpenGaps, PrefixSketch
from .turn_log import TurnLog

PROVISIONAL_S = 2.0
"""Maximum time that a turn's blocks are pinned while its tool call is being read, seconds. Without
a pin, the blocks would be lost right after the turn's end."""
MOST_RECENT = 256
"""Number of recent decisions that are kept."""


class Kind(NamedTuple):
    """A type of decision: the class of the gap (None if the policy has no classes), and the
    tier."""

    gap_class: GapClass | None
    tier: Tier


class RecentDecisions:
    """The most recent decisions. Used on one thread."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, Kind]] = deque()
        self._counts: Counter[Kind] = Counter()

    def __len__(self) -> int:
        return len(self._last)

    def add(self, decision: Decision, now: float) -> None:
        """Record a decision, and forget the oldest one if there are too many."""
        kind = Kind(decision.gap_class, decision.tier)
        self._last.append((now, kind))
        self._counts[kind] += 1
        if len(self._last) > MOST_RECENT:
            _, oldest = self._last.popleft()
            self._counts[oldest] -= 1

    @property
    def since(self) -> float | None:
        """Time of the oldest recorded decision; None without decisions."""
        return self._last[0][0] if self._last else None

    def counts(self) -> Iterator[tuple[Kind, int]]:
        """Yield the number of decisions of each type, the most frequent type first."""
        return ((kind, times) for kind, times in self._counts.most_common() if times)


SPARE_ENTRIES = 64
"""Number of stale heap entries that are tolerated beyond one per expected job. Without a limit,
stale entries would stay until they are due, and a client may name a time that is days ahead."""


class PrefetchQueue:
    """Contexts by the time at which they should be promoted. Used on one thread.

    The caller of ``take`` orders the promotion: at the due time, or earlier if the engine becomes
    idle, because no hook runs then.
    """

    def __init__(self) -> None:
        self._keys: dict[JobKey, tuple[float, Sequence[PageKey]]] = {}
        self._heap: list[tuple[float, JobKey]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def expect(self, job: JobKey, due: float, keys: Sequence[PageKey]) -> None:
        """Expect the job to return soon after ``due``, with a context of the pages ``keys``.
        Replaces an earlier call for the job."""
        self._keys[job] = (due, keys)
        heapq.heappush(self._heap, (due, job))
        if len(self._heap) > 2 * len(self._keys) + SPARE_ENTRIES:
            self._heap = [(due, job) for job, (due, _) in self._keys.items()]
            heapq.heapify(self._heap)

    def forget(self, job: JobKey) -> None:
        """Stop expecting the job. Unknown jobs are ignored."""
        self._keys.pop(job, None)

    def take(self, until: float) -> list[tuple[JobKey, float, Sequence[PageKey]]]:
        """Remove the contexts that are due by ``until``, and return the job, due time and pages of
        each, earliest first."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            due, job = heapq.heappop(self._heap)
            found = self._keys.get(job)
            if found is not None and found[0] == due:
                del self._keys[job]
                taken.append((job, *found))
        return taken


TOOL_OVER = ToolUse(path=("(tool over)",), rule=Rule(median_s=0.5, sigma=1.5))
"""Tool use for the rest of a gap after the client reported that the tool has ended."""
CHILDREN_OVER = ToolUse(path=("(sub-agents over)",), rule=Rule(median_s=0.5, sigma=1.5))
"""Tool use for the rest of a gap after the last child ended. The client then sends the parent's
next turn immediately."""


def while_children_run(tool: ToolUse | None) -> ToolUse:
    """Return the tool use of a gap in which children run, from the tool that started them. Such a
    gap lasts as long as the children run, so its duration is learned separately."""
    return ToolUse(path=("(sub-agents)", *(tool.path if tool is not None else ())))


class KvPlacement:
    """Queries the policy, and passes its forecasts to the eviction order. Used on one thread.

    Args:
        order: eviction order of CPU memory; receives forecasts of when each page is needed.
        count_used: counts pages as just used, once a save has settled.
        goes_on: returns the chance that a job returns at all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: TurnPolicy,
        gaps: OpenGaps,
        cost_model: CostModel,
        order: EvictionOrder,
        count_used: Callable[[Sequence[PageKey], OrderId | None], None],
        goes_on: Callable[[JobKey], float],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._gaps = gaps
        self._cost_model = cost_model
        self._order = order
        self._count_used = count_used
        self._goes_on = goes_on
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
        """Decide where the KV of a finished turn is kept.

        Args:
            away: True if the job's gap opens: the job is not over, none of its turns is running,
                and the finished turn has KV.
        """
        costs = self._cost_model.costs(end.context_tokens, end.job)
        decision = self._policy.decide(end, costs)
        now = self._clock()
        saved = bool(pages)
        gap = OpenGap(
            request_id, end, costs, decision, pages, sketch, save, now, unread, saved, now
        )
        ranked = False
        if end.job is not None and away:
            self._gaps.open(end.job, gap)
            ranked = self._rank(gap)
        if not (ranked and self._order.by_context):
            self._count_used(pages, save)
        return gap

    def revise(self, request_id: str, tool: ToolUse) -> OpenGap | None:
        """Decide again after the turn's tool call was read, unless the client has revised the gap
        meanwhile. Returns the turn's gap; None if it was closed."""
        gap = self._gaps.take_unread(request_id)
        if gap is None:
            return None
        gap.unread = False
        if gap.learned is not None:  # the client's revision is later than the tool call
            gap.learned = replace(gap.learned[0], tool=tool), gap.learned[1]
            return gap
        self._decide_again(gap, while_children_run(tool) if gap.children else tool)
        return gap

    def on_news(self, job: JobKey, rest: ToolUse) -> OpenGap | None:
        """Decide again where a job's KV is kept, because the client has revised the job's gap.
        Returns the gap; None if the job has none.

        Args:
            rest: tool use for the rest of the gap, from now on.
        """
        gap = self._gaps.get(job)
        if gap is None:
            return None
        gap.learned = gap.learned or (gap.end, gap.news_at)
        gap.news_at = self._clock()
        self._decide_again(gap, rest)
        return gap

    def on_child_began(self, parent: JobKey, child: JobKey) -> OpenGap | None:
        """Record that a child of a job started. Returns the job's gap if the child is the first in
        this gap, and a new decision was made; otherwise None."""
        gap = self._gaps.get(parent)
        if gap is None or len(gap.children) >= MOST_CHILDREN:
            return None
        first = not gap.children
        gap.children.add(child)
        if not first or gap.unread:
            return None
        gap.news_at, gap.learned = self._clock(), None
        self._decide_again(gap, while_children_run(gap.end.tool))
        return gap

    def on_child_ended(self, parent: JobKey, child: JobKey) -> OpenGap | None:
        """Record that a child of a job ended. Returns the job's gap if the child was the last that
        the job waited for, and a new decision was made; otherwise None."""
        gap = self._gaps.get(parent)
        if gap is None or child not in gap.children:
            return None
        gap.children.discard(child)
        if gap.children or gap.unread:
            return None
        now = self._clock()
        self._learn(gap, now, ended=True)
        gap.news_at, gap.learned = now, None
        self._decide_again(gap, CHILDREN_OVER)
        return gap

    def _learn(self, gap: OpenGap, now: float, *, ended: bool) -> None:
        end, since = gap.learned or (gap.end, gap.news_at)
        if not end.aborted:  # after an abort, the next turn is a client's retry
            self._policy.observe(end, now - since, ended=ended)

    def _decide_again(self, gap: OpenGap, tool: ToolUse) -> None:
        gap.end = replace(gap.end, tool=tool)
        gap.decision = self._policy.decide(gap.end, gap.costs)
        self._rank(gap)

    def pages(self, gap: OpenGap) -> Sequence[PageKey]:
        """Return the pages of the gap's context, as far as they are still known."""
        if gap.pages or not gap.saved or gap.end.job is None:
            return gap.pages
        return self._order.context(gap.end.job)

    def _rank(self, gap: OpenGap) -> bool:
        """Pass the gap's forecast to the eviction order. Returns False if the gap has no forecast
        or no pages."""
        job, forecast = gap.end.job, gap.decision.forecast
        if job is not None and forecast is None:
            self._order.on_forecast_lost(job)
        if job is None or forecast is None or not (pages := self.pages(gap)):
            return False
        page_s = gap.costs.recompute_s / len(pages)
        # Most clients never declare a job over, and a forecast assumes that the job returns.
        forecast = forecast.scaled(self._goes_on(job))
        self._order.on_gap_begun(job, pages, forecast, gap.news_at, page_s)
        return True

    def on_returned(self, job: JobKey) -> tuple[OpenGap, float] | None:
        """Close a job's gap because its next turn arrived. Returns the gap, and the seconds since
        ``OpenGap.news_at``; None if there was no gap."""
        self._order.on_gap_ended(job)
        return self._close(job, ended=True)

    def on_over(self, job: JobKey, own: Sequence[PageKey] = ()) -> tuple[OpenGap, float] | None:
        """Close a job's gap as censored: the job is no longer expected. Returns the same as
        ``on_returned``.

        Args:
            own: pages of its last turn that no other job shares.
        """
        self._order.on_job_ended(job, own)
        return self._close(job, ended=False)

    def _close(self, job: JobKey, *, ended: bool) -> tuple[OpenGap, float] | None:
        gap = self._gaps.close(job)
        if gap is None:
            return None
        now = self._clock()
        self._learn(gap, now, ended=ended)
        return gap, now - gap.news_at

    def forget_pages(self) -> None:
        """Forget all pages after a cache reset. The gaps stay open."""
        for job in self._gaps.jobs():
            self._order.on_job_ended(job)
            gap = self._gaps[job]
            gap.pages, gap.sketch, gap.save, gap.saved = (), PrefixSketch(), None, False


IDLE_AHEAD_S = 3600.0
"""Promotion horizon of an engine that becomes idle, seconds: contexts that are due within this time
are promoted immediately, because possibly no hook runs before they are due."""


class Arrival(NamedTuple):
    """An arriving turn's job and the gap that it ends.

    Attributes:
        job: the job; None if the turn belongs to no job.
        gap: the gap that the turn ends; None if there is none.
    """

    job: Job | None = None
    gap: EndedGap = NO_GAP


class TurnEnds:
    """Manages the jobs, and where the KV of each job is kept between its turns.

    Attributes:
        jobs, responses: known jobs, by key and by their last responses.
        open: open gaps of jobs.
        prefetch: contexts in lower tiers that are to be promoted before their jobs return.
        decided: recent final decisions.
        at_end: for each job, functions to call once, when the last of its running turns has ended
            and before that turn is reported.
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
        self.at_end: dict[JobKey, list[Callable[[Turn], None]]] = {}
        self._facts = engine.facts
        self._lineage = Lineage(engine.facts.hash_tokens)
        self._policy, self._pages = deps.policy, pages
        self._placement = KvPlacement(
            deps.policy,
            gaps,
            costs,
            pages.order,
            pages.saves.count_used,
            admission.gate.jobs.goes_on,
            engine.clock,
        )
        self._cost_model = costs
        self._pins = admission.pins
        self._boundaries = admission.boundaries
        self._gate = admission.gate
        self._tools = deps.tools
        self.responses = Responses()
        self._known = KnownJobs(deps.notebook, self.jobs, self._lineage, engine.clock, deps.wall)
        self._policy_state = deps.policy_state
        self._log = log
        self._trace = log.trace
        self._counters = engine.counters
        self._clock = engine.clock

    # -- a turn arrives -------------------------------------------------------------

    def on_arrived(self, request: Request, hints: TurnHints) -> Arrival:
        """Find the job of an arriving turn, and close the job's gap."""
        self.apply_tool_calls()  # the tool call of the gap that ends here may have been read by now
        key = self._job_of(request, hints)
        if key is None:
            return Arrival()
        blocks = self._facts.blocks(request.num_prompt_tokens)
        self._known.find(key)
        job = self.jobs.turn_arrived(key, request.request_id, self._clock(), blocks)
        job.who = hints.who
        if job.parent is not None and job.turns == 1:
            self._child_began(job)
        self._counters.add("concurrent_turns", len(job.running) > 1)
        self.prefetch.forget(key)
        back = self._placement.on_returned(key)
        if back is None:
            return Arrival(job)
        gap, gap_s = back
        self._gap_over(gap)
        self._log.returned(gap, gap_s)
        self.jobs.gap_ended(job, gap.decision)
        now = self._clock()
        self._trace.over(key, now - gap.since, StoryEnd.RETURNED, in_vram=key in self._pins)
        self._pins.on_arrived(key)
        shared = 0
        if not gap.end.aborted:  # it is unknown how much of the aborted turn was computed
            sketch = PrefixSketch.of(request.block_hashes)
            shared = gap.sketch.common_blocks(sketch)
            if not shared and gap.sketch.hashes and sketch.hashes:
                self._pins.release(key, PinEnd.RETURNED)  # a different prompt must not wait for it
        decision = gap.decision
        in_vram = decision.tier is Tier.PIN and gap.pinned > 0 and gap_s < decision.ttl_s
        kept = in_vram or (gap.saved and decision.tier is not Tier.DROP)
        superseded = self._supersede(job, request)
        return Arrival(job, EndedGap(gap.end.context_tokens, shared, kept, gap.saved, superseded))

    def _supersede(self, job: Job, request: Request) -> int:
        """Supersede the contexts that a job had already left when the turn that this prompt extends
        ended, so that pages of only these contexts are evicted first. Returns the number of these
        pages.

        Both a compaction and a side request, such as one for a title, have a prompt that does not
        extend the conversation, but after a side request the client returns to the conversation.
        Only a turn that extends the new prompt shows that the job has left the old context for
        good.
        """
        extended = [past for past in job.prompts if past.extended_by(request)]
        if not extended:
            return 0
        last = max(extended, key=attrgetter("tokens"))  # others were cut off within its prompt
        pages = self._pages.order.on_extended(job.key, last.since)
        self._pages.tiers.supersede(pages)
        self._counters.add("pages_superseded", len(pages))
        return len(pages)

    def _child_began(self, child: Job) -> None:
        """Decide again where the context of a child's parent is kept."""
        parent = child.parent
        assert parent is not None
        gap = self._placement.on_child_began(parent, child.key)
        if gap is not None:
            self._carry_out_again(parent, gap)

    def _job_of(self, request: Request, hints: TurnHints) -> JobKey | None:
        """Return the job that the client names, or that the prompt implies; None if there is
        none."""
        salt = job_scope(request.cache_salt)
        if hints.job_id is not None:
            key = JobKey(salt, hints.job_id)
            self._lineage.forget(key)  # an adopted job that its client names is no longer inferred
            return key
        if hints.who.follows is not None:
            followed = self.responses.take(salt, hints.who.follows)
            if followed is not None:
                self._lineage.forget(followed)  # from now on its turns are found by their responses
                return followed
        prompt = request.prompt_token_ids
        if prompt is None or not request.text_only:  # tokens alone do not identify such prompts
            return None
        inferred = self._lineage.arrived(salt, request.block_hashes, prompt)
        if inferred is None:
            return None
        self._counters.add("jobs_inferred", inferred.turn == 1)
        return inferred.job

    def on_admitted(self, turn: Turn) -> None:
        """Record that a turn was allocated its first blocks."""
        self._cost_model.on_admitted(turn)
        if turn.job is not None and self._pages.book.stores:
            # The turn's context is in VRAM, and a lower tier keeps what CPU memory evicts.
            self._pages.order.on_forecast_lost(turn.job.key)

    def adopt(self, end: TurnEnd, named: Request, pages: Sequence[PageKey]) -> None:
        """Adopt a job that was restored from a snapshot or forked. The job is now between turns.

        Args:
            end: the end of its last turn; ``end.job`` must not be None. The end is marked as
                aborted, because the time that the job was away must not be learned as a gap.
            named: a request that never runs, with the job's context as its tokens.
            pages: pages of the context, first to last.
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
        """Decide where the KV of a finished turn is kept, and carry the decision out. Returns the
        report that is added to the client's response; None unless the client named a job or sent KV
        hints."""
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
                self.jobs.remember_prompt(job, turn.request, self._facts.hash_tokens, gap.since)
                gap.pinned = self._act(job, turn, gap)
                if not gap.unread:
                    self._settle(gap)
            self._follow_up(job, turn, end, pages)
            if away and end.tool == NO_TOOL:
                self._on_answered(job, pages)
        if not away and has_kv:
            self._pages.tiers.share(pages[: self._found_by_others(turn)], self._while_saving(save))
        if job is not None and not job.running:
            for act in self.at_end.pop(job.key, ()):
                act(turn)
        return self._log.turn(turn, gap)

    def _found_by_others(self, turn: Turn) -> int:
        """Return the number of pages at the start of a job's first turn that other jobs had
        computed, and that further jobs may use; 0 for later turns, and if some group keeps less
        than the whole context."""
        if turn.number > 1 or self._facts.narrow:
            return 0
        return (turn.source.vram_tokens + turn.source.cpu_tokens) // self._facts.block_size

    def _read_tool(self, turn: Turn, end: TurnEnd) -> bool:
        """Queue the turn's tool call for reading on another thread. Returns False if it will not be
        read."""
        if end.aborted or not self._policy.reads_tools:
            return False
        return self._tools.read(turn.request_id, turn.request.output_token_ids)

    def _act(self, job: Job, turn: Turn, gap: OpenGap) -> int:
        """Carry out the decision. Returns the number of pinned blocks."""
        decision = gap.decision
        if gap.unread:  # unpinned blocks are lost right after this hook
            return self._pin(job, turn, gap, min(PROVISIONAL_S, decision.ttl_s or PROVISIONAL_S))
        if decision.tier is Tier.PIN:
            return self._pin(job, turn, gap, decision.ttl_s)
        self._pins.revoke(job.key, self._clock())
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
        """Demote the pages of the gap's context if that was decided, and schedule their
        promotion."""
        if not self._pages.book.stores or gap.decision.tier is not Tier.STORE:
            return
        pages = self._placement.pages(gap)
        gap.sent_down = len(pages)
        self._pages.tiers.send_down(pages, after=self._while_saving(gap.save))
        if gap.end.job is not None and gap.decision.back_s is not None:
            self.prefetch.expect(gap.end.job, gap.news_at + gap.decision.back_s, pages)

    def _follow_up(self, job: Job, turn: Turn, end: TurnEnd, pages: Sequence[PageKey]) -> None:
        if turn.hints.job_id is None:
            self._lineage.ended(job.key, turn.request.output_token_ids, aborted=end.aborted)
            self.responses.answered(job.key, turn.request_id)
        if not job.running and end.is_last_step:
            self._cost_model.memoryfulness.observe(job.turns)
            self.give_up(job.key, StoryEnd.OVER, pages[job.first_blocks :])
            self._known.forget(job.key)
            self._child_over(job)
            return
        self._known.note(job)
        if not job.running and not turn.source.admitted:
            self._pins.release(job.key, PinEnd.GIVEN_UP)  # the pin of the job's previous turn
            self._pages.order.on_forecast_lost(job.key)

    def give_up(
        self, job: JobKey, why: StoryEnd = StoryEnd.GIVEN_UP, own: Sequence[PageKey] = ()
    ) -> None:
        """Stop expecting the job to return: release its pin, and close its gap as censored.

        Args:
            own: pages of its last turn that no other job shares.
        """
        self._pins.release(job, PinEnd.CLOSED if why is StoryEnd.CLOSED else PinEnd.GIVEN_UP)
        self._gate.on_over(job)
        self.prefetch.forget(job)
        if (found := self._placement.on_over(job, own)) is not None:
            gap, _ = found
            self._gap_over(gap)
            self._cost_model.memoryfulness.observe(gap.end.turn)
            self._trace.over(job, self._clock() - gap.since, why)

    # -- between turns ---------------------------------------------------------------

    def apply_tool_calls(self) -> None:
        """Revise the decisions for the turns whose tool calls were read since the last call."""
        for request_id, tool in self._tools.take():
            gap = self._placement.revise(request_id, tool)
            if gap is None or gap.end.job is None:
                continue
            self._carry_out_again(gap.end.job, gap)
            job, pages = self.jobs.get(gap.end.job), gap.pages
            self._settle(gap)
            if job is not None and tool == NO_TOOL:
                self._on_answered(job, pages)

    def _carry_out_again(self, job: JobKey, gap: OpenGap) -> None:
        """Carry out a decision that replaces the gap's first one."""
        made = gap.decision
        if made.tier is Tier.PIN:
            value = pin_value(made.forecast, gap.costs, made.ttl_s)
            self._pins.revise(job, gap.news_at + made.ttl_s, value)
        else:
            self._pins.revoke(job, self._clock())
            self._send_down(gap)

    def _on_answered(self, job: Job, pages: Sequence[PageKey]) -> None:
        """Handle an answer without a tool call, which ends the job if it is a child.

        Args:
            pages: pages of the job's context.
        """
        if job.parent is not None and not job.running:
            self.give_up(job.key, StoryEnd.OVER, pages[job.first_blocks :])
            self._child_over(job)

    def _child_over(self, child: Job) -> None:
        """Handle the end of a child. If its parent waited for no other child, expect the parent's
        next turn now, and promote the parent's context."""
        parent = child.parent
        gap = self._placement.on_child_ended(parent, child.key) if parent is not None else None
        if parent is None or gap is None:
            return
        self._carry_out_again(parent, gap)
        self._expect_now(parent, gap)

    # -- hints ------------------------------------------------------------------------

    def pages_of(self, job: JobKey) -> Sequence[PageKey]:
        """Return the pages of a job's last context, as far as they are known."""
        gap = self.open.get(job)
        return self._placement.pages(gap) if gap is not None else self._pages.order.context(job)

    def revise_gap(self, job: JobKey, rest: ToolUse) -> OpenGap | None:
        """Decide again where a job's KV is kept for the ``rest`` of its gap. Returns the gap; None
        if the job has none."""
        gap = self._placement.on_news(job, rest)
        if gap is None:
            return None
        self._carry_out_again(job, gap)
        if rest is TOOL_OVER:
            self._expect_now(job, gap)
        return gap

    def end_job(self, job: Job) -> None:
        """Finish a job between turns, as if its client had declared in the latest turn that no
        further turn follows."""
        self.give_up(job.key, StoryEnd.OVER)
        self._known.forget(job.key)
        self._lineage.forget(job.key)
        self._child_over(job)
        self.jobs.end(job)

    def _expect_now(self, job: JobKey, gap: OpenGap) -> None:
        if job not in self._pins and self._pages.book.stores:
            self.prefetch.expect(job, self._clock(), self._placement.pages(gap))

    def _while_saving(self, save: OrderId | None) -> OrderId | None:
        """Return the save if it is unfinished, None otherwise."""
        return save if save is not None and self._pages.book.under_way(save) else None

    def _settle(self, gap: OpenGap) -> None:
        """Handle a gap's final decision. Unless the KV is dropped or the turn was aborted, share
        the pages with other engines, because the job may return to one of them."""
        if gap.decision.tier is not Tier.DROP and not gap.end.aborted:
            self._pages.tiers.share(gap.pages, self._while_saving(gap.save))
        gap.pages, gap.request_id = (), ""  # the id may be long, because a client may choose it
        self._tell(gap)

    def _gap_over(self, gap: OpenGap) -> None:
        """Report the decision of a gap that ended before its tool call was read."""
        if gap.unread:
            self._tell(gap)

    def _tell(self, gap: OpenGap) -> None:
        self._log.decided(gap)
        self.decided.add(gap.decision, self._clock())

    def poll(self) -> None:
        """Promote contexts that are due, give up jobs that have been silent for too long, and save
        the policy's state if that is due. Need not be called in every step."""
        if self.prefetch:
            self._bring_back(until=self._clock())
        while (late := self.open.oldest_late(self._clock())) is not None:
            self.give_up(late)
        self._policy_state.save_if_due(self._clock())

    def on_idle(self) -> None:
        """Apply the tool calls that were read, and order promotions in advance, because no request
        is left and possibly no hook runs for a long time."""
        self.apply_tool_calls()
        if self.prefetch:
            self._bring_back(until=self._clock() + IDLE_AHEAD_S)

    def _bring_back(self, until: float) -> None:
        for job, due, pages in self.prefetch.take(until):
            late = due <= self._clock()  # other requests wait for this step
            first = pages[:PAGES_A_STEP] if late else pages
            ordered = self._pages.promotions.promote_ahead(first, due)
            self._trace.brought_up(job, ordered)
            if late and len(first) < len(pages):
                self.prefetch.expect(job, due, pages[PAGES_A_STEP:])
            elif not ordered and not late:  # pages may yet leave CPU memory
                self.prefetch.expect(job, due, pages)

    def reset(self) -> None:
        """Forget every page. The jobs are kept."""
        self._placement.forget_pages()
        self.prefetch = PrefetchQueue()

    def close_all(self) -> None:
        """Stop expecting any job that is between turns. Idempotent."""
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
    """Return the tool use that the client reports; None if it reports none."""
    if hints.tool_name is None and hints.tool_command is None and hints.expected_s is None:
        return None
    command = hints.tool_command or ""
    call = ToolCall(hints.tool_name or ("bash" if command else "tool"), {}, command)
    return replace(tool_use([call]), expected_s=hints.expected_s)
