"""Pages that wait to be ordered down, as many at a time as may be under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiered_kv.keys import PageKey


class Waiting(NamedTuple):
    """Pages of one context.

    Attributes:
        runs: the first page of each page's run; empty if their store does not want to know.
    """

    keys: Sequence[PageKey]
    runs: Mapping[PageKey, PageKey]


class Backlog:
    """Pages that wait, first come, first served. Its length is their number."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._taken = 0  # of the first context
        self._pages = 0

    def __len__(self) -> int:
        return self._pages

    def add(self, waiting: Waiting) -> None:
        """Have more pages wait."""
        if waiting.keys:
            self._waiting.append(waiting)
            self._pages += len(waiting.keys)

    def take(self, most: int) -> Waiting:
        """The first pages, ``most`` of them at most, of one context.

        Raises:
            IndexError: none waits.
        """
        keys, runs = self._waiting[0]
        taken = keys[self._taken : self._taken + most]
        self._taken += len(taken)
        if self._taken == len(keys):
            self._waiting.popleft()
            self._taken = 0
        self._pages -= len(taken)
        return Waiting(taken, runs)

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._taken = self._pages = 0
