"""One request as the scheduler half sees it: its pages, and how far they are saved."""

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

    ``tokens`` is how many tokens beyond the VRAM prefix they give, ``mode`` what vLLM was
    told of how they come.
    """

    first: int
    keys: tuple[PageKey, ...]
    tokens: int
    mode: RestoreMode


@dataclass(slots=True)
class Turn:
    """State of a live request.

    Attributes:
        job: None if the client named none.
        number: 1 for the job's first turn.
        fingerprint: None if its pages are neither saved nor restored.
        cursor: blocks before it have been saved, or found saved already.
        due: the step at which its next block may be full; later entries of the
            calendar are stale.
        admitted: it has had blocks, at least once.
        loading: an async restore writes into its blocks, ours or another connector's.
        vram_tokens, cpu_tokens: where its prompt came from, at its first admission.
        asked_at: the step in which vLLM last asked what can be restored.
        promotions: how often pages were looked for in the tiers below.
        lookups: how often their stores were asked. asking: whether it waits for answers.
        awaits: promotions or lookups that it waits for, at most until ``wait_until``.
        ssd_keys: pages that came up for it, or are coming, until it is admitted.
        arrived_at: when, on the scheduler half's clock.
        context_before: tokens of the context that its job waited with.
        shared: those of them that its prompt begins with, in whole blocks. kept: whether they were
            to be in some tier still. saved: whether they were saved outside VRAM.
        new: its job has not begun. refused: it was held, at least once.
        ssd_tokens: those of ``cpu_tokens`` that came up from SSD for it.
    """

    request: Request
    hints: TurnHints
    job: Job | None
    number: int
    fingerprint: bytes | None
    keys: list[PageKey] = field(default_factory=list)
    cursor: int = 0
    due: int = -1
    admitted: bool = False
    loading: bool = False
    hit: Hit | None = None
    vram_tokens: int = 0
    cpu_tokens: int = 0
    asked_at: int = -1
    promotions: int = 0
    lookups: int = 0
    asking: bool = False
    awaits: set[OrderId] = field(default_factory=set)
    wait_until: float = 0.0
    ssd_keys: set[PageKey] = field(default_factory=set)
    ssd_tokens: int = 0
    arrived_at: float = 0.0
    context_before: int = 0
    shared: int = 0
    kept: bool = False
    saved: bool = False
    new: bool = False
    refused: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def page_keys(self) -> Sequence[PageKey]:
        """Keys of all blocks that vLLM has hashed so far."""
        assert self.fingerprint is not None
        keys, hashes = self.keys, self.request.block_hashes
        if len(keys) < len(hashes):
            keys += page_keys(self.fingerprint, hashes[len(keys) :])
        return keys

    def tail_place(self, block: int, block_size: int) -> tuple[bytes, object] | None:
        """What a partial tail in that block is found by, beside its tokens.

        Returns:
            The key of the page before it (the fingerprint if there is none) and the engine's
            extra key (adapter, salt); None for inputs that tokens do not tell apart.
        """
        if not self.request.text_only:
            return None
        extra = self.request.extra_key(block * block_size)
        assert self.fingerprint is not None
        return (self.page_keys()[block - 1] if block else self.fingerprint), extra

    def find_tail(
        self,
        tails: TailIndex,
        block: int,
        block_size: int,
        limit: int,
        there: Callable[[PageKey], bool],
    ) -> tuple[PageKey, int] | None:
        """The page that agrees longest with what the prompt has in that block, up to token
        ``limit``, and how many of its tokens do; of those that are ``there``."""
        start = block * block_size
        wanted = self.request.all_token_ids[start : min(start + block_size, limit)]
        place = self.tail_place(block, block_size) if wanted else None
        if place is None:
            return None
        found = tails.longest(*place, wanted, there)
        return (found[0].key, found[1]) if found else None

    def forget_pages(self) -> None:
        """Its pages are of a past generation, or hold what must not be kept."""
        self.fingerprint = None
        self.shared = 0
        self.hit = None
        self.keys.clear()


def born(turn: Turn) -> float:
    """When its job began, or it did if it has none; of the clock of ``arrived_at``."""
    return turn.job.born if turn.job is not None else turn.arrived_at
