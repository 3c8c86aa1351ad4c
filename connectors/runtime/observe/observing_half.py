"""The scheduler half of an engine that is only observed: it decides, forecasts and traces, and the
engine serves as without it.

Its components are those of an engine that is managed. What they are given differs: ghosts in place
of the engine's blocks, and a worker without bytes. The engine is told nothing: no tokens, no waits,
no orders. So each turn computes what it computes anyway, and what it would have been spared is
counted beside that.

The worker half of an engine that is only observed: it looks at the engine's KV, and has no
memory, file or thread for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts, KeptState, Request
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.pages.cpu_compression import staging_slots
from tiered_kv.connectors.runtime.pins.ghost_blocks import GhostPool
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.connectors.runtime.worker.compressor import codecs_of
from tiered_kv.connectors.runtime.worker.cpu_memory import flops_of, slots_of, storage_of
from tiered_kv.connectors.runtime.worker.speed_probe import measure_reads
from tiered_kv.connectors.runtime.worker.worker import WorkerHalf
from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.messages import Handshake, Orders, StoredPages
from tiered_kv.metrics import WOULD_HAVE_SAVED
from tiered_kv.orders import RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.tiers import StoreId, TierId

from .virtual_worker import CopyLines, Line, VirtualStore, VirtualWorker

logger = logging.getLogger(__name__)

LOOK_EVERY = 8
"""Steps between two looks at what a waiting turn would be spared."""


class _Coming(NamedTuple):
    """Pages on their way up for a turn that has been admitted."""

    request_id: str
    group: int
    keys: Sequence[PageKey]


class ObservingHalf(SchedulerHalf):
    """Decides, and does nothing. See ``SchedulerHalf``."""

    def __init__(self, deps: Dependencies, pool: BlockPool) -> None:
        ghosts = self._ghosts = GhostPool(pool, deps.clock)
        super().__init__(deps, ghosts)
        self.counters.start(WOULD_HAVE_SAVED)
        self._watchdog.barked = True  # nobody waits for us
        self._worker = self._make_worker()
        self._coming: list[_Coming] = []
        logger.warning(
            "TIERED_KV_MODE=observe: decides and traces, and moves nothing. Set it to manage, or "
            "leave it out, to have KV kept"
        )

    @property
    def would_have_saved(self) -> dict[str, int]:
        """Prompt tokens so far that were computed and would have been found, by tier."""
        totals = self.counters.totals
        return {tier: int(totals[name]) for name, tier in WOULD_HAVE_SAVED.items()}

    def _make_worker(self) -> VirtualWorker:
        """Create a worker at the rates that costs are estimated by. The groups share each tier
        equally, and its lines."""
        facts, book = self.facts, self.pages.book
        copies = CopyLines(*(Line(book.bandwidth) for _ in range(4)))
        disks = dict[TierId, tuple[Line, Line]]()
        stores = dict[StoreId, VirtualStore]()
        for store, tier in self.pages.tiers.items():
            rate = book.stores[store].bandwidth
            disk = disks.setdefault(store.tier, (Line(rate), Line(rate)))
            nbytes = facts.groups[store.group].page_bytes * facts.ranks
            capacity = tier.spec.capacity_bytes
            pages = None if capacity is None else capacity // len(facts.groups) // nbytes
            stores[store] = VirtualStore(pages, *disk)
        return VirtualWorker(book.page_bytes, copies, stores, facts.ranks)

    # -- what the engine is told: nothing ------------------------------------------------

    def on_handshake(self, said: Mapping[int, Handshake]) -> None:
        """Learn what the ranks are like. Their tiers begin empty, at the rates that are assumed."""
        stores = self.pages.book.stores
        empty = {name: StoredPages((), pages.bandwidth) for name, pages in stores.items()}
        super().on_handshake({rank: replace(one, stored=empty) for rank, one in said.items()})
        self._worker = self._make_worker()

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Look at what a waiting request would be spared; returns no token, and never a wait."""
        turn = self.turns.by_id.get(request_id)
        if turn is not None and not turn.source.admitted:
            changed = turn.source.vram_tokens != num_computed
            turn.source.vram_tokens = num_computed
            looked_at = turn.observed.looked_at
            if changed or looked_at is None or self.step - looked_at >= LOOK_EVERY:
                turn.observed.looked_at = self.step
                self._look(turn, num_computed)
        return 0, False

    def release_for_running(self) -> bool:
        """Return False: the engine preempts whom it would preempt."""
        return False

    def has_pending_push_work(self) -> bool:
        """Return False: the engine makes no step for us. What is due is seen to all the same."""
        self.gaps.manager.on_idle()
        self._exchange()
        return False

    @property
    def orders_under_way(self) -> bool:
        """False: no order is ever sent."""
        return False

    def build_orders(
        self, scheduled: Mapping[str, int], states: Sequence[KeptState] = ()
    ) -> Orders:
        """Account for a step that was scheduled; returns no order."""
        self._hear()
        self._worker.carry_out(super().build_orders(scheduled, states), self._clock())
        if self.admission.pins and self._ghosts.short:
            self.admission.pins.make_room(lambda: not self._ghosts.short)
        return Orders()

    def take_orders(self) -> Orders:
        """Carry out what was not sent yet; returns no order."""
        self._worker.carry_out(super().take_orders(), self._clock())
        return Orders()

    def _exchange(self) -> None:
        """Carry out what was ordered since the last step, and handle the reports."""
        self.take_orders()
        self._hear()

    def _hear(self) -> None:
        if (reports := self._worker.take_reports(self._clock())) is not None:
            self.on_reports(reports)
            if self._coming:
                self._restore_what_came_up()

    # -- what a turn would be spared -------------------------------------------------------

    def on_arrived(self, request: Request, hints: TurnHints) -> None:
        """Begin with a request that has come in."""
        self._exchange()  # no step was made while the engine was idle
        super().on_arrived(request, hints)

    def _look(self, turn: Turn, num_computed: int) -> None:
        """Look for what would be found of a turn's prompt beyond what the engine finds itself."""
        seen, restores, promotions = turn.observed, self.pages.restores, self.pages.promotions
        restores.withdraw(turn)
        if not turn.request.reads_cache:
            return
        start = self._in_vram(turn, num_computed)
        pins = len(self.admission.pins)
        self.admission.pressure.for_waiting(turn, start, self.step)
        if len(self.admission.pins) < pins:
            start = self._in_vram(turn, num_computed)
        seen.vram_tokens, seen.cpu_tokens, seen.ssd_tokens = start - num_computed, 0, 0
        if not turn.may_restore:
            return
        promotions.still_coming(turn, self.gaps.prefills.fit, lambda: True)
        turn.tiers.waits_since = None  # it does not wait
        hit = restores.find(turn, start, self.turns.running, promotions.within_reach(turn))
        if hit is not None:
            seen.ssd_tokens = min(hit.tokens, sum(promotions.tokens_from_below(turn)))
            seen.cpu_tokens = hit.tokens - seen.ssd_tokens

    def _in_vram(self, turn: Turn, num_computed: int) -> int:
        """Tokens of a prompt that VRAM would have, pins included."""
        if not self.admission.pins:
            return num_computed
        facts, limit = self.facts, turn.request.num_tokens - 1
        if facts.groups:
            found = self.pages.promotions.in_vram(turn, limit, num_computed)
        else:
            found = self._run_in_vram(turn, limit)
        return max(num_computed, found // facts.hit_tokens * facts.hit_tokens)

    def _run_in_vram(self, turn: Turn, limit: int) -> int:
        """The same where nothing but VRAM keeps pages."""
        size, hashes = self.facts.block_size, turn.request.block_hashes
        stride, block = size // self.facts.hash_tokens, 0
        stop = min(limit // size, len(hashes) // stride)
        while block < stop and self.pool.cached(hashes[(block + 1) * stride - 1], CONTEXT):
            block += 1
        return block * size

    def _on_admitted(self, turn: Turn, num_external: int) -> None:
        """Count a turn that has its first blocks. Components that learn from what a turn found
        learn from what it would have."""
        seen, source, in_vram = turn.observed, turn.source, turn.source.vram_tokens
        source.vram_tokens += seen.vram_tokens
        super()._on_admitted(turn, seen.cpu_tokens + seen.ssd_tokens)
        source.vram_tokens, source.cpu_tokens, source.ssd_tokens = in_vram, 0, 0
        self._pretend_to_restore(turn)
        self.pages.restores.withdraw(turn)
        self.counters.add("would_have_saved_vram", seen.vram_tokens)
        self.counters.add("would_have_saved_cpu", seen.cpu_tokens)
        self.counters.add("would_have_saved_ssd", seen.ssd_tokens)

    def _pretend_to_restore(self, turn: Turn) -> None:
        """Order the restore that the turn would get, so that its pages count as used."""
        hit, promoted, coming = (
            turn.restore.hit,
            self.pages.index.promoted,
            self.pages.book.promoting,
        )
        used = promoted.used
        for part in hit.parts if hit is not None else ():
            self._load(turn.request_id, part.group, part.keys)
            if later := [key for key in part.keys if key in coming]:
                self._coming.append(_Coming(turn.request_id, part.group, later))
        turn.restore.came_up += promoted.used - used

    def _restore_what_came_up(self) -> None:
        """Restore pages that came up for turns which did not wait for them."""
        promoting, waiting, self._coming = self.pages.book.promoting, self._coming, []
        for one in waiting:
            if any(key in promoting for key in one.keys):
                self._coming.append(one)
            else:
                self._load(one.request_id, one.group, one.keys)

    def _load(self, request_id: str, group: int, pages: Sequence[PageKey]) -> None:
        """Order the pages that are readable to VRAM, where they go nowhere."""
        keys = [key for key in pages if self.pages.index.readable(key)]
        if keys:
            nowhere = [0] * len(keys)
            order = self.pages.book.plan_load(request_id, keys, nowhere, RestoreMode.SYNC, group)
            self._worker.carry_out(Orders(loads=(order,)), self._clock())


def make_scheduler_half(deps: Dependencies, pool: BlockPool) -> SchedulerHalf:
    """Make the scheduler half for the mode that is configured.

    Raises:
        ConfigError: the trace cannot be written; ``deps`` is not closed.
    """
    return ObservingHalf(deps, pool) if deps.config.observes else SchedulerHalf(deps, pool)


class ObservingWorker(WorkerHalf):
    """One rank's side of the connector, which does nothing in a step. See ``WorkerHalf``."""

    _virtual_slots = 0
    _compresses: tuple[int, ...] = ()

    def register(self, kv_caches: Sequence[Any]) -> None:
        """Measure this machine. KV is read, for a few milliseconds, and not written.

        Raises:
            ConfigError: the CPU tier would hold no page, or there is no such codec.
            UnsupportedError: the engine's KV cache lies in several allocations.
        """
        facts, config = self._facts, self._config
        self._speeds = replace(self._speeds, flops=flops_of(kv_caches))
        if not facts.groups or config.cpu_gib == 0:
            return
        slots = slots_of(facts, config)
        self._speeds = replace(self._speeds, copy=measure_reads(storage_of(kv_caches)))
        if staging := staging_slots(slots):
            self._compresses = tuple(codecs_of(facts, config.codec))
        self._virtual_slots = slots - (staging if self._compresses else 0)
        logger.info("CPU tier of rank %d: %d slots, none of them made", self._rank, slots)

    def handshake(self) -> Handshake:
        """Speeds of this rank, and what its tiers would have room for. They begin empty."""
        said = super().handshake()
        return replace(said, slots=self._virtual_slots, compresses=self._compresses)


def make_worker_half(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    fingerprints: Callable[[], Sequence[Fingerprint]],
    clock: Callable[[], float],
) -> WorkerHalf:
    """Make a rank's worker half for the mode that is configured. Takes what that takes."""
    make = ObservingWorker if config.observes else WorkerHalf
    return make(facts, config, rank, fingerprints, clock)
