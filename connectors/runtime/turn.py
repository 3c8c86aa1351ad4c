"""The live requests, and what is known of each: facts, pages, and a part for each module that keeps
state of it.

Every part has one writer, which its docstring names. Everybody may read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_kv.keys import PageKey, page_keys, rekeyed
from tiered_kv.orders import OrderId, RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.tiers import StoreId

from .base import Request
from .job_table import Job


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of a group: ``keys`` fill the blocks from ``first`` on."""

    group: int
    first: int
    keys: tuple[PageKey, ...]


class PlacedPage(NamedTuple):
    """A page that is to come to a block of its group."""

    group: int
    key: PageKey
    block: int


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages that can be restored for a turn.

    Attributes:
        parts: the pages, by group.
        tokens: tokens that they give beyond the VRAM prefix.
        mode: the mode that the engine was told.
        pieces_until: if CPU memory has not all of them, the time by which the others must have come
            up in pieces, seconds.
    """

    parts: tuple[GroupPages, ...]
    tokens: int
    mode: RestoreMode
    pieces_until: float | None = None

    @property
    def keys(self) -> Iterator[PageKey]:
        """All pages."""
        return (key for part in self.parts for key in part.keys)


@dataclass(frozen=True, slots=True)
class EndedGap:
    """The gap that a turn ends: facts of the context that its job waited with.

    Attributes:
        context_tokens: length of that context.
        shared_blocks: blocks of it that the prompt begins with as well; a few may lack.
        kept: True if some tier was to hold it still.
        saved: True if it was saved outside VRAM.
    """

    context_tokens: int = 0
    shared_blocks: int = 0
    kept: bool = False
    saved: bool = False


NO_GAP = EndedGap()
"""The gap of a turn that ends none."""


@dataclass(slots=True)
class Source:
    """Sources of the prompt. Written by ``scheduler``.

    Attributes:
        admitted: True once the turn has had blocks.
        admitted_at: when it had the first ones, seconds.
        vram_tokens, cpu_tokens: tokens found in each tier at the first admission.
        ssd_tokens: those of ``cpu_tokens`` that came up from below for this turn.
        remote_tokens: those of ``ssd_tokens`` that came from a tier that engines share.
    """

    admitted: bool = False
    admitted_at: float = 0.0
    vram_tokens: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0
    remote_tokens: int = 0


@dataclass(slots=True)
class ObservedState:
    """Tokens of the prompt that the connector would have spared an engine that it only observes,
    beyond those that the engine finds in VRAM by itself. Written by ``observe.observation``; all 0
    in an engine that is managed.

    Attributes:
        looked_at: the step in which they were looked for; None if never.
        vram_tokens: under pins. cpu_tokens: in CPU memory. ssd_tokens: in the tiers below.
    """

    looked_at: int | None = None
    vram_tokens: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0


@dataclass(slots=True)
class SaveState:
    """Progress of the turn's saves. Written by ``pages.saves``.

    Attributes:
        cursors: by group, blocks before it have been saved, or found saved already.
        boundaries: numbers of tokens up to which the prompt's KV is saved for every group, as soon
            as it is there; the least one last.
        bounded: pages saved at those that were, but for those before the cursors.
        due: the step at which its next block may be full; other entries of the calendar are
            stale. None if nobody looks.
        suspended: True while another connector loads into its blocks.
        pages: once the turn has ended, pages of its context, first to last.
        last: then the order after which all of them are in CPU memory; None if they are.
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
        loading: orders of its async restore that are not over; one more while pieces of it are to
            be ordered.
        broken: True if its last pieces did not come, until it goes on.
        promised: True from when the engine is to wait for an async restore until it goes on.
        failed: True if none of that came, until the turn has blocks again.
        came_up: pages restored so far that had come up from a tier below, for this turn or for
            nobody yet.
    """

    hit: Hit | None = None
    loading: int = 0
    broken: bool = False
    promised: bool = False
    failed: bool = False
    came_up: int = 0


@dataclass(slots=True)
class TiersState:
    """Pages that are promoted for the turn from the tiers below. Written by ``pages.promotions``,
    and the first five fields by its ``pages.lookups`` too.

    Attributes:
        lookups: times that stores were asked for the beginning of its prompt.
        ends_asked: True if they were asked for windows and states.
        asking: True while it waits for their answers.
        answers_until: the end of that wait at the latest, seconds.
        awaits: promotions or lookups that it waits for.
        behind: pages of others for whose slots it waits; 0 if it does not.
        longest_wait_s: longest wait for its pages; None if none is worth one.
        wait_until: the end of that wait; None before VRAM has room for the turn.
        looked_at: when pages were last looked for in the tiers, seconds; None if never.
        room_seen: True if VRAM had room for it then.
        in_pieces: True if pages that have no room in CPU memory are to come up in pieces.
        keys: pages that came up for it, or are coming, until it is admitted, and from where.
        held: slots of those that are there.
        waits_since: when it first waited for them, seconds; None if it did not.
        waited_s: time that it waited, once it was admitted.
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
    keys: dict[PageKey, StoreId] = field(default_factory=dict)
    held: dict[PageKey, int] = field(default_factory=dict)
    waits_since: float | None = None
    waited_s: float = 0.0

    def left_s(self, now: float) -> float | None:
        """Seconds that are left of its wait for pages; None if that has not begun."""
        return None if self.wait_until is None else self.wait_until - now


