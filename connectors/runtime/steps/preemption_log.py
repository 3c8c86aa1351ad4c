"""Preemptions of the requests that live, for the trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.trace.turn_record import FIRST_PREEMPTIONS, Preemptions

MOST = 65_536
"""Requests that are remembered: of more, those that were preempted first are forgotten. They are
forgotten at their end otherwise."""


@dataclass(slots=True)
class _Preempted:
    """A request that was preempted.

    Attributes:
        count: times that it was.
        at, back: moments of the first ones, and of the steps in which it went on; seconds.
        found: tokens that it had then.
        away: True until it goes on.
    """

    count: int = 0
    at: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    away: bool = False


class PreemptionLog:
    """Preemptions by request. One thread; written by ``step_trace``."""

    def __init__(self) -> None:
        self._of: dict[str, _Preempted] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def preempted(self, request_id: str, now: float) -> None:
        """Take in that a request lost its blocks."""
        one = self._of.get(request_id)
        if one is None:
            if len(self._of) >= MOST:
                del self._of[next(iter(self._of))]
            one = self._of[request_id] = _Preempted()
        one.count += 1
        one.away = True
        if one.count <= FIRST_PREEMPTIONS:
            one.at.append(now)

    def goes_on(self, request_id: str, found: int, now: float) -> None:
        """Take in that a request computes again.

        Args:
            found: tokens that it need not compute.
        """
        one = self._of.get(request_id)
        if one is None or not one.away:
            return
        one.away = False
        if one.count <= FIRST_PREEMPTIONS:
            one.back.append(now)
            one.found.append(found)

    def take(self, turn: Turn) -> Preemptions:
        """Hand over those of a request that has ended, with times after its arrival."""
        one = self._of.pop(turn.request_id, None)
        if one is None:
            return Preemptions()
        return Preemptions(
            one.count,
            tuple(at - turn.arrived_at for at in one.at),
            tuple(back - turn.arrived_at for back in one.back),
            tuple(one.found),
        )
