"""Restores in pieces: a context that does not fit in CPU memory is promoted from the lower tiers in
pieces. Each piece is copied to VRAM, and its slots are released."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import NOW
from tiered_kv.connectors.runtime.turn import PlacedPage, Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, OrderId
from tiered_kv.pages.base import PageState
from tiered_kv.pages.order_book import OrderBook, Settled

from .restores import Restores

PIECES_SHARE = 4
"""One slot in this many may be used by restores in pieces."""
PIECE_BYTES = 64 << 20
"""Maximum size of a piece, bytes; half of the slots for pieces if that is less. It is large enough
for a disk to reach full speed. The copy of the last piece, which overlaps with no read, takes a few
milliseconds."""


@dataclass(slots=True)
class _Piece:
    """Pages of one group that are being promoted.

    Attributes:
        orders: promotion orders for the pages.
        own: pages that are promoted for this restore.
    """

    pages: Sequence[PlacedPage]
    orders: set[OrderId]
    own: set[PageKey]


@dataclass(slots=True)
class _Restore:
    """A restore in pieces.

    Attributes:
        until: deadline for all pages, seconds.
        rest: pages not ordered yet, in order.
        coming: pieces being promoted, in order.
        lost: blocks whose pages no tier has any more, and all blocks behind them.
    """

    turn: Turn
    until: float
    rest: deque[PlacedPage]
    coming: deque[_Piece] = field(default_factory=deque)
    lost: list[int] = field(default_factory=list)

    @property
    def unfinished(self) -> bool:
        """True if further pages may arrive."""
        return bool(self.rest or self.coming)

    def blocks(self) -> list[int]:
        """Blocks whose pages were not ordered to VRAM."""
        coming = [page.block for piece in self.coming for page in piece.pages]
        return [*coming, *(page.block for page in self.rest), *self.lost]


class RestorePieces:
    """Restores in pieces, oldest first. Reads and copies overlap.

    Their slots are separate from the slots of other promotions, to avoid a deadlock: a restore in
    pieces has VRAM and waits for slots, and a turn with promoted pages has slots and may wait for
    VRAM.

    Args:
        tiers: lower tiers, fastest first.
    """

    def __init__(
        self,
        engine: EngineState,
        tiers: Tiers,
        book: OrderBook,
        restores: Restores,
    ) -> None:
        self._tiers = tiers
        self._book = book
        self._index = book.index
        self._restores = restores
        self._counters = engine.counters
        self._clock = engine.clock
        self._under_way: dict[str, _Restore] = {}
        self._copying: dict[OrderId, int] = {}  # slots of orders to VRAM
        self._slots = 0  # slots in use, including those

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, turn: Turn, pages: Sequence[PlacedPage], until: float) -> None:
        """Promote the pages that a turn's restore lacks.

        Args:
            pages: in the order of the context, group by group.
            until: deadline for all pages, seconds. Missing pages are then prefilled.
        """
        self._under_way[turn.request_id] = _Restore(turn, until, deque(pages))
        self._counters.add("restores_in_pieces")

    def on_settled(self, done: Settled[LoadOrder]) -> None:
        """Release the slots of a finished order to VRAM."""
        self._slots -= self._copying.pop(done.order.order_id, 0)

    def advance(self) -> list[Turn]:
        """Copy arrived pages, and order more. Returns the turns that have nothing in flight any
        more and some of whose pages failed to arrive."""
        over, now = list[Turn](), self._clock()
        for request_id, restore in list(self._under_way.items()):
            self._copy_arrived(restore)
            self._order_more(restore)
            late = restore.unfinished and now >= restore.until
            self._counters.add("promotions_overdue", late)
            if late or (restore.lost and not restore.unfinished):
                if self._break_off(restore):
                    over.append(restore.turn)
            elif not restore.unfinished:
                del self._under_way[request_id]
        return over

    def end(self, turn: Turn) -> None:
        """End the restore in pieces of a finished turn, if it has one."""
        restore = self._under_way.get(turn.request_id)
        if restore is not None:
            self._break_off(restore)
        self._restores.on_ended(turn)

    def end_all(self) -> None:
        """End every restore in pieces, because pages are forgotten or are not arriving."""
        for restore in list(self._under_way.values()):
            self._break_off(restore)

    def _break_off(self, restore: _Restore) -> bool:
        del self._under_way[restore.turn.request_id]
        for piece in restore.coming:
            self._slots -= len(piece.own)
            self._tiers.give_up(filter(self._book.under_way, piece.orders))
        return self._restores.break_off(restore.turn, restore.blocks())

    # -- from CPU memory to VRAM ----------------------------------------------------

    def _copy_arrived(self, restore: _Restore) -> None:
        """Order the first pieces to VRAM whose pages have arrived. Pages that failed to arrive, or
        are missing again, are promoted again."""
        book, index = self._book, self._index
        while restore.coming:
            piece = restore.coming[0]
            piece.orders = set(filter(book.under_way, piece.orders))
            if piece.orders:
                return
            readable = index.readable
            there = [page for page in piece.pages if readable(page.key)]
            absent = [page for page in piece.pages if not readable(page.key)]
            if any(index.state(page.key).moving for page in absent):
                return
            restore.coming.popleft()
            restore.rest.extendleft(reversed(absent))
            self._slots -= sum(page.key in piece.own for page in absent)
            if there:
                self._copy(restore, there, piece.own)

    def _copy(self, restore: _Restore, pages: Sequence[PlacedPage], own: set[PageKey]) -> None:
        """Order readable pages to VRAM. Pages promoted for this restore are dropped from CPU
        memory, because a lower tier has them."""
        more = restore.unfinished or bool(restore.lost)
        keys, blocks = [page.key for page in pages], [page.block for page in pages]
        order = self._restores.add_piece(restore.turn, pages[0].group, keys, blocks, more=more)
        given_back = [key for key in keys if key in own]
        self._copying[order] = len(given_back)
        for key in given_back:
            self._index.forget(key)

    # -- from lower tiers to CPU memory -----------------------------------------------

    def _order_more(self, restore: _Restore) -> None:
        """Promote more pages, as far as slots allow."""
        while restore.rest:
            room = self._room() - self._slots
            if room <= 0 or not self._order_piece(restore, room):
                return

    def _room(self) -> int:
        """Number of slots that restores in pieces may use together."""
        return max(1, self._index.num_slots // PIECES_SHARE)

    def _order_piece(self, restore: _Restore, room: int) -> bool:
        """Promote the next piece, of at most ``room`` pages; False if there are no slots."""
        turn, rest, index = restore.turn, restore.rest, self._index
        group = rest[0].group
        whole = min(PIECE_BYTES // self._book.page_bytes[group], self._room() // 2)
        most = min(room, max(1, whole))
        pages = list(islice(takewhile(lambda page: page.group == group, rest), most))
        found = self._tiers.by_tier(index.missing({page.key: page for page in pages}))
        ordered = set[PageKey]()
        for store, keys in found.items():
            if (order := self._tiers[store].promote(keys, NOW, turn)) is not None:
                ordered.update(order.keys)
        pages = list(takewhile(lambda page: index.state(page.key) is not PageState.MISSING, pages))
        if not pages:
            if not any(rest[0].key in keys for keys in found.values()):
                restore.lost = [page.block for page in rest]
                rest.clear()
            return False
        for _ in pages:
            rest.popleft()
        coming, readable = self._book.promoting, index.readable
        awaited = [page for page in pages if not readable(page.key)]
        if awaited:
            orders = {coming[page.key] for page in awaited if page.key in coming}
            own = ordered.intersection(page.key for page in awaited)
            restore.coming.append(_Piece(awaited, orders, own))
            self._slots += len(own)
        if here := [page for page in pages if readable(page.key)]:
            self._copy(restore, here, set())
        return True