@dataclass(slots=True)
class HoldState:
    """The turn before its admission. Written by ``admission.gate``.

    Attributes:
        new: True until its job has started.
        refused: True if it was held at least once.
        let_in_at: when its job was let in, seconds; None before that, or if that was not asked.
        was_dormant: True if its job was taken to have ended.
        admitted_at: when it had its first blocks, seconds.
    """

    new: bool = False
    refused: bool = False
    let_in_at: float | None = None
    was_dormant: bool = False
    admitted_at: float = 0.0


@dataclass(slots=True)
class PressureState:
    """The turn's asking for blocks. Written by ``pins.pressure``.

    Attributes:
        asked_at: the step in which the engine last asked what can be restored, with blocks free
            for it; None if they were not, or it never did.
        restored_at: the last step in which it was restored and nothing was scheduled.
    """

    asked_at: int | None = None
    restored_at: int | None = None


@dataclass(slots=True)
class StartState:
    """The turn's way to its first token. Written by ``between_turns.cost_model``.

    Attributes:
        scheduled_at: the first step that computes of it, seconds; None before.
        first_token_at: when its first token was heard of; None before.
    """

    scheduled_at: float | None = None
    first_token_at: float | None = None


@dataclass(slots=True)
class PromotedState:
    """Pages ordered up from the tiers below for the turn, whole or in pieces. Written by
    ``lower_tiers.lower_tier``, which makes these orders.

    Attributes:
        pages: their number.
        nbytes: their size on one rank, bytes.
    """

    pages: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class TurnPages:
    """Names of the turn's pages. Written by ``Turn`` itself.

    Attributes:
        fingerprints: the first part of their keys, by group; empty if they are neither saved nor
            restored.
        strides: block hashes for each block, by group.
        hash_tokens: tokens that each block hash adds to the one before.
        keys: keys of its first blocks, by group, as far as somebody asked.
        shared_tokens: tokens of its job's last context that its prompt begins with.
    """

    fingerprints: tuple[bytes, ...]
    strides: tuple[int, ...]
    hash_tokens: int
    keys: list[list[PageKey]] = field(default_factory=list)
    shared_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """A live request: facts that do not change, and a part for each of its writers.

    No field is set again. It is not frozen, since requests may come by the thousand, and freezing
    doubles the time to make one.

    Attributes:
        job: None if the client named none, and none was inferred.
        number: 1 for the job's first turn.
        arrived_at: seconds on the scheduler's clock.
        gap: the gap that it ended.
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

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def loading(self) -> bool:
        """True while a restore writes into its blocks, ours or another connector's."""
        return self.restore.loading > 0 or self.restore.broken or self.save.suspended

    @property
    def has_kv(self) -> bool:
        """True if its blocks hold what they should."""
        return self.source.admitted and not self.loading

    @property
    def vram_tokens(self) -> int:
        """Tokens of the prompt that were found in VRAM, or would have been."""
        return self.source.vram_tokens + self.observed.vram_tokens

    @property
    def found_tokens(self) -> int:
        """Tokens of the prompt that were found in any tier, or would have been."""
        seen = self.observed
        return self.vram_tokens + self.source.cpu_tokens + seen.cpu_tokens + seen.ssd_tokens

    @property
    def may_restore(self) -> bool:
        """True if pages of its prompt may be looked up."""
        readable = bool(self.pages.fingerprints) and self.request.reads_cache
        return readable and not self.restore.failed

    def page_keys(self, group: int = CONTEXT) -> Sequence[PageKey]:
        """Keys of a group's blocks, as far as the engine has hashed them."""
        pages, hashes = self.pages, self.request.block_hashes
        if not pages.keys:
            pages.keys += [[] for _ in pages.fingerprints]
        keys, stride = pages.keys[group], pages.strides[group]
        if (len(keys) + 1) * stride <= len(hashes):
            fresh = hashes[(len(keys) + 1) * stride - 1 :: stride]
            keys += page_keys(pages.fingerprints[group], fresh)
        return keys

    def state_key(self, group: int, tokens: int) -> PageKey | None:
        """Key of a state after ``tokens``, of which each block hash covers some; None if the engine
        has not hashed them yet."""
        place = tokens // self.pages.hash_tokens - 1
        hashes = self.request.block_hashes
        if place >= len(hashes):
            return None
        return page_keys(self.pages.fingerprints[group], hashes[place : place + 1])[0]

    def tail_place(self, tokens: int) -> tuple[bytes, object] | None:
        """The name under which a partial tail is found, beside its tokens.

        Args:
            tokens: tokens before it, a multiple of those of a block hash.

        Returns:
            The key of the page before it (the fingerprint if there is none) and the engine's
            extra key (adapter, salt); None for inputs that tokens do not tell apart.
        """
        if not self.request.text_only:
            return None
        extra = self.request.extra_key(tokens)
        if not tokens:
            return self.pages.fingerprints[CONTEXT], extra
        parent = self.state_key(CONTEXT, tokens)
        return (parent, extra) if parent is not None else None

    def in_group(self, key: PageKey, group: int) -> PageKey:
        """Key of a group's page whose text is that of a page of the first group."""
        return key if group == CONTEXT else rekeyed(key, self.pages.fingerprints[group])

    def forget_pages(self) -> None:
        """Give up its pages: they are of a past generation, or hold what must not be kept."""
        self.pages.fingerprints = ()
        self.pages.shared_tokens = 0
        self.pages.keys.clear()

    def rename_pages(self, fingerprints: tuple[bytes, ...]) -> None:
        """Begin anew under other fingerprints. Follows ``forget_pages``."""
        self.pages.fingerprints = fingerprints


def job_started_at(turn: Turn) -> float:
    """Start of the turn's job, or of the turn if it has none; seconds, as ``arrived_at``."""
    return turn.job.started_at if turn.job is not None else turn.arrived_at


class LiveTurns:
    """Turns by request id. One thread. Written by ``scheduler``.

    Attributes:
        by_id: turns in the order of their arrival; read only.
        running: turns that were given blocks.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Turn] = {}
        self.running = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, turn: Turn) -> None:
        """Begin with a turn."""
        self.by_id[turn.request_id] = turn

    def pop(self, request_id: str) -> Turn | None:
        """Take a turn out; None if it is not known."""
        turn = self.by_id.pop(request_id, None)
        if turn is not None:
            self.running -= turn.source.admitted
        return turn
