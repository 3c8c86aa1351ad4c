"""Capture of a job's pages: they are brought into CPU memory, and kept there until they were used.

Of a running turn the pages are copied from its blocks, at the last boundary of its answer: the very
bytes that it would go on with. A full block does not change any more, and what the next steps write
behind the boundary does not matter. So nobody waits.

Of a job between two turns the pages are found by their keys, wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tiered_kv.connectors.runtime.base import Block, BlockPool, EngineFacts
from tiered_kv.connectors.runtime.below.sources import PageSources
from tiered_kv.connectors.runtime.pages.hits import HitFinder, run_of
from tiered_kv.connectors.runtime.pages.promotions import Promotions
from tiered_kv.connectors.runtime.pages.saves import Saves
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.snapshot_orders import ContextPage
from tiered_kv.snapshot.manifest import SnapshotError

from .context_pages import ContextNames, context_pages
from .job_contexts import Context
from .operations import Wait, file_work


@dataclass(slots=True)
class Captured:
    """Pages of a context in CPU memory. They stay until ``Captures.release``.

    Attributes:
        context: the context; ``kv_tokens`` of it have their KV in the pages.
        named: a turn of those tokens.
        salt: cache salt that the pages are named by.
        saved: pages that were copied from VRAM for this.
        held: the place of each page that is kept.
    """

    context: Context
    named: Turn
    salt: str | None
    pages: tuple[ContextPage, ...]
    saved: int = 0
    held: dict[PageKey, int] = field(default_factory=dict)


Capturing: TypeAlias = Generator[Wait, None, Captured]


class Captures:
    """Captures contexts. One thread, the scheduler's.

    Args:
        finder, promotions, sources: those of restores.
        group_of: gives the group of a page; None if that is not known.
        names: names contexts, on a thread of ``files``.
    """

    def __init__(
        self,
        facts: EngineFacts,
        pool: BlockPool,
        book: OrderBook,
        saves: Saves,
        finder: HitFinder,
        promotions: Promotions,
        sources: PageSources,
        group_of: Callable[[PageKey], int | None],
        names: ContextNames,
        files: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._pool = pool
        self._book = book
        self._index = book.index
        self._saves = saves
        self._finder = finder
        self._promotions = promotions
        self._sources = sources
        self._group_of = group_of
        self._names = names
        self._files = files
        self._clock = clock

    def release(self, captured: Captured, *, forget: bool) -> None:
        """Keep the pages no longer.

        Args:
            forget: True if nobody can ask for them: they have names of their own.
        """
        held, captured.held = captured.held, {}
        for key, place in held.items():
            self._index.release(key, place, used=False)
        for page in captured.pages if forget else ():  # those still on their way, too
            self._index.forget(page.key)

    # -- of a running turn ----------------------------------------------------------

    def running(self, turn: Turn, salt: str | None, parents: tuple[str, ...]) -> Capturing:
        """Capture a turn that has begun to answer, under names with that salt.

        Raises:
            SnapshotError: it cannot be captured; the sentence says what to do.
        """
        if self._facts.has_states:
            raise SnapshotError(
                "A running turn of a model with states has no boundary to cut at: wait for its end "
                "(--wait-turn)."
            )
        context = Context.of(turn.request, turn.number, parents)
        tokens = list(context.token_ids[: context.kv_tokens + 1])
        context = replace(context, token_ids=tokens)  # the request's own list grows
        blocks = self._blocks(turn, context.kv_tokens)
        self._pool.hold(blocks)  # while names are computed; the request may end meanwhile
        try:
            naming = self._files.submit(self._names.name, tokens[: context.kv_tokens], salt)
            yield file_work("the context is named", naming)
            captured = Captured(context, naming.result(), salt, ())
            captured.pages = context_pages(captured.named, self._facts)
        except BaseException:
            self._pool.release(reversed(blocks))
            raise
        try:
            try:
                orders = self._save(captured, blocks)
            finally:
                self._pool.release(reversed(blocks))
            yield Wait("pages are copied to CPU memory", lambda: self._settled(orders))
            for page in captured.pages:
                if not self._index.readable(page.key):
                    raise SnapshotError("A copy to CPU memory failed: try again.")
                captured.held[page.key] = self._index.acquire(page.key)
        except BaseException:
            self.release(captured, forget=salt != context.salt)
            raise
        return captured

    def _blocks(self, turn: Turn, tokens: int) -> list[Block]:
        """The turn's blocks of its first ``tokens``, group after group."""
        found = list[Block]()
        for at, group in enumerate(self._facts.groups):
            table = self._pool.tables[at].get(turn.request_id, ())
            for block in group.needs(tokens):
                if block >= len(table) or table[block].is_null:
                    raise SnapshotError("The turn has just lost its blocks: try again.")
                found.append(table[block])
        return found

    def _save(self, captured: Captured, blocks: Sequence[Block]) -> list[OrderId]:
        if len(captured.pages) != len(blocks):
            raise SnapshotError("Tokens alone do not tell this prompt: it cannot be taken out.")
        filled: list[dict[PageKey, int]] = [{} for _ in self._facts.groups]
        for page, block in zip(captured.pages, blocks, strict=True):
            if not self._index.known(page.key):
                filled[page.group][page.key] = block.block_id
        wanted = sum(map(len, filled))
        orders = self._saves.capture(filled)
        captured.saved = sum(len(order.keys) for order in orders)
        if captured.saved < wanted:
            raise SnapshotError(
                f"CPU memory has no room for {wanted} pages now: try again, or set "
                "TIERED_KV_CPU_GIB higher."
            )
        return [order.order_id for order in orders]

    def _settled(self, orders: Sequence[OrderId]) -> bool:
        return not any(map(self._book.under_way, orders))

    # -- of a job between two turns ---------------------------------------------------

    def waiting(self, context: Context) -> Capturing:
        """Capture the context of a job that waits, as far as its KV can be found.

        Raises:
            SnapshotError: there is none; the sentence says what to do.
        """
        naming = self._files.submit(self._names.name, context.token_ids, context.salt)
        yield file_work("the context is named", naming)
        whole: Turn = naming.result()
        captured = Captured(context, whole, context.salt, ())
        try:
            yield from self._gather(captured, whole)
        except BaseException:
            self.release(captured, forget=False)
            raise
        kv_tokens = captured.context.kv_tokens
        naming = self._files.submit(self._names.name, context.token_ids[:kv_tokens], context.salt)
        yield file_work("the context is named", naming)
        captured.named = naming.result()
        return captured

    def _gather(self, captured: Captured, whole: Turn) -> Generator[Wait, None, None]:
        """Bring the pages into CPU memory, and keep them there."""
        context, index = captured.context, self._index
        while True:
            somewhere = self._somewhere()
            found = self._finder.find(whole, 0, context.kv_tokens, somewhere, run_of(somewhere))
            if found is None:
                raise SnapshotError(
                    "Nothing of this job's KV is left: it was evicted from every tier. Take it "
                    "while a turn runs, or give the tiers more room."
                )
            pages = tuple(
                ContextPage(part.group, part.first + i, key)
                for part in found.parts
                for i, key in enumerate(part.keys)
            )
            missing = self._hold(captured, pages)
            if not missing:
                captured.pages = pages
                captured.context = replace(context, kv_tokens=found.tokens)
                for key in captured.held.keys() - {page.key for page in pages}:
                    index.release(key, captured.held.pop(key), used=False)
                return
            captured.saved += self._fetch(missing)
            yield self._arrival([page.key for page in missing])

    def _arrival(self, keys: Sequence[PageKey]) -> Wait:
        return Wait("pages come to CPU memory", lambda: not any(map(self._moves, keys)))

    def _somewhere(self) -> Callable[[PageKey], bool]:
        """A test whether a page can be had: in CPU memory, on its way there, below, or in VRAM."""
        below = self._sources.somewhere()
        return lambda key: self._index.known(key) or below(key) or self._in_vram(key) is not None

    def _in_vram(self, key: PageKey) -> tuple[int, Block] | None:
        """The block of a page in VRAM, with its group; None if none has it."""
        at = self._group_of(key)
        block = self._pool.cached(key[DIGEST_BYTES:], at) if at is not None else None
        return (at, block) if at is not None and block is not None else None

    def _hold(self, captured: Captured, pages: Sequence[ContextPage]) -> list[ContextPage]:
        """Keep the pages that are readable; gives the others."""
        missing = list[ContextPage]()
        for page in pages:
            if page.key in captured.held:
                continue
            if self._index.readable(page.key):
                captured.held[page.key] = self._index.acquire(page.key)
            else:
                missing.append(page)
        return missing

    def _fetch(self, missing: Sequence[ContextPage]) -> int:
        """Order pages to CPU memory; gives how many are copied from VRAM.

        Raises:
            SnapshotError: nothing can be ordered, and nothing is on its way.
        """
        if any(self._moves(page.key) for page in missing):
            return 0
        filled: list[dict[PageKey, int]] = [{} for _ in self._facts.groups]
        for page in missing:
            if (found := self._in_vram(page.key)) is not None:
                filled[found[0]][page.key] = found[1].block_id
        saved = sum(len(order.keys) for order in self._saves.capture(filled))
        below = [page.key for page in missing if not self._index.known(page.key)]
        ordered = self._promotions.promote_ahead(below, self._clock()) if below else 0
        if not saved and not ordered:
            raise SnapshotError(
                f"CPU memory has no room for the {len(missing)} pages of this context that are not "
                "there: set TIERED_KV_CPU_GIB higher."
            )
        return saved

    def _moves(self, key: PageKey) -> bool:
        """True if a page is on its way to CPU memory, or being compressed there."""
        return self._index.known(key) and not self._index.readable(key)
