"""How long prompts take to compute: measured from what this engine's requests went through."""

from __future__ import annotations

from tiered_kv.connectors.vllm.turn import Turn

FEWEST_TOKENS = 128
"""A shorter prefill says more about the step than about its tokens."""


class PrefillClock:
    """Seconds per computed prompt token, from admission to the first token of the answer.

    What other requests of the batch took is in it: a recomputation would go through the
    same. 0 until the first prefill was seen.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.running: list[tuple[Turn, float, int]] = []

    def started(self, turn: Turn, now: float) -> None:
        """The request was admitted; what VRAM and CPU memory do not give is computed."""
        tokens = turn.request.num_prompt_tokens - turn.vram_tokens - turn.cpu_tokens
        if tokens >= FEWEST_TOKENS:
            self.running.append((turn, now, tokens))

    def look(self, now: float) -> None:
        """See which of the ``running`` prefills are over."""
        still = []
        for turn, began, tokens in self.running:
            if turn.request.num_output_tokens > 0:
                seen = (now - began) / tokens
                weight = 0.3 if self.seconds_per_token else 1.0
                self.seconds_per_token += weight * (seen - self.seconds_per_token)
            elif not turn.request.is_finished():
                still.append((turn, began, tokens))
        self.running = still
