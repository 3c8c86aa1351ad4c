"""A live request: its facts, its pages, and a part for each module that keeps state of it.

Every part has one writer, which its docstring names. Everybody may read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiered_kv.keys import PageKey, page_keys
from tiered_kv.orders import OrderId, RestoreMode
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.policies.jobs.hints import TurnHints

from .base import Request
from .job_table import Job


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages that can be restored for a turn: ``keys`` fill the blocks from ``first`` on.

    Attributes:
        tokens: tokens that they give beyond the VRAM prefix.
        mode: the mode that the engine was told.
    """

    first: int
    keys: tuple[PageKey, ...]
    tokens: int
    mode: RestoreMode


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
        vram_tokens, cpu_tokens: tokens found in each tier at the first admission.
        ssd_tokens: those of ``cpu_tokens`` that came up from SSD for this turn.
    """

    admitted: bool = False
    vram_tokens: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0


@dataclass(slots=True)
class SaveState:
    """Progress of the turn's saves. Written by ``pages.saves``.

    Attributes:
        cursor: blocks before it have been saved, or found saved already.
        due: the step at which its next block may be full; other entries of the calendar are
            stale. None if nobody looks.
        suspended: True while another connector loads into its blocks.
    """

    cursor: int = 0
    due: int | None = None
    suspended: bool = False


@dataclass(slots=True)
class RestoreState:
    """The turn's restore. Written by ``pages.restores``.

    Attributes:
        hit: pages offered to the engine; None once they are ordered.
        loading: True while an async restore writes into its blocks.
    """

    hit: Hit | None = None
    loading: bool = False


@dataclass(slots=True)
class TiersState:
    """Pages that come up from the tiers below for the turn. Written by ``pages.lower_tiers``.

    Attributes:
        promotions: times that pages were looked for in the tiers.
        lookups: times that stores were asked.
        asking: True while it waits for their answers.
        awaits: promotions or lookups that it waits for.
        wait_until: the end of that wait at the latest, seconds.
        keys: pages that came up for it, or are coming, until it is admitted.
    """

    promotions: int = 0
    lookups: int = 0
    asking: bool = False
    awaits: set[OrderId] = field(default_factory=set)
    wait_until: float = 0.0
    keys: set[PageKey] = field(default_factory=set)


@dataclass(slots=True)
class HoldState:
    """The turn before its admission. Written by ``admission.gate``.

    Attributes:
        new: True until its job has started.
        refused: True if it was held at least once.
        was_dormant: True if its job was taken to have ended.
    """

    new: bool = False
    refused: bool = False
    was_dormant: bool = False


@dataclass(slots=True)
class PressureState:
    """The turn's asking for blocks. Written by ``pins.pressure``.

    Attributes:
        asked_at: the step in which the engine last asked what can be restored, with blocks free
            for it; None if they were not, or it never did.
    """

    asked_at: int | None = None


@dataclass(slots=True)
class TurnPages:
    """Names of the turn's pages. Written by ``Turn`` itself.

    Attributes:
        fingerprint: the first part of their keys; None if they are neither saved nor restored.
        keys: keys of its first blocks, as far as somebody asked.
        shared_tokens: tokens of its job's last context that its prompt begins with.
    """

    fingerprint: bytes | None
    keys: list[PageKey] = field(default_factory=list)
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
    save: SaveState = field(default_factory=SaveState)
    restore: RestoreState = field(default_factory=RestoreState)
    tiers: TiersState = field(default_factory=TiersState)
    hold: HoldState = field(default_factory=HoldState)
    pressure: PressureState = field(default_factory=PressureState)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def loading(self) -> bool:
        """True while a restore writes into its blocks, ours or another connector's."""
        return self.restore.loading or self.save.suspended

    @property
    def may_restore(self) -> bool:
        """True if pages of its prompt may be looked up."""
        return self.pages.fingerprint is not None and self.request.reads_cache

    def page_keys(self) -> Sequence[PageKey]:
        """Keys of all blocks that the engine has hashed so far."""
        assert self.pages.fingerprint is not None
        keys, hashes = self.pages.keys, self.request.block_hashes
        if len(keys) < len(hashes):
            keys += page_keys(self.pages.fingerprint, hashes[len(keys) :])
        return keys

    def tail_place(self, block: int, block_size: int) -> tuple[bytes, object] | None:
        """The name under which a partial tail in that block is found, beside its tokens.

        Returns:
            The key of the page before it (the fingerprint if there is none) and the engine's
            extra key (adapter, salt); None for inputs that tokens do not tell apart.
        """
        if not self.request.text_only:
            return None
        extra = self.request.extra_key(block * block_size)
        assert self.pages.fingerprint is not None
        return (self.page_keys()[block - 1] if block else self.pages.fingerprint), extra

    def find_tail(
        self,
        tails: TailIndex,
        block: int,
        block_size: int,
        limit: int,
        there: Callable[[PageKey], bool],
    ) -> tuple[PageKey, int] | None:
        """The page that agrees longest with the prompt in that block, and for how many tokens.

        Args:
            limit: tokens of the prompt that may be used.
            there: tells which pages can be had.
        """
        start = block * block_size
        wanted = self.request.all_token_ids[start : min(start + block_size, limit)]
        place = self.tail_place(block, block_size) if wanted else None
        if place is None:
            return None
        found = tails.longest(*place, wanted, there)
        return (found[0].key, found[1]) if found else None

    def forget_pages(self) -> None:
        """Give up its pages: they are of a past generation, or hold what must not be kept."""
        self.pages.fingerprint = None
        self.pages.shared_tokens = 0
        self.pages.keys.clear()

    def rename_pages(self, fingerprint: bytes | None) -> None:
        """Begin anew under another fingerprint. Follows ``forget_pages``."""
        self.pages.fingerprint = fingerprint


def job_started_at(turn: Turn) -> float:
    """Start of the turn's job, or of the turn if it has none; seconds, as ``arrived_at``."""
    return turn.job.started_at if turn.job is not None else turn.arrived_at
