"""The time that prompts take to compute, measured on this engine's requests; and when each turn
began, and had its first token."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.pricing.estimators import PrefillFit

FEWEST_TOKENS = 128
"""A shorter prefill says more about the step than about its tokens."""


@dataclass(slots=True)
class _Prefill:
    turn: Turn
    began: float
    behind: int
    tokens: int
    measured: bool
    not_yet: int  # looks until its first step begins


class PrefillTimer:
    """Times prefills, from when the request has its blocks, and what was restored into them, to
    the first token of the answer.

    What other requests of the batch took is in it: a recomputation would go through the
    same. A request that is preempted says nothing: how much it computes is not known.

    Args:
        ahead: a step is scheduled while the one before it runs, and begins as the next one is
            scheduled.

    Attributes:
        fit: what was learned.
        running: prefills under way, those included that say nothing.
    """

    def __init__(self, *, ahead: bool) -> None:
        self.fit = PrefillFit()
        self.running: list[_Prefill] = []
        self._not_yet = 2 if ahead else 0

    def on_started(self, turn: Turn, now: float, *, whole: bool) -> None:
        """Time the prefill that begins now, of what VRAM and CPU memory have not given.

        Args:
            whole: False if part of that was computed before, or is computed besides.
        """
        first = turn.start.scheduled_at is None
        if first:
            turn.start.scheduled_at = now
        behind = turn.source.vram_tokens + turn.source.cpu_tokens
        tokens = turn.request.num_prompt_tokens - behind
        measured = whole and tokens >= FEWEST_TOKENS
        if measured or first:
            self.running.append(_Prefill(turn, now, behind, tokens, measured, self._not_yet))

    def poll(self, now: float) -> None:
        """Measure those of the ``running`` prefills that are over. Once in every step, when it was
        scheduled."""
        still = []
        for prefill in self.running:
            request, start = prefill.turn.request, prefill.turn.start
            if prefill.not_yet:
                prefill.not_yet -= 1
                prefill.began = now
            if request.num_preemptions:
                prefill.measured = False
            if request.num_output_tokens > 0:
                if start.first_token_at is None:
                    start.first_token_at = now
                if prefill.measured:
                    self.fit.observe(prefill.behind, prefill.tokens, now - prefill.began)
            elif not request.finished:
                still.append(prefill)
        self.running = still
