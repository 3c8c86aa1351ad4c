"""Capture of a job: the pages of its running turn, or of its last context, are copied into CPU
memory and held there.

The pages of a running turn are copied from its blocks, up to the last boundary of its answer. The
turn itself continues with exactly these bytes. Full blocks do not change any more, and later steps
only write after the boundary, so the turn does not have to wait.

The pages of a job between two turns are found by their keys, in any tier.

The pages of an exact capture have separate keys, from a cache salt that no other request has.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from tiered_kv.connectors.runtime.base import Block
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.job_table import Job
from tiered_kv.connectors.runtime.pages.hits import run_of
from tiered_kv.connectors.runtime.pages.saves import kept_tokens
from tiered_kv.connectors.runtime.parts import Pages
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.formatting import count
from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.orders import ContextPage
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.policies.base import JobKey
from tiered_kv.snapshot.manifest import SnapshotError

from .context_pages import Context, ContextNames, Contexts, context_pages
from .operations import Wait, file_work

LOST_BLOCKS = "The turn's blocks have just been released: try again."
LONGEST_TURN_S = 3600.0
"""Longest wait for a turn to finish, seconds."""


@dataclass(slots=True)
class Captured:
    """A context whose pages are held in CPU memory.

    Attributes:
        context: the context; the pages contain the KV of its first ``kv_tokens`` tokens.
        named: a turn that never runs, with the page keys of these tokens.
        salt: cache salt of the page keys.
        saved: number of pages that were copied from VRAM for this capture.
    """

    context: Context
    named: Turn
    salt: str | None
    pages: tuple[ContextPage, ...] = ()
    saved: int = 0

    @property
    def keys(self) -> list[PageKey]:
        """Keys of the captured pages."""
        return [page.key for page in self.pages]


Capturing: TypeAlias = Generator[Wait, None, Captured]
"""A capture in progress. However it ends, the caller's ``HeldPages`` releases the held pages."""


