"""The requests that have not ended, and how many of them run."""

from __future__ import annotations

from .turn import Turn


class LiveTurns:
    """Turns by request id. One thread; written by ``scheduler``.

    Attributes:
        by_id: turns in the order of their arrival; read only.
        running: turns that were given blocks.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Turn] = {}
        self.running = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, turn: Turn) -> None:
        """Begin with a turn."""
        self.by_id[turn.request_id] = turn

    def admit(self, turn: Turn, now: float) -> None:
        """Count a turn that has blocks for the first time."""
        turn.source.admitted, turn.source.admitted_at = True, now
        self.running += 1

    def pop(self, request_id: str) -> Turn | None:
        """Take a turn out; None if it is not known."""
        turn = self.by_id.pop(request_id, None)
        if turn is not None:
            self.running -= turn.source.admitted
        return turn
