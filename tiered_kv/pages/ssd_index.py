"""The pages on SSD, as the scheduler half knows them.

A page is here once its bytes are durable on every rank. The segment stores of the ranks
own the bytes, and say when pages are gone or when a segment should die; this index says
which of a dying segment's pages are worth writing again.

One thread, no locks, O(1) per page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiered_kv.keys import PageKey

LIKELY = 0.5
"""Chance of a return that is worth a second write."""


class SsdIndex:
    """Keys of durable pages, and whether each was used since it was written."""

    def __init__(self) -> None:
        self._used: dict[PageKey, bool] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._used

    def add(self, keys: Iterable[PageKey]) -> None:
        """The pages are durable on every rank."""
        for key in keys:
            self._used.setdefault(key, False)

    def discard(self, keys: Iterable[PageKey]) -> None:
        """The pages are gone, or bad, on some rank."""
        for key in keys:
            self._used.pop(key, None)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """The pages were wanted. Those not on SSD are passed over."""
        used = self._used
        for key in keys:
            if key in used:
                used[key] = True

    def survivors(
        self, dying: Sequence[PageKey], chance: Callable[[PageKey], float]
    ) -> tuple[PageKey, ...]:
        """Pages of a dying segment to be written again: what a waiting job is likely to come
        back for, and a second chance for what was used.

        At most half of them, the likeliest and then the last written ones, so that a segment's
        death frees at least half a segment. What was used must be used again to survive again.

        Args:
            chance: that somebody comes back for a page; 0 if unknown.
        """
        chances = {key: chance(key) for key in dying}
        kept = [key for key in dying if self._used.get(key) or chances[key] >= LIKELY]
        kept.sort(key=chances.__getitem__)
        chosen = set(kept[len(kept) - min(len(kept), len(dying) // 2) :])
        for key in chosen:
            if key in self._used:
                self._used[key] = False
        return tuple(key for key in dying if key in chosen)

    def clear(self) -> None:
        self._used.clear()
