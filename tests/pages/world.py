"""The state of ``OrdersMachine``: the expected page of each key, and the bytes on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from tiered_kv.keys import PageKey
from tiered_kv.orders import DemoteOrder, LoadOrder, OrderId, PackOrder, PromoteOrder, SaveOrder
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.stores import SSD

KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(7)]
BLOCKS = range(1, 15)
PAGE_BYTES = 64
BANDWIDTH = 1e9


PageOrder: TypeAlias = SaveOrder | LoadOrder | PackOrder | DemoteOrder | PromoteOrder


@dataclass(eq=False)
class Bundle:
    """Pages that are compressed together, or about to be, and the slots of the bundle."""

    slots: list[int]
    serial: int

    def kept(self, rank: int) -> int:
        """Return the number of slots that a rank needs for the bundle. The number differs between
        ranks."""
        return 1 + (self.serial + rank) % len(self.slots)


@dataclass(eq=False)
class Page:
    """Expected state of a page: its bytes, and where they are.

    ``bytes_of`` differs between ranks and between saves.
    """

    key: PageKey
    serial: int
    slot: int
    whole: bool = False
    bundle: Bundle | None = None

    @property
    def place(self) -> int:
        """The place by which orders refer to the page."""
        return self.slot if self.bundle is None else cold_place(self.bundle.slots[0])

    @property
    def slots(self) -> list[int]:
        """Slots that must not change while the page exists."""
        return [self.slot] if self.bundle is None else self.bundle.slots

    @property
    def state(self) -> PageState:
        """The state that the index must report."""
        if self.bundle is None:
            return PageState.RESIDENT if self.whole else PageState.BEING_WRITTEN
        return PageState.COMPRESSED if self.whole else PageState.BEING_COMPRESSED

    def bytes_of(self, rank: int) -> bytes:
        return b"%s save %d rank %d" % (self.key[:1], self.serial, rank)


@dataclass(eq=False)
class Flight:
    """An order in flight, the ranks that have executed it, and the ranks that have reported."""

    order: PageOrder
    pages: list[Page]
    abandoned: bool = False
    copied: dict[int, frozenset[int]] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)

    @property
    def failed(self) -> frozenset[int]:
        return frozenset().union(*self.copied.values())

    @property
    def bundle(self) -> Bundle | None:
        """The bundle that the order is about to compress; None for other orders."""
        return self.pages[0].bundle if isinstance(self.order, PackOrder) else None

    def kept(self, ranks: Iterable[int]) -> int:
        """Return the number of slots that the bundle needs on these ranks. 0 if there is no bundle,
        or a rank has lost it."""
        lost = self.bundle is None or any(self.copied[rank] for rank in ranks)
        return 0 if lost or self.bundle is None else max(map(self.bundle.kept, ranks))

    def __repr__(self) -> str:
        return f"{type(self.order).__name__} {self.order.order_id}"


class World(RuleBasedStateMachine):
    """The order book under test, the model, and the bytes of every rank.

    Subclasses may override ``make`` to plant a bug.
    """

    def make(self, num_slots: int, ranks: int) -> OrderBook:
        index = PageIndex(num_slots, LeastRecentlyUsed())
        return OrderBook(index, ranks, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()})

    @initialize(num_slots=st.sampled_from([4, 5, 3, 2, 1, 0]), ranks=st.integers(1, 3))
    def start(self, num_slots: int, ranks: int) -> None:
        self.planner = self.make(num_slots, ranks)
        self.index = self.planner.index
        self.ranks = range(ranks)
        self.vram = [dict.fromkeys(BLOCKS, b"nothing yet") for _ in self.ranks]
        self.slots = [dict.fromkeys(range(num_slots), b"nothing yet") for _ in self.ranks]
        self.ssd: list[dict[PageKey, bytes]] = [{} for _ in self.ranks]
        # By first slot of a bundle: its slots, their expected content, and its pages.
        self.packed_pages: list[dict[int, tuple[list[int], bytes, dict[PageKey, bytes]]]]
        self.packed_pages = [{} for _ in self.ranks]
        self.on_ssd: dict[PageKey, int] = {}  # key -> serial of the page
        self.pages: dict[PageKey, Page] = {}
        self.flights: dict[OrderId, Flight] = {}
        self.held: dict[int, int] = {}  # block -> number of orders that need it unchanged
        self.serial = 0

    @property
    def world(self) -> int:
        return len(self.ranks)

    def readable(self, key: PageKey) -> bool:
        return key in self.pages and self.pages[key].whole

    def idle(self, key: PageKey) -> bool:
        page = self.pages[key]
        used = list(chain.from_iterable(flight.pages for flight in self.flights.values()))
        bundles = {one.bundle for one in used if one.bundle is not None}
        return page.whole and page not in used and page.bundle not in bundles

    def slots_in_use(self) -> set[int]:
        used = chain.from_iterable(flight.pages for flight in self.flights.values())
        return {slot for page in chain(self.pages.values(), used) for slot in page.slots}

    def content(self, rank: int, key: PageKey, place: int) -> bytes:
        """Return the bytes that a rank reads at a place."""
        if place >= 0:
            return self.slots[rank][place]
        slots, mark, pages = self.packed_pages[rank].get(cold_place(place), ([], b"", {}))
        if any(self.slots[rank][slot] != mark for slot in slots):
            return b"torn"
        return pages.get(key, b"another bundle")

    def carry_out_pack(self, flight: Flight, rank: int, fail: bool) -> None:
        """Compress pages into their own slots. If ``fail`` is true, lose them."""
        order, slots, bundle = flight.order, self.slots[rank], flight.bundle
        assert isinstance(order, PackOrder)
        assert bundle is not None
        flight.copied[rank] = frozenset(range(len(order.slots) if fail else 0))
        pages = {key: slots[slot] for key, slot in zip(order.keys, order.slots, strict=True)}
        mark = b"bundle %d rank %d" % (bundle.serial, rank)
        kept = list(order.slots[: bundle.kept(rank)])
        slots.update(dict.fromkeys(kept, b"torn" if fail else mark))
        self.packed_pages[rank][order.slots[0]] = kept, mark, pages

    def unsent_saves(self) -> list[Flight]:
        return [f for f in self.flights.values() if self.is_save(f) and not f.copied]

    def to_copy(self) -> list[tuple[Flight, int]]:
        return [
            (flight, rank)
            for flight in self.flights.values()
            for rank in self.ranks
            if rank not in flight.copied
        ]

    def to_report(self) -> list[tuple[Flight, int]]:
        return [
            (flight, rank)
            for flight in self.flights.values()
            for rank in flight.copied
            if rank not in flight.reported
        ]

    def is_save(self, flight: Flight) -> bool:
        return isinstance(flight.order, SaveOrder)

    def is_demotion(self, flight: Flight) -> bool:
        return isinstance(flight.order, DemoteOrder) and not flight.abandoned

    def forget(self, page: Page) -> None:
        """Remove the page from the model, unless a newer save has replaced it."""
        if self.pages.get(page.key) is page:
            del self.pages[page.key]

    def end(self, flight: Flight) -> None:
        del self.flights[flight.order.order_id]
        if not (flight.abandoned and self.is_save(flight)):
            self.give_up(flight)

    def give_up(self, flight: Flight) -> None:
        if isinstance(flight.order, SaveOrder | LoadOrder):
            for block in flight.order.blocks:
                self.held[block] -= 1

    def free_blocks(self, data: st.DataObject, count: int) -> list[int]:
        """Return blocks that no order needs. Abandoned saves may still read them and get
        garbage."""
        free = [block for block in BLOCKS if not self.held.get(block)]
        first = data.draw(st.integers(0, len(free) - 1)) if free else 0
        return (free[first:] + free[:first])[:count]

    def pick(self, data: st.DataObject, among: list[Any]) -> Any:
        return among[self.draw_index(data, among)]

    def draw_index(self, data: st.DataObject, among: list[Any]) -> int:
        return data.draw(st.integers(0, len(among) - 1))
