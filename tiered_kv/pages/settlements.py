"""Word to the workers about saves and promotions that are over, where CPU memory outlives the
engine: only the scheduler knows which pages are whole on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiered_kv.messages import Settlement
from tiered_kv.orders import PromoteOrder, SaveOrder

from .cpu_index import PageIndex
from .flights import Settled


class Settlements:
    """Settlements that the workers have not been told.

    Args:
        wanted: False if CPU memory ends with the engine: then nothing is collected.
        wall: nanoseconds since 1970.

    Attributes:
        reset: True if the workers must be told of a cache reset.
    """

    def __init__(
        self, index: PageIndex, *, wanted: bool, wall: Callable[[], int] = time.time_ns
    ) -> None:
        self.reset = False
        self._index = index
        self._wanted = wanted
        self._wall = wall
        self._unsent: list[Settlement] = []

    @property
    def unsent(self) -> bool:
        """True if there is something to tell."""
        return self.reset or bool(self._unsent)

    def on_settled(self, done: Settled) -> None:
        """Take in an order that every rank has reported, after its pages were committed."""
        order = done.order
        if not self._wanted or not isinstance(order, (SaveOrder, PromoteOrder)):
            return
        holds = self._index.holds
        pages = enumerate(zip(order.keys, order.slots, strict=True))
        bad = frozenset(i for i, (key, slot) in pages if not holds(key, slot))
        self._unsent.append(Settlement(order.order_id, bad, self._wall()))

    def on_reset(self) -> None:
        """Have all pages so far forgotten, and no later one told: their keys are nobody else's."""
        self._unsent.clear()
        self.reset, self._wanted = self._wanted, False

    def take(self) -> tuple[tuple[Settlement, ...], bool]:
        """Hand over what is to be told, and whether there was a reset."""
        told, self._unsent = tuple(self._unsent), []
        reset, self.reset = self.reset, False
        return told, reset
