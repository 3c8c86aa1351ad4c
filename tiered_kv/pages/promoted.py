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
        used_bytes, wasted_bytes: the same in bytes, on one rank.
    """

    def __init__(self) -> None:
        self.used = 0
        self.wasted = 0
        self.used_bytes = 0
        self.wasted_bytes = 0
        self._unused: dict[PageKey, int] = {}  # bytes by page

    def came_up(self, keys: Iterable[PageKey], page_bytes: int) -> None:
        """Pages of that size came up, and are readable."""
        self._unused.update(dict.fromkeys(keys, page_bytes))

    def read(self, keys: Collection[PageKey]) -> None:
        """Pages are restored to VRAM."""
        pages, nbytes = self._leave(keys)
        self.used += pages
        self.used_bytes += nbytes

    def gone(self, keys: Collection[PageKey]) -> None:
        """Pages are no longer in CPU memory."""
        pages, nbytes = self._leave(keys)
        self.wasted += pages
        self.wasted_bytes += nbytes

    def _leave(self, keys: Collection[PageKey]) -> tuple[int, int]:
        if not self._unused:
            return 0, 0
        left = self._unused.keys() & keys
        return len(left), sum(map(self._unused.pop, left))
