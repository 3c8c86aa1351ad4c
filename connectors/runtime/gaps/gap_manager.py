"""Between turns: whose KV waits where, from a turn's end until the job's next turn arrives.

A pin must be taken while a turn ends, before its tool call can be read: so it is provisional,
and what was decided is revised once the call was read, off this thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiered_kv.connectors.runtime.base import BlockPool
from tiered_kv.connectors.runtime.job_table import Job, JobTable
from tiered_kv.connectors.runtime.pages.lower_tiers import LowerTiers
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.metrics import Counters
from tiered_kv.orders import OrderId
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.base import JobKey, Tier, ToolUse, TurnEnd
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.policies.pricing.pin_value import earnings, saved_s
from tiered_kv.policies.tools.calls import ToolCall
from tiered_kv.policies.tools.tool_use import tool_use

from .cost_model import Prices
from .open_gaps import Marks, Wait, Waits
from .policy_state import PolicyKeeper
from .prefetch_queue import Returns
from .tool_reader import ToolReader
from .turn_log import Accounts

PROVISIONAL_S = 2.0
"""How long a turn is pinned at most while its tool call is being read."""
IDLE_AHEAD_S = 3600.0
"""An engine that falls idle orders what is due in this time ahead: no hook may run until then."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn that arrives.

    Attributes:
        job: None if it belongs to none.
        context: tokens that the job waited with.
        shared: blocks of it that the prompt begins with as well; a few may lack.
        kept: whether they were to be in some tier still. saved: whether they were saved outside
            VRAM.
    """

    job: Job | None = None
    context: int = 0
    shared: int = 0
    kept: bool = False
    saved: bool = False


class Gaps:
    """Jobs, and what happens to the KV of each between its turns.

    Args:
        pool: the engine's block pool.
        tools: reads tool calls; None if answers cannot be decoded.
        keeper: of the policy; closed with this.
        over: told of jobs that are not waited for any longer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        lineage: Lineage,
        waits: Waits,
        prices: Prices,
        pins: PinTable,
        planner: OrderBook,
        tiers: LowerTiers,
        pool: BlockPool,
        tools: ToolReader | None,
        keeper: PolicyKeeper,
        accounts: Accounts,
        counters: Counters,
        over: Callable[[JobKey], None],
        clock: Callable[[], float],
    ) -> None:
        self.jobs = JobTable()
        self.returns = Returns()
        self.waits = waits
        self._lineage = lineage
        self._prices = prices
        self._pins = pins
        self._planner = planner
        self._tiers = tiers
        self._pool = pool
        self._tools = tools
        self._keeper = keeper
        self._accounts = accounts
        self._counters = counters
        self._says_over = over
        self._clock = clock

    # -- a turn arrives -------------------------------------------------------------

    def arrived(self, request: Any, hints: TurnHints) -> Arrival:
        """A turn arrives: whose it is, and what that waited with."""
        self.hear_tools()  # the gap that ends here may be of one that was read meanwhile
        key = self._job_of(request, hints)
        if key is None:
            return Arrival()
        job = self.jobs.turn_arrived(key, request.request_id, self._clock())
        self._counters.add("concurrent_turns", len(job.running) > 1)
        self.returns.forget(key)
        back = self.waits.returned(key)
        if back is None:
            return Arrival(job)
        wait, gap_s = back
        self._accounts.gap(wait, gap_s, ended=True, held=key in self._pins)
        # Until it has its blocks, however long it queues: nothing saves more.
        self._pins.until(key, math.inf, math.inf, math.inf)
        shared = 0
        if not wait.end.aborted:  # how far that had come is not known
            marks = Marks.of(request.block_hashes)
            shared = wait.marks.common_blocks(marks)
            if not shared and wait.marks.hashes and marks.hashes:
                self._release(key)  # of another text: it would wait for its own pin
        kept = _to_stay(wait, gap_s)
        return Arrival(job, wait.end.context_tokens, shared, kept, wait.saved)

    def _job_of(self, request: Any, hints: TurnHints) -> JobKey | None:
        """As the client says, or as the prompt tells."""
        salt = request.cache_salt or ""
        if hints.job_id is not None:
            return JobKey(salt, hints.job_id)
        prompt = request.prompt_token_ids
        if prompt is None or not request.text_only:  # tokens alone do not tell such prompts apart
            return None
        inferred = self._lineage.arrived(salt, request.block_hashes, prompt)
        if inferred is None:
            return None
        self._counters.add("jobs_inferred", inferred.turn == 1)
        return inferred.job

    # -- a turn ends ----------------------------------------------------------------

    def ended(
        self, turn: Turn, pages: Sequence[PageKey], save: OrderId | None, *, has_kv: bool
    ) -> tuple[Wait, int]:
        """Decide where the turn's KV waits; returns that, and how many blocks are pinned.

        Args:
            pages: of its context, first to last.
            save: the order that saves the last of them, if there is one.
            has_kv: whether its blocks hold what they should.
        """
        job = turn.job
        if job is not None:
            self.jobs.turn_ended(job, turn.request_id, over=turn.hints.is_last_step)
        end = _turn_end(turn, self._clock())
        away = has_kv and job is not None and not job.running and not end.is_last_step
        unread = away and end.tool is None and self._read_tool(turn, end)
        marks = Marks.of(turn.request.block_hashes) if away else Marks()
        wait = self.waits.begin(turn.request_id, end, pages, marks, save, unread=unread, away=away)
        if job is not None:
            if away:
                wait.pinned = self._act(job, turn, wait)
                if not wait.unread:
                    wait.pages = ()
            self._turn_ended(job, turn, end, pages)
        self._accounts.decision(wait)
        return wait, wait.pinned

    def _read_tool(self, turn: Turn, end: TurnEnd) -> bool:
        """Have the tool call read, off this thread; False if nobody would use it."""
        if self._tools is None or not self.waits.policy.reads_tools or end.aborted:
            return False
        return self._tools.read(turn.request_id, turn.request.output_token_ids)

    def _act(self, job: Job, turn: Turn, wait: Wait) -> int:
        """Carry out what was decided; returns how many blocks are pinned."""
        decision = wait.decision
        if wait.unread:  # the blocks are gone right after this hook
            return self._pin(job, turn, wait, min(PROVISIONAL_S, decision.ttl_s or PROVISIONAL_S))
        if decision.tier is Tier.PIN:
            return self._pin(job, turn, wait, decision.ttl_s)
        self._release(job.key)
        self._send_down(wait)
        return 0

    def _pin(self, job: Job, turn: Turn, wait: Wait, ttl_s: float) -> int:
        blocks = [
            block
            for block in self._pool.blocks_of(turn.request_id)
            if block.block_hash is not None and not block.is_null
        ]
        pinned = self._pins.pin(
            job.key, blocks, self._clock() + ttl_s, job.born, *_worth(wait, ttl_s)
        )
        self._counters.add("pins", pinned > 0)
        self._counters.add("pins_refused", pinned < len(blocks))
        return pinned

    def _release(self, job: JobKey) -> None:
        self._counters.add("pins_released", self._pins.release(job))

    def _send_down(self, wait: Wait) -> None:
        """To the tiers below, if that was decided, and up again in time."""
        if not self._planner.stores or wait.decision.tier is not Tier.STORE:
            return
        saving = wait.save is not None and self._planner.under_way(wait.save)
        self._tiers.demote(wait.pages, after=wait.save if saving else None)
        if wait.end.job is not None and wait.decision.back_s is not None:
            self.returns.expect(wait.end.job, wait.since + wait.decision.back_s, wait.pages)

    def _turn_ended(self, job: Job, turn: Turn, end: TurnEnd, pages: Sequence[PageKey]) -> None:
        if turn.hints.job_id is None:
            self._lineage.ended(job.key, turn.request.output_token_ids, aborted=end.aborted)
        if not job.running and end.is_last_step:
            self._prices.memoryfulness.observe(job.turns)
            self._over(job.key, pages[job.first_blocks :])
        elif not job.running and not turn.admitted:
            self._release(job.key)  # what the job's last turn left for it
            self.waits.lose(job.key)

    def _over(self, job: JobKey, own: Sequence[PageKey] = ()) -> None:
        """The job is not waited for any longer. ``own``: see ``Waits.over``."""
        self._release(job)
        self._says_over(job)
        self.returns.forget(job)
        if (found := self.waits.over(job, own)) is not None:
            wait, gap_s = found
            self._prices.memoryfulness.observe(wait.end.turn)
            self._accounts.gap(wait, gap_s, ended=False, held=False)

    # -- while they wait --------------------------------------------------------------

    def hear_tools(self) -> None:
        """Hear of tool calls that were read: decide anew where those turns' KV waits."""
        if self._tools is None:
            return
        for request_id, tool in self._tools.take():
            wait = self.waits.read(request_id, tool)
            if wait is None or wait.end.job is None:
                continue
            self._accounts.decision(wait)
            made = wait.decision
            if made.tier is Tier.PIN:
                worth = _worth(wait, made.ttl_s)
                self._pins.until(wait.end.job, wait.since + made.ttl_s, *worth)
            else:
                self._release(wait.end.job)
                self._send_down(wait)
            wait.pages = ()

    def look_around(self) -> None:
        """What need not be looked at in every step."""
        if self.returns:
            self._bring_back(until=self._clock())
        while (late := self.waits.oldest_late()) is not None:
            self._over(late)
        self._keeper.tend_if_due(self._clock())

    def idle(self) -> None:
        """No request is left, and perhaps no hook runs for long: order ahead."""
        self.hear_tools()
        if self.returns:
            self._bring_back(until=self._clock() + IDLE_AHEAD_S)

    def _bring_back(self, until: float) -> None:
        for job, due, pages in self.returns.take(until):
            ordered = self._tiers.promote_ahead(pages, due)
            if not ordered and due > self._clock():  # they may yet leave CPU memory
                self.returns.expect(job, due, pages)

    def reset(self) -> None:
        """Every page is gone; the jobs are not."""
        self.waits.forget_pages()
        self.returns = Returns()

    def close(self) -> None:
        """Nobody is waited for any longer; save what was learned. Idempotent."""
        for job in self.waits.jobs():
            self._over(job)
        if self._tools is not None:
            self._tools.close()
        self._keeper.close()


def _worth(wait: Wait, ttl_s: float) -> tuple[float, float]:
    """What a pin for so long saves, and what it earns in a second."""
    forecast, costs = wait.decision.forecast, wait.costs
    return saved_s(forecast, costs.benefit_s, ttl_s), earnings(forecast, costs, ttl_s)


def _to_stay(wait: Wait, gap_s: float) -> bool:
    """Whether a context was to be in some tier still, so long after its turn's end."""
    made = wait.decision
    if made.tier is Tier.PIN and wait.pinned and gap_s < made.ttl_s:
        return True
    return wait.saved and made.tier is not Tier.DROP


def _turn_end(turn: Turn, now: float) -> TurnEnd:
    request = turn.request
    return TurnEnd(
        job=turn.job.key if turn.job else None,
        turn=turn.number,
        is_last_step=turn.hints.is_last_step or (turn.job is not None and turn.job.over),
        aborted=not request.answered,
        context_tokens=request.num_tokens,
        new_tokens=max(0, request.num_prompt_tokens - turn.context_before),
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
