"""Pages that came up from a tier below, until somebody uses them or they are gone.

Whether promotions are worth what they read is told by it. Lives on the scheduler thread, like the
index that owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiered_kv.keys import PageKey


class PromotedPages:
    """Pages that came up and were not restored to VRAM yet.

    Attributes:
        used: pages that were restored so far.
        wasted: pages that were gone from CPU memory before that.
    """

    def __init__(self) -> None:
        self.used = 0
        self.wasted = 0
        self._unused: set[PageKey] = set()

    def came_up(self, keys: Iterable[PageKey]) -> None:
        """Pages came up, and are readable."""
        self._unused.update(keys)

    def read(self, keys: Collection[PageKey]) -> None:
        """Pages are restored to VRAM."""
        self.used += self._leave(keys)

    def gone(self, keys: Collection[PageKey]) -> None:
        """Pages are no longer in CPU memory."""
        self.wasted += self._leave(keys)

    def _leave(self, keys: Collection[PageKey]) -> int:
        if not self._unused:
            return 0
        left = self._unused.intersection(keys)
        self._unused -= left
        return len(left)
