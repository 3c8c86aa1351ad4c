"""How long prompts take to compute: measured from what this engine's requests went through."""

from __future__ import annotations

from tiered_kv.connectors.vllm.turn import Turn
from tiered_kv.policies.costs import PrefillFit

FEWEST_TOKENS = 128
"""A shorter prefill says more about the step than about its tokens."""


class PrefillClock:
    """Times prefills, from admission to the first token of the answer.

    What other requests of the batch took is in it: a recomputation would go through the
    same.

    Attributes:
        fit: what was learned.
        running: prefills under way.
    """

    def __init__(self) -> None:
        self.fit = PrefillFit()
        self.running: list[tuple[Turn, float, int, int]] = []

    def started(self, turn: Turn, now: float) -> None:
        """The request was admitted; what VRAM and CPU memory do not give is computed."""
        behind = turn.vram_tokens + turn.cpu_tokens
        tokens = turn.request.num_prompt_tokens - behind
        if tokens >= FEWEST_TOKENS:
            self.running.append((turn, now, behind, tokens))

    def look(self, now: float) -> None:
        """See which of the ``running`` prefills are over."""
        still = []
        for prefill in self.running:
            turn, began, behind, tokens = prefill
            if turn.request.num_output_tokens > 0:
                self.fit.observe(behind, tokens, now - began)
            elif not turn.request.is_finished():
                still.append(prefill)
        self.running = still
