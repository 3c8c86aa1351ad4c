"""Restores in pieces, for two types of contexts.

Restoring a long context in a single step would block the scheduler's thread for too long. The
restore is therefore ordered over several steps, and its blocks are hashed as they arrive; the
engine would hash all of them in one step.

A context that does not fit in CPU memory is promoted from the lower tiers in pieces. Each piece is
copied to VRAM, and then its slots are released.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import NOW
from tiered_kv.connectors.runtime.turn import PlacedPage, PlacedRun, Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, OrderId
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook, Settled

from .restores import Restores

PIECES_SHARE = 4
"""One slot in ``PIECES_SHARE`` may be used by restores in pieces."""
PIECE_BYTES = 64 << 20
"""Maximum size of a piece, bytes; half of the slots for pieces if that is less. A piece of this
size is large enough for a disk to reach full speed. Copying the last piece, while nothing is read
any more, takes a few milliseconds."""


PAGES_A_STEP = 512
"""Maximum number of pages that all restores in pieces together order in a step."""
TOKENS_A_STEP = 32_768
"""Maximum number of tokens in these pages. Copying their KV to VRAM takes longer than a step."""
PIECES_A_STEP = 4
"""Maximum number of pieces whose promotion is ordered in a step. Pages are evicted for each piece,
and a disk takes longer than a step to read four large ones."""
TOUCHED_A_STEP = 1024
"""Maximum number of pages of a restore that are counted as used in a step."""
_ID = attrgetter("block_id")


@dataclass(slots=True)
class _Rest:
    """Pages of a restore that are not ordered yet, in order.

    Attributes:
        again: pages whose promotion failed, and that are to be promoted again.
        runs: runs of the pages that follow.
        at: number of pages of the first run that were ordered already.
    """

    runs: deque[PlacedRun]
    again: deque[PlacedPage] = field(default_factory=deque)
    at: int = 0

    def __bool__(self) -> bool:
        return bool(self.again or self.runs)

    @property
    def group(self) -> int:
        """Return the group of the first page. Requires that a page is left."""
        return self.again[0].group if self.again else self.runs[0].group

    def first(self, most: int) -> list[PlacedPage]:
        """Return the first pages of one group, at most ``most``. Requires that a page is left."""
        if self.again:
            same = takewhile(lambda page: page.group == self.group, self.again)
            return list(islice(same, most))
        run, part = self.runs[0], slice(self.at, self.at + most)
        pairs = zip(run.keys[part], map(_ID, run.blocks[part]), strict=True)
        return [PlacedPage(run.group, key, block) for key, block in pairs]

    def drop(self, pages: int) -> None:
        """Remove the first ``pages`` pages, which must be in one group."""
        if self.again:
            for _ in range(pages):
                self.again.popleft()
        else:
            self.at += pages
            if self.at == len(self.runs[0].keys):
                self.runs.popleft()
                self.at = 0

    def take_readable(self, index: PageIndex, most: int) -> PlacedRun | None:
        """Remove and return the run of readable pages at the start; None if there is none."""
        if self.again:
            return None
        run, start = self.runs[0], self.at
        stop = index.readable_prefix(run.keys, start, min(start + most, len(run.keys)))
        if stop == start:
            return None
        self.drop(stop - start)
        first = run.first + start
        return PlacedRun(run.group, first, run.keys[start:stop], run.blocks[start:stop])

    def blocks(self) -> list[int]:
        """Return the blocks of all these pages."""
        found = [page.block for page in self.again]
        for at, run in enumerate(self.runs):
            found += map(_ID, run.blocks[0 if at else self.at :])
        return found


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
        rest: pages not ordered yet.
        touch: runs of pages that are not counted as used yet, each with the number of its pages
            that are left.
        coming: pieces being promoted, in order.
        lost: blocks whose pages no tier has any more, and all blocks after them.
        copying: unfinished copies to VRAM of pages in the order of the context, each with the
            number of tokens up to its end.
        follows: number of blocks before the page that follows the last of these copies; None once
            a page was copied out of order, or a copy failed.
        tokens: number of tokens up to the end of the restore.
    """

    turn: Turn
    until: float
    rest: _Rest
    touch: list[tuple[PlacedRun, int]]
    follows: int | None
    tokens: int
    coming: deque[_Piece] = field(default_factory=deque)
    lost: list[int] = field(default_factory=list)
    copying: dict[OrderId, int] = field(default_factory=dict)

    @property
    def unfinished(self) -> bool:
        """Return True if further pages may arrive."""
        return bool(self.rest or self.coming)

    def blocks(self) -> list[int]:
        """Return the blocks whose pages were not ordered to VRAM."""
        coming = [page.block for piece in self.coming for page in piece.pages]
        return [*coming, *self.rest.blocks(), *self.lost]


