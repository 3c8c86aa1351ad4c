"""Prefills under way: how many of a step's tokens are of prompts."""

from __future__ import annotations

from tiered_kv.connectors.runtime.base import Request, ScheduledStep
from tiered_kv.connectors.runtime.turn import LiveTurns


class PrefillsUnderWay:
    """Requests that compute their prompts, or all of it again after a preemption.

    A step takes time that grows with those, and not with the requests that answer.

    Args:
        turns: the live requests.
    """

    def __init__(self, turns: LiveTurns) -> None:
        self._turns = turns
        self._until: dict[str, tuple[Request, int]] = {}

    def tokens(self, step: ScheduledStep) -> int:
        """Count the tokens of prompts among those of a step, before the engine adds them to what
        its requests have computed."""
        until = self._until
        for request_id in step.preempted:
            until.pop(request_id, None)
        for request_id in step.begun:
            turn = self._turns.by_id.get(request_id)
            if turn is not None:
                until[request_id] = turn.request, turn.request.num_tokens
        count = 0
        for request_id, (request, length) in list(until.items()):
            tokens = step.tokens.get(request_id, 0)
            left = length - request.num_computed_tokens
            count += max(0, min(tokens, left))
            if tokens >= left or request.finished:
                del until[request_id]
        return count
