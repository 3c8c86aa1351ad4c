"""A store of a tier without its bytes: the pages that it would have, by segment."""

from __future__ import annotations

from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reclaim

SEGMENTS = 32
"""Number of segments of a store."""


class VirtualStore:
    """Pages in segments, of which the oldest dies when there is no room for a new one.

    Args:
        pages: pages that it has room for; None for a store without a known end.
    """

    def __init__(self, pages: int | None) -> None:
        self._per_segment = max(1, pages // SEGMENTS) if pages is not None else 1 << 62
        self._most = max(2, pages // self._per_segment) if pages is not None else 2
        self._segments: dict[int, dict[PageKey, None]] = {0: {}}
        self._where: dict[PageKey, int] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._where)

    def put(self, key: PageKey) -> None:
        """Store a page; one that is there already stays where it is."""
        if key in self._where:
            return
        if len(self._segments[self._newest]) >= self._per_segment:
            self._newest += 1
            self._segments[self._newest] = {}
        self._segments[self._newest][key] = None
        self._where[key] = self._newest

    def has(self, key: PageKey) -> bool:
        """True if the page is there."""
        return key in self._where

    @property
    def proposal(self) -> Proposal | None:
        """The segment that should die, once the store is full."""
        if len(self._segments) <= self._most:
            return None
        oldest = next(iter(self._segments))
        return Proposal(oldest, tuple(self._segments[oldest]))

    def reclaim(self, dying: Reclaim) -> tuple[list[PageKey], int]:
        """Let a segment die but for those named; returns who is gone, and how many were
        written again."""
        pages = self._segments.pop(dying.segment, None)
        if pages is None:
            return [], 0
        for key in pages:
            del self._where[key]
        kept = [key for key in dying.survivors if key in pages]
        for key in kept:
            self.put(key)
        return [key for key in pages if key not in self._where], len(kept)