class RestorePieces:
    """Restores in pieces, oldest first. Reads and copies overlap.

    The slots for pieces are separate from the slots of other promotions, to avoid a deadlock: a
    restore in pieces has VRAM and waits for slots, whereas a turn with promoted pages has slots and
    may wait for VRAM.

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
        self._pool = engine.pool
        self._block_size = engine.facts.block_size
        # A single group without windows has whole blocks in the order of the context.
        self._hashes = engine.facts.recovers_by_block
        self._left = 0  # pages that may still be ordered in this step
        self._pieces_left = 0  # pieces that may still be promoted in this step
        self._under_way: dict[str, _Restore] = {}
        self._copying: dict[OrderId, int] = {}  # slots that each copy to VRAM releases
        self._slots = 0  # slots in use, including slots being copied
        self.begin_step()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin_step(self) -> None:
        """Start a step."""
        self._left = max(1, min(PAGES_A_STEP, TOKENS_A_STEP // self._block_size))
        self._pieces_left = PIECES_A_STEP

    def begin(
        self, turn: Turn, runs: Sequence[PlacedRun], tokens: int, until: float | None
    ) -> None:
        """Restore a turn's pages.

        Args:
            runs: runs of the pages in the order of the context, group by group; at least one.
            tokens: number of tokens that the pages add to the prefix in VRAM.
            until: deadline for all pages, seconds. Missing pages are then prefilled. None if all
                pages are in CPU memory.
        """
        first = runs[0].first
        self._under_way[turn.request_id] = _Restore(
            turn,
            math.inf if until is None else until,
            _Rest(deque(runs)),
            [(run, len(run.keys)) for run in runs],
            first if self._hashes else None,
            first * self._block_size + tokens,
        )
        self._counters.add("restores_in_pieces", until is not None)
        self._touch_some(self._under_way[turn.request_id])

    def _touch_some(self, restore: _Restore) -> None:
        """Count some pages that are not ordered yet as used, from the end of the context on, so
        that no page is evicted before it is ordered."""
        left = TOUCHED_A_STEP
        while left > 0 and restore.touch:
            run, stop = restore.touch.pop()
            start = max(0, stop - left)
            self._index.touch(run.keys[start:stop][::-1])
            left -= stop - start
            if start:
                restore.touch.append((run, start))

    def on_settled(self, done: Settled[LoadOrder]) -> None:
        """Release the slots of a finished copy to VRAM. If all earlier copies of its restore
        succeeded, let prefix lookups find its blocks."""
        order = done.order
        self._slots -= self._copying.pop(order.order_id, 0)
        restore = self._under_way.get(order.request_id)
        if restore is None or order.order_id not in restore.copying:
            return
        in_turn = next(iter(restore.copying)) == order.order_id
        tokens = restore.copying.pop(order.order_id)
        if done.failed or not in_turn:
            restore.follows = None
            restore.copying.clear()
        else:
            self._pool.hash_prefix(restore.turn.request, tokens)

    def advance(self) -> list[Turn]:
        """Copy arrived pages, and order more. Returns the turns whose restore was ended because
        pages failed to arrive in time, and that have no copy in flight."""
        over, now = list[Turn](), self._clock()
        for request_id, restore in list(self._under_way.items()):
            if restore.touch:
                self._touch_some(restore)
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
        """End every restore in pieces, because all pages are forgotten, or no pages arrive."""
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
        """Copy to VRAM the first pieces, up to a piece whose pages have not arrived. Pages that
        failed to arrive, or are missing again, are promoted again."""
        book, index = self._book, self._index
        while restore.coming:
            piece = restore.coming[0]
            piece.orders = set(filter(book.under_way, piece.orders))
            if piece.orders:
                return
            missing = {*index.unreadable([page.key for page in piece.pages])}
            if any(index.state(key).moving for key in missing):
                return
            there = [page for page in piece.pages if page.key not in missing]
            absent = [page for page in piece.pages if page.key in missing]
            restore.coming.popleft()
            restore.rest.again.extendleft(reversed(absent))
            self._slots -= sum(page.key in piece.own for page in absent)
            if there:
                self._copy(restore, there, piece.own)

    def _copy(self, restore: _Restore, pages: Sequence[PlacedPage], own: set[PageKey]) -> None:
        """Order a copy of readable pages to VRAM. Pages promoted for this restore are dropped from
        CPU memory, because a lower tier has them."""
        keys, blocks = [page.key for page in pages], [page.block for page in pages]
        order = self._add_piece(restore, pages[0].group, keys, blocks)
        given_back = [key for key in keys if key in own]
        self._copying[order] = len(given_back)
        self._index.forget_all(given_back)

    def _copy_readable(self, restore: _Restore) -> bool:
        """Order a copy of the next pages to VRAM if CPU memory has them. Returns False if CPU
        memory lacks the next page."""
        run = restore.rest.take_readable(self._index, self._left)
        if run is None:
            return False
        self._left -= len(run.keys)
        in_turn = run.first == restore.follows
        order = self._add_piece(restore, run.group, run.keys, list(map(_ID, run.blocks)))
        if in_turn:
            restore.follows = run.first + len(run.keys)
            restore.copying[order] = min(restore.tokens, restore.follows * self._block_size)
        return True

    def _add_piece(
        self, restore: _Restore, group: int, keys: Sequence[PageKey], blocks: Sequence[int]
    ) -> OrderId:
        restore.follows = None  # the caller sets it again if pages are in order
        more = restore.unfinished or bool(restore.lost)
        return self._restores.add_piece(restore.turn, group, keys, blocks, more=more)

    # -- from lower tiers to CPU memory -----------------------------------------------

    def _order_more(self, restore: _Restore) -> None:
        """Order further pages, as far as slots and the limit per step allow."""
        while restore.rest and self._left > 0:
            if self._copy_readable(restore):
                continue
            room = self._room() - self._slots
            if room <= 0 or not self._pieces_left or not self._order_piece(restore, room):
                return

    def _room(self) -> int:
        """Return the number of slots that restores in pieces may use together."""
        return max(1, self._index.num_slots // PIECES_SHARE)

    def _order_piece(self, restore: _Restore, room: int) -> bool:
        """Order the next piece. Returns False if there are no slots, or no tier has the pages.

        Args:
            room: maximum number of its pages that are promoted.
        """
        turn, rest, index = restore.turn, restore.rest, self._index
        whole = min(PIECE_BYTES // self._book.page_bytes[rest.group], self._room() // 2)
        pages = rest.first(min(max(1, whole), self._left))
        first = pages[0].key
        missing = index.missing({page.key: page for page in pages})
        found = self._tiers.by_tier(islice(missing, room))
        ordered = set[PageKey]()
        for store, keys in found.items():
            if (order := self._tiers[store].promote(keys, NOW, turn)) is not None:
                ordered.update(order.keys)
        self._pieces_left -= bool(ordered)
        pages = list(takewhile(lambda page: index.state(page.key) is not PageState.MISSING, pages))
        if not pages:
            if not any(first in keys for keys in found.values()):
                restore.lost = rest.blocks()
                restore.rest = _Rest(deque())
            return False
        rest.drop(len(pages))
        self._left -= len(pages)
        coming, absent = self._book.promoting, {*index.unreadable([page.key for page in pages])}
        awaited = [page for page in pages if page.key in absent]
        if awaited:
            orders = {coming[page.key] for page in awaited if page.key in coming}
            own = ordered.intersection(page.key for page in awaited)
            restore.coming.append(_Piece(awaited, orders, own))
            self._slots += len(own)
        if here := [page for page in pages if page.key not in absent]:
            self._copy(restore, here, set())
        return True
