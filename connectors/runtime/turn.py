"""Live requests: their facts, page keys, and one part for each module that keeps state about a
request.

Every part has a single writer, which its docstring names. Any module may read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from tiered_kv.keys import PageKey, page_keys, rekeyed
from tiered_kv.orders import OrderId, RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.policies.jobs.kv_hints import HintResult
from tiered_kv.tiers import StoreId

from .base import Block, Request
from .job_table import Job


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of a group. ``keys`` are the keys of its blocks from block ``first`` on."""

    group: int
    first: int
    keys: tuple[PageKey, ...]


class PlacedPage(NamedTuple):
    """A page, and the block of its group to which it is copied."""

    group: int
    key: PageKey
    block: int


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """Pages of a group and the blocks to which they are copied, in the order of the context.

    Attributes:
        first: number of blocks of the group before these blocks.
    """

    group: int
    first: int
    keys: Sequence[PageKey]
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages that can be restored for a turn.

    Attributes:
        parts: the pages, by group.
        tokens: tokens that the pages add to the VRAM prefix.
        mode: restore mode that was reported to the engine.
        pieces_until: deadline by which pages missing from CPU memory must have been promoted in
            pieces, seconds; None if CPU memory has every page.
    """

    parts: tuple[GroupPages, ...]
    tokens: int
    mode: RestoreMode
    pieces_until: float | None = None

    @property
    def keys(self) -> Iterator[PageKey]:
        """Yield the keys of all pages of the hit."""
        return chain.from_iterable(part.keys for part in self.parts)


@dataclass(frozen=True, slots=True)
class EndedGap:
    """The gap that a turn ends, and facts about the context that its job left behind.

    Attributes:
        context_tokens: length of that context.
        shared_blocks: number of blocks (of ``hash_tokens`` tokens) of that context that the prompt
            also begins with; a lower bound.
        kept: True if some tier was still meant to keep the context.
        saved: True if the context was saved outside VRAM.
        superseded: number of pages of earlier contexts of the job that the prompt supersedes.
    """

    context_tokens: int = 0
    shared_blocks: int = 0
    kept: bool = False
    saved: bool = False
    superseded: int = 0


NO_GAP = EndedGap()
"""The gap of a turn that ends no gap."""


@dataclass(slots=True)
class Source:
    """Locations in which the KV of the prompt was found. Written by ``scheduler``.

    Attributes:
        admitted: True once the turn has been allocated blocks.
        admitted_at: when the turn was first allocated blocks, seconds.
        vram_tokens, cpu_tokens: tokens found in each tier at the first admission.
        ssd_tokens: the part of ``cpu_tokens`` that was promoted from a lower tier for this turn.
        remote_tokens: the part of ``ssd_tokens`` that came from a tier shared between engines.
    """

    admitted: bool = False
    admitted_at: float = 0.0
    vram_tokens: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0
    remote_tokens: int = 0


@dataclass(slots=True)
class ObservedState:
    """Tokens of the prompt that the connector would have saved from recomputation, in addition to
    tokens that the engine finds in VRAM by itself. Written by ``observe.observation``; all 0 unless
    in observe mode.

    Attributes:
        looked_at: step in which the tiers were searched for these tokens; None before.
        vram_tokens, cpu_tokens, ssd_tokens: tokens in blocks that pins would hold, in CPU memory,
            and in lower tiers.
    """

    looked_at: int | None = None
    vram_tokens: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0


@dataclass(slots=True)
class SaveState:
    """Progress of the turn's saves. Written by ``pages.saves``.

    Attributes:
        cursors: by group, number of blocks that have been saved or were found saved already.
        boundaries: prompt lengths, in tokens, at which the KV of every group is saved as soon as it
            is computed. Descending, so that the next boundary is last.
        bounded: pages saved at past boundaries, except pages that the cursors cover.
        due: step at which the turn's next block may be full; other calendar entries of the turn are
            stale. None if the turn is not being watched.
        suspended: True while another connector loads into the turn's blocks.
        pages: pages of the turn's context, first to last; empty until the turn has finished.
        last: order after which all these pages are in CPU memory; None if they already are.
    """

    cursors: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    bounded: dict[PageKey, None] = field(default_factory=dict)
    due: int | None = None
    suspended: bool = False
    pages: Sequence[PageKey] = ()
    last: OrderId | None = None


@dataclass(slots=True)
class RestoreState:
    """The turn's restore. Written by ``pages.restores``.

    Attributes:
        hit: pages offered to the engine; None once they are ordered.
        loading: number of unfinished orders of the async restore, plus one while further pieces
            remain to be ordered.
        broken: True if the last pieces of the restore did not arrive, until the turn resumes.
        promised: True from the time at which the engine is asked to wait for an async restore until
            the turn resumes.
        failed: True if no page of the async restore arrived, until the turn is allocated blocks
            again.
        came_up: number of restored pages that no turn had used since they were promoted from a
            lower tier.
    """

    hit: Hit | None = None
    loading: int = 0
    broken: bool = False
    promised: bool = False
    failed: bool = False
    came_up: int = 0


@dataclass(slots=True)
class TiersState:
    """Pages that are promoted from lower tiers for the turn. Written by ``pages.promotions``; the
    first five fields are also written by ``pages.lookups``.

    Attributes:
        lookups: number of times that stores were queried for the start of the prompt.
        ends_asked: True if stores were queried for window pages and recurrent states.
        asking: True while the turn waits for the stores' replies.
        answers_until: deadline of that wait, seconds.
        awaits: promotions or lookups that the turn waits for.
        behind: number of pages of other turns whose slots the turn waits for; 0 if it does not
            wait.
        longest_wait_s: longest further wait for the turn's pages, seconds; None if no page is worth
            waiting for.
        wait_until: deadline of that wait, seconds; None while VRAM has no space for the turn.
        looked_at: when the tiers were last searched for pages, seconds; None before.
        room_seen: True if VRAM had space for the turn at that time.
        in_pieces: True if pages that do not fit in CPU memory are to be promoted in pieces.
        rest: pages to promote whose promotion is not ordered yet.
        keys: pages promoted, or being promoted, for the turn until its admission, each with the
            store from which it comes.
        coming: the pages among ``keys`` that have not arrived.
        held: slots of the pages that have arrived.
        waits_since: start of the current wait for a search, pages, slots or replies, seconds; None
            while the turn does not wait.
        waited_s: total duration of the turn's earlier waits, seconds.
    """

    lookups: int = 0
    ends_asked: bool = False
    asking: bool = False
    answers_until: float = 0.0
    awaits: set[OrderId] = field(default_factory=set)
    behind: int = 0
    longest_wait_s: float | None = None
    wait_until: float | None = None
    looked_at: float | None = None
    room_seen: bool = False
    in_pieces: bool = False
    rest: Sequence[PageKey] = ()
    keys: dict[PageKey, StoreId] = field(default_factory=dict)
    coming: dict[PageKey, None] = field(default_factory=dict)
    held: dict[PageKey, int] = field(default_factory=dict)
    waits_since: float | None = None
    waited_s: float = 0.0

    def left_s(self, now: float) -> float | None:
        """Return the time left to wait for pages, seconds; None while no deadline is set."""
        return None if self.wait_until is None else self.wait_until - now


@dataclass(slots=True)
class HoldState:
    """State of the turn before its admission. Written by ``admission.gate``.

    Attributes:
        new: True while the turn's job has not started, and may therefore be held back.
        refused: True if the turn was held back at least once.
        let_in_at: when the turn's job was admitted, seconds; None before that, or if the gate was
            not consulted.
        was_dormant: True if the job was presumed to have ended.
        admitted_at: when the turn was first allocated blocks, seconds.
    """

    new: bool = False
    refused: bool = False
    let_in_at: float | None = None
    was_dormant: bool = False
    admitted_at: float = 0.0


@dataclass(slots=True)
class PressureState:
    """State of the turn's need for blocks. Written by ``pins.pressure``.

    Attributes:
        asked_at: step in which the engine last considered the turn for admission; None before, or
            if the turn then lacked blocks that were about to become free.
        restored_at: last step in which the turn's restore finished and nothing was scheduled.
    """

    asked_at: int | None = None
    restored_at: int | None = None


@dataclass(slots=True)
class StartState:
    """The turn's progress to its first token. Written by ``between_turns.cost_model``.

    Attributes:
        scheduled_at: start of the first step that computes the turn, seconds; None before.
        first_token_at: when the first token was observed, seconds; None before.
    """

    scheduled_at: float | None = None
    first_token_at: float | None = None


@dataclass(slots=True)
class PromotedState:
    """Pages promoted from lower tiers for the turn, whole or in pieces. Written by
    ``lower_tiers.lower_tier``, which orders the promotions.

    Attributes:
        pages: number of these pages.
        nbytes: size of these pages on one rank, bytes.
    """

    pages: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class TurnPages:
    """Page keys of the turn. Written by ``Turn`` itself.

    Attributes:
        fingerprints: first part of the page keys, by group; empty if the turn's pages are neither
            saved nor restored.
        strides: block hashes per block, by group.
        hash_tokens: tokens per block hash.
        keys: keys of the first blocks, by group, as far as they were requested.
        shared_tokens: tokens of the job's last context that the prompt begins with.
    """

    fingerprints: tuple[bytes, ...]
    strides: tuple[int, ...]
    hash_tokens: int
    keys: list[list[PageKey]] = field(default_factory=list)
    shared_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """A live request: facts that do not change, and a part for each writer.

    No field is reassigned. The class is not frozen, because thousands of requests may arrive
    together, and freezing doubles the time to construct a turn.

    Attributes:
        job: its job; None if the client named no job and none was inferred.
        number: 1 for the job's first turn.
        arrived_at: seconds on the scheduler's clock.
        gap: gap that the turn ended.
        hint_results: results of the request's KV hints. Written by ``hint_actions``.
    """

    request: Request
    hints: TurnHints
    job: Job | None
    number: int
    arrived_at: float
    pages: TurnPages
    gap: EndedGap = NO_GAP
    source: Source = field(default_factory=Source)
    observed: ObservedState = field(default_factory=ObservedState)
    save: SaveState = field(default_factory=SaveState)
    restore: RestoreState = field(default_factory=RestoreState)
    tiers: TiersState = field(default_factory=TiersState)
    hold: HoldState = field(default_factory=HoldState)
    pressure: PressureState = field(default_factory=PressureState)
    start: StartState = field(default_factory=StartState)
    promoted: PromotedState = field(default_factory=PromotedState)
    hint_results: list[HintResult] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def loading(self) -> bool:
        """True while a restore by this or another connector writes into the turn's blocks."""
        return self.restore.loading > 0 or self.restore.broken or self.save.suspended

    @property
    def has_kv(self) -> bool:
        """True if the turn's blocks contain valid KV."""
        return self.source.admitted and not self.loading

    @property
    def vram_tokens(self) -> int:
        """Number of tokens of the prompt that were found in VRAM or, in observe mode, would have
        been."""
        return self.source.vram_tokens + self.observed.vram_tokens

    @property
    def found_tokens(self) -> int:
        """Number of tokens of the prompt that were found in any tier or, in observe mode, would
        have been."""
        seen = self.observed
        return self.vram_tokens + self.source.cpu_tokens + seen.cpu_tokens + seen.ssd_tokens

    @property
    def may_restore(self) -> bool:
        """True if the pages of the turn's prompt may be looked up."""
        readable = bool(self.pages.fingerprints) and self.request.reads_cache
        return readable and not self.restore.failed

    def page_keys(self, group: int = CONTEXT) -> Sequence[PageKey]:
        """Return the keys of a group's blocks, as far as the engine has hashed the blocks. Raises
        IndexError if the turn has no page keys (``TurnPages.fingerprints`` is empty)."""
        pages, hashes = self.pages, self.request.block_hashes
        if not pages.keys:
            pages.keys += [[] for _ in pages.fingerprints]
        keys, stride = pages.keys[group], pages.strides[group]
        if (len(keys) + 1) * stride <= len(hashes):
            fresh = hashes[(len(keys) + 1) * stride - 1 :: stride]
            keys += page_keys(pages.fingerprints[group], fresh)
        return keys

    def state_key(self, group: int, tokens: int) -> PageKey | None:
        """Return the key of a recurrent state, or of a page, that ends after ``tokens`` tokens, a
        positive multiple of ``hash_tokens``; None if the engine has not hashed these tokens yet.
        The turn must have page keys."""
        place = tokens // self.pages.hash_tokens - 1
        hashes = self.request.block_hashes
        if place >= len(hashes):
            return None
        return page_keys(self.pages.fingerprints[group], hashes[place : place + 1])[0]

    def tail_place(self, tokens: int) -> tuple[bytes, object] | None:
        """Return the part of a partial tail's identity that does not come from its tokens.

        Args:
            tokens: tokens before the tail, a multiple of ``hash_tokens``.

        Returns:
            The key of the preceding page (the fingerprint if there is none) and the engine's extra
            key (adapter, salt); None for inputs that token ids do not identify, or if the engine
            has not hashed the preceding page yet.
        """
        if not self.request.text_only:
            return None
        extra = self.request.extra_key(tokens)
        if not tokens:
            return self.pages.fingerprints[CONTEXT], extra
        parent = self.state_key(CONTEXT, tokens)
        return (parent, extra) if parent is not None else None

    def in_group(self, key: PageKey, group: int) -> PageKey:
        """Return the key of a group's page that covers the same tokens as a page of the first
        group."""
        return key if group == CONTEXT else rekeyed(key, self.pages.fingerprints[group])

    def forget_pages(self) -> None:
        """Drop the turn's page keys, because its pages are of a past generation or must not be
        kept."""
        self.pages.fingerprints = ()
        self.pages.shared_tokens = 0
        self.pages.keys.clear()

    def rename_pages(self, fingerprints: tuple[bytes, ...]) -> None:
        """Use other fingerprints for the turn's page keys. Call ``forget_pages`` first."""
        self.pages.fingerprints = fingerprints


def job_started_at(turn: Turn) -> float:
    """Return when the turn's job started, or when the turn arrived if it has no job; seconds on the
    scheduler's clock."""
    return turn.job.started_at if turn.job is not None else turn.arrived_at


class LiveTurns:
    """Turns by request id. Used on one thread. Written by ``scheduler``.

    Attributes:
        by_id: turns in order of arrival; read only.
        running: number of turns that have been allocated blocks.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Turn] = {}
        self.running = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def waiting_for_pages(self) -> int:
        """Number of requests that wait for a restore, a promotion or a store's reply."""
        turns = self.by_id.values()
        return sum(turn.loading or bool(turn.tiers.awaits) for turn in turns)

    def add(self, turn: Turn) -> None:
        """Register a turn."""
        self.by_id[turn.request_id] = turn

    def pop(self, request_id: str) -> Turn | None:
        """Remove a turn and return it; None if the id is unknown."""
        turn = self.by_id.pop(request_id, None)
        if turn is not None:
            self.running -= turn.source.admitted
        return turn