class Captures:
    """Captures jobs. Used on the scheduler's thread.

    Args:
        group_of: returns the group of a page; None if unknown.
        names: computes page keys of contexts, on a thread of ``files``.

    Attributes:
        contexts: contexts of the jobs between two turns.
    """

    def __init__(
        self,
        engine: EngineState,
        pages: Pages,
        group_of: Callable[[PageKey], int | None],
        names: ContextNames,
        files: Executor,
    ) -> None:
        self.contexts = Contexts()
        self._facts = engine.facts
        self._turns = engine.turns
        self._pool = engine.pool
        self._book = pages.book
        self._index = pages.index
        self._saves = pages.saves
        self._finder = pages.finder
        self._promotions = pages.promotions
        self._tiers = pages.tiers
        self._group_of = group_of
        self._names = names
        self._files = files
        self._clock = engine.clock
        self._in_use: dict[int, list[Block]] = {}  # held VRAM blocks, by the list's id

    def hold_nothing(self) -> HeldPages:
        """Return a holder without pages, for a capture to fill."""
        return HeldPages(self._index)

    def release_vram(self) -> None:
        """Release every VRAM block that captures hold. A capture that still needs such a block
        fails."""
        for blocks in self._in_use.values():
            self._pool.release(reversed(blocks))
            blocks.clear()

    @contextmanager
    def _blocks_held(self, blocks: list[Block]) -> Iterator[None]:
        """Hold VRAM blocks for the duration of a ``with`` block. ``release_vram`` empties the
        list."""
        self._pool.hold(blocks)
        self._in_use[id(blocks)] = blocks
        try:
            yield
        finally:
            del self._in_use[id(blocks)]
            self._pool.release(reversed(blocks))

    def _named(self, tokens: Sequence[int], salt: str | None) -> Generator[Wait, None, Turn]:
        naming = self._files.submit(self._names.name, tokens, salt)
        return (yield from file_work("computing the context's page keys", naming))

    # -- capture of a job -------------------------------------------------------------

    def turn_over(self, job: Job, *, stop: bool) -> Generator[Wait, None, None]:
        """Wait for a job's turns to finish. With ``stop``, make them finish after their next
        token."""
        for request_id in job.running if stop else ():
            turn = self._turns.by_id.get(request_id)
            if turn is not None:
                turn.request.end_after_next_token()
        yield Wait("waiting for the turn to finish", lambda: not job.running, LONGEST_TURN_S)

    def of(self, job: Job, held: HeldPages, *, exact: bool) -> Generator[Wait, None, Captured]:
        """Capture the context of a job, whether a turn runs or the job is between two turns.

        Args:
            held: holds the pages. With ``exact``, its exit drops them unless they were published.

        Raises:
            SnapshotError: the job cannot be captured; the message says what to do.
        """
        while (turn := self._running_turn(job)) is not None and not self._has_boundary(turn):
            yield self._boundary(turn)  # another turn may run once this turn has ended
        if turn is None:
            context = self.contexts.get(job.key)
            if context is None:
                raise SnapshotError(
                    "The server no longer knows this job's context: try again while a turn of "
                    "the job runs."
                )
            if exact:
                raise SnapshotError(
                    "--exact needs a running turn, because the pages of a waiting job may come "
                    "from another computation of the same text: try again while a turn runs, "
                    "or leave out --exact."
                )
            return (yield from self._waiting(context, held))
        if not is_named_by_tokens(turn):
            raise SnapshotError(
                "Only text contexts of the base model can be saved or forked: this turn has "
                "images, embeddings or an adapter."
            )
        salt = turn.request.cache_salt
        if exact:
            self._check_exact(turn)
            salt = fresh_salt()
        return (yield from self._running(turn, salt, self.parents(job.key), held))

    def _running_turn(self, job: Job) -> Turn | None:
        turns = [self._turns.by_id[one] for one in job.running if one in self._turns.by_id]
        if len(turns) > 1:
            raise SnapshotError(
                "Several turns of this job are running: wait until they have finished, as a "
                "snapshot with --wait-turn does."
            )
        return turns[0] if turns else None

    def _boundary(self, turn: Turn) -> Wait:
        live = self._turns.by_id
        return Wait(
            "waiting for the turn's first token",
            lambda: live.get(turn.request_id) is not turn or self._has_boundary(turn),
            LONGEST_TURN_S,
        )

    def _has_boundary(self, turn: Turn) -> bool:
        request = turn.request
        return (
            not turn.loading
            and request.num_output_tokens > 0
            and kept_tokens(request) >= request.num_prompt_tokens
        )

    def _check_exact(self, turn: Turn) -> None:
        if (reason := turn.request.sampling.inexact) is not None:
            raise SnapshotError(f"--exact is not possible: {reason}")
        if self._turns.running > 1:
            raise SnapshotError(
                "--exact needs a turn that runs alone, because kernels sum in a different order "
                "for each batch shape: wait until no other request runs, or leave out --exact."
            )

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Return the names of the jobs from which a job was forked or restored, oldest first."""
        context = self.contexts.get(job)
        return context.parents if context is not None else ()

    # -- capture of a running turn --------------------------------------------------

    def _running(
        self, turn: Turn, salt: str | None, parents: tuple[str, ...], held: HeldPages
    ) -> Capturing:
        """Capture a turn that has started to decode, with page keys of the given salt.

        Raises:
            SnapshotError: the turn cannot be captured; the message says what to do.
        """
        if self._facts.has_states:
            raise SnapshotError(
                "A running turn of a model with states cannot be captured: wait until the turn "
                "has finished, as a snapshot with --wait-turn does."
            )
        context = Context.of(turn.request, turn.number, parents)
        tokens = list(context.token_ids[: context.kv_tokens + 1])
        context = replace(context, token_ids=tokens)  # the request's own list grows
        blocks = self._blocks(turn, context.kv_tokens)
        with self._blocks_held(blocks):  # the request may finish meanwhile
            named = yield from self._named(tokens[: context.kv_tokens], salt)
            captured = Captured(context, named, salt, context_pages(named, self._facts))
            if salt != context.salt:
                held.make_private(captured.keys)
            yield from self._copy(captured, blocks, held)
        return captured

    def _blocks(self, turn: Turn, tokens: int) -> list[Block]:
        """Return the blocks of the turn's first ``tokens`` tokens, group by group. Raises
        SnapshotError if one of these blocks was released."""
        found = list[Block]()
        for at, group in enumerate(self._facts.groups):
            table = self._pool.tables[at].get(turn.request_id, ())
            for block in group.needs(tokens):
                if block >= len(table) or table[block].is_null:
                    raise SnapshotError(LOST_BLOCKS)
                found.append(table[block])
        return found

    def _copy(
        self, captured: Captured, blocks: Sequence[Block], held: HeldPages
    ) -> Generator[Wait, None, None]:
        """Copy the pages that CPU memory lacks from their blocks, and hold all pages.

        Pages that another save or the compression is moving are awaited. If the move fails, these
        pages are copied too. Each round of copies must get further than the previous one. Raises
        SnapshotError if the pages do not fit, the blocks were released or the copies make no
        progress.
        """
        pages = captured.pages
        if not blocks:
            raise SnapshotError(LOST_BLOCKS)
        if len(pages) != len(blocks):
            raise SnapshotError(
                "The tokens of this prompt do not identify its KV, so the job can be neither saved "
                "nor forked."
            )
        if len(pages) > self._index.num_slots:
            raise _no_room(len(pages))
        sources = {
            page.key: (page.group, block.block_id)
            for page, block in zip(pages, blocks, strict=True)
        }
        least: float = math.inf
        while missing := held.hold(captured.keys):
            absent = [key for key in missing if not self._index.state(key).moving]
            if absent:
                if not blocks:
                    raise SnapshotError(LOST_BLOCKS)
                if len(missing) >= least:
                    raise SnapshotError("Copying pages to CPU memory failed: try again.")
                least = len(missing)
                saved = self._save({key: sources[key] for key in absent})
                if not saved and len(absent) == len(missing):
                    raise _no_room(len(absent))
                captured.saved += saved
            yield _arrival(held, missing)

    def _save(self, sources: Mapping[PageKey, tuple[int, int]]) -> int:
        """Order copies of pages from blocks of their groups. Returns the number of pages for which
        slots were free."""
        filled: list[dict[PageKey, int]] = [{} for _ in self._facts.groups]
        for key, (group, block) in sources.items():
            filled[group][key] = block
        return sum(len(order.keys) for order in self._saves.capture(filled))

    # -- capture of a job between turns -----------------------------------------------

    def _waiting(self, context: Context, held: HeldPages) -> Capturing:
        """Capture the context of a job between two turns, as far as its KV can be found.

        Raises:
            SnapshotError: no KV can be found; the message says what to do.
        """
        whole = yield from self._named(context.token_ids, context.salt)
        captured = Captured(context, whole, context.salt)
        yield from self._gather(captured, held)
        kv_tokens = captured.context.kv_tokens
        captured.named = yield from self._named(context.token_ids[:kv_tokens], context.salt)
        return captured

    def _gather(self, captured: Captured, held: HeldPages) -> Generator[Wait, None, None]:
        """Bring the pages into CPU memory, and hold them there.

        If pages are evicted or fail to arrive in the meantime, a shorter prefix is captured. Each
        round of orders must get further than the previous one. Raises SnapshotError if no page is
        left, the pages do not fit or the copies make no progress.
        """
        context = captured.context
        tokens, least = context.kv_tokens, (math.inf, math.inf)
        while True:
            somewhere = self._somewhere()
            found = self._finder.find(captured.named, 0, tokens, somewhere, run_of(somewhere))
            if found is None:
                raise SnapshotError(
                    "All of this job's KV has been evicted from every tier: try again while a "
                    "turn runs, or enlarge the tiers."
                )
            tokens = found.tokens
            captured.pages = tuple(
                ContextPage(part.group, part.first + i, key)
                for part in found.parts
                for i, key in enumerate(part.keys)
            )
            missing = held.hold(captured.keys)
            if not missing:
                break
            absent = [key for key in missing if not self._index.state(key).moving]
            if absent:
                if (tokens, len(missing)) >= least:
                    raise SnapshotError("Copying pages to CPU memory failed: try again.")
                least = tokens, len(missing)
                saved, ordered = self._fetch(absent)
                if not ordered and len(absent) == len(missing):
                    raise SnapshotError(
                        f"CPU memory has no space for {count(len(missing), 'missing page')} of "
                        "this context: raise TIERED_KV_CPU_GIB."
                    )
                captured.saved += saved
            yield _arrival(held, missing)
        captured.context = replace(context, kv_tokens=tokens)

    def _somewhere(self) -> Callable[[PageKey], bool]:
        """Return a test of whether a page is in CPU memory, moving there, in a reachable lower
        tier, or in VRAM."""
        sources, promoting = self._tiers.somewhere(), self._book.promoting

        def somewhere(key: PageKey) -> bool:
            return (
                sources(key)
                or (self._index.state(key).moving and key not in promoting)
                or self._in_vram(key) is not None
            )

        return somewhere

    def _in_vram(self, key: PageKey) -> tuple[int, Block] | None:
        """Return a page's group and VRAM block; None if it is not in VRAM."""
        at = self._group_of(key)
        block = self._pool.cached(key[DIGEST_BYTES:], at) if at is not None else None
        return (at, block) if at is not None and block is not None else None

    def _fetch(self, absent: Sequence[PageKey]) -> tuple[int, int]:
        """Order copies of the absent pages to CPU memory. Returns the number of pages copied from
        VRAM, and the total number of pages ordered."""
        found = {key: self._in_vram(key) for key in absent}
        saved = self._save(
            {key: (one[0], one[1].block_id) for key, one in found.items() if one is not None}
        )
        below = [key for key in absent if not self._index.state(key).moving]
        promoted = self._promotions.promote_ahead(below, self._clock()) if below else 0
        return saved, saved + promoted


def _arrival(held: HeldPages, keys: Sequence[PageKey]) -> Wait:
    return Wait("copying pages to CPU memory", held.arrival(keys))


def _no_room(pages: int) -> SnapshotError:
    return SnapshotError(
        f"CPU memory has no space for {count(pages, 'page')} now: try again, or raise "
        "TIERED_KV_CPU_GIB."
    )


def fresh_salt() -> str:
    """Return a cache salt that no other request has."""
    return f"tiered-kv-exact-{secrets.token_hex(16)}"


def is_named_by_tokens(turn: Turn) -> bool:
    """True if a turn's tokens and cache salt alone identify its pages."""
    return turn.request.text_only and turn.request.adapter is None
