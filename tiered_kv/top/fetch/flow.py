"""Flow: by how much an engine's counters have grown of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tiered_kv.top.readings import EngineReading
from tiered_kv.top.view import Growth

WINDOW_S = 60.0
"""Time that the growth is over, once there are readings so old."""


class Flow:
    """The readings of one engine in the last minute. One thread."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, reading: EngineReading) -> Growth | None:
        """Take in a reading; returns the growth since the oldest one, None if there is no other."""
        counters = reading.counters
        last = self._seen[-1][1] if self._seen else {}
        if any(total < last.get(name, 0) for name, total in counters.items()):
            self._seen.clear()  # the engine was started anew
        self._seen.append((reading.now, counters))
        while len(self._seen) > 2 and reading.now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if reading.now <= since:
            return None
        grown = {name: total - before.get(name, 0) for name, total in counters.items()}
        return Growth(reading.now - since, grown)
