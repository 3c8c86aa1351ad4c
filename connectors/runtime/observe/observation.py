"""Observe mode: the engine behaves as if it had no connector. Each turn's decisions are made and
traced, but not carried out.

The scheduler half is the same as for a managed engine, except in three parts. Pins hold ghost
blocks in place of the engine's blocks (``pins.ghost_blocks``). Orders go to a worker that moves no
bytes (``VirtualDispatch``), and not to the engine's workers. The engine is offered no tokens for a
waiting turn, and does not wait for restores. Instead, the tokens that would have been restored are
recorded (``Observation``).

The worker half measures the machine, and has no memory, file or thread for KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.pages.cpu_compression import staging_slots
from tiered_kv.connectors.runtime.pages.dispatch import OrderDispatch
from tiered_kv.connectors.runtime.parts import AdmissionGroup, Pages
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.connectors.runtime.worker.compressor import codecs_of
from tiered_kv.connectors.runtime.worker.cpu_memory import flops_of, slots_of, storage_of
from tiered_kv.connectors.runtime.worker.speed_probe import measure_reads
from tiered_kv.connectors.runtime.worker.worker import WorkerHalf
from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.messages import Handshake, Orders, StoredPages
from tiered_kv.metrics import WOULD_HAVE_SAVED
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.tiers import StoreId, TierId

from .virtual_worker import CopyLines, Line, VirtualStore, VirtualWorker

logger = logging.getLogger(__name__)

LOOK_EVERY = 8
"""Steps between two searches for the tokens that a waiting turn would have found."""


class _Coming(NamedTuple):
    """Pages that are being promoted for a turn that was already admitted."""

    turn: Turn
    group: int
    keys: Sequence[PageKey]


class VirtualDispatch(OrderDispatch):
    """Dispatch to a worker that moves no bytes. The engine's own workers get no orders.

    Orders leave and reports arrive with the steps that the engine makes anyway, and while the
    engine is idle.
    """

    def __init__(self, engine: EngineState, *parts: Any) -> None:
        super().__init__(engine, *parts)
        self._page_bytes = [group.page_bytes for group in engine.facts.groups]
        self._worker = self._make_worker()
        self._coming: list[_Coming] = []

    def _make_worker(self) -> VirtualWorker:
        """Create the virtual worker with the rates that cost estimates use. The page groups share
        the lines, and divide the capacity of each tier equally."""
        book, groups = self._book, len(self._page_bytes)
        copies = CopyLines(*(Line(book.bandwidth) for _ in range(4)))
        disks = dict[TierId, tuple[Line, Line]]()
        stores = dict[StoreId, VirtualStore]()
        for store, tier in self._tiers.items():
            rate = book.stores[store].bandwidth
            disk = disks.setdefault(store.tier, (Line(rate), Line(rate)))
            nbytes = self._page_bytes[store.group] * self._ranks
            capacity = tier.spec.capacity_bytes
            pages = None if capacity is None else capacity // groups // nbytes
            stores[store] = VirtualStore(pages, *disk)
        return VirtualWorker(book.page_bytes, copies, stores, self._ranks)

    def on_handshake(self, said: Mapping[int, Handshake]) -> None:
        """Record each rank's speed. The tiers start empty, at assumed rates."""
        stores = self._book.stores
        empty = {name: StoredPages((), pages.bandwidth) for name, pages in stores.items()}
        super().on_handshake({rank: replace(one, stored=empty) for rank, one in said.items()})
        self._worker = self._make_worker()

    def begin_step(self, step: int) -> None:
        """Start a step, and handle the virtual worker's reports."""
        super().begin_step(step)
        self._handle_reports()

    def _handle_reports(self) -> None:
        if (reports := self._worker.take_reports(self._clock())) is not None:
            self.on_reports(reports)
            self._load_promoted()

    def take(self) -> Orders:
        """Pass the unsent orders to the virtual worker. Returns no orders."""
        self._worker.carry_out(super().take(), self._clock())
        return Orders()

    def on_idle(self) -> bool:
        """Exchange orders and reports without a step. Returns False, because observe mode never
        makes the engine step."""
        self.take()
        self._handle_reports()
        return False

    @property
    def under_way(self) -> bool:
        """Always False, because no order is ever sent."""
        return False

    def restore(self, turn: Turn, tokens: int) -> None:
        """Order the restore that the turn would have had, so that its pages count as used."""
        hit, coming = turn.restore.hit, self._book.promoting
        for part in hit.parts if hit is not None else ():
            self._load(turn, part.group, part.keys)
            if later := [key for key in part.keys if key in coming]:
                self._coming.append(_Coming(turn, part.group, later))

    def _load_promoted(self) -> None:
        """Order the restores that were postponed until their pages had been promoted."""
        promoting, waiting, self._coming = self._book.promoting, self._coming, []
        for one in waiting:
            if any(key in promoting for key in one.keys):
                self._coming.append(one)
            else:
                self._load(*one)

    def _load(self, turn: Turn, group: int, pages: Sequence[PageKey]) -> None:
        """Order a restore of the available pages. No block receives them."""
        keys = [key for key in pages if self._book.index.readable(key)]
        if keys:
            self._restores.add_piece(turn, group, keys, [0] * len(keys), more=False)


class Observation:
    """Records the prompt tokens that waiting turns would have found in manage mode. Used on one
    thread.

    Args:
        fit: estimates prefill times, seconds.
    """

    def __init__(
        self, engine: EngineState, pages: Pages, admission: AdmissionGroup, fit: PrefillFit
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._pins = admission.pins
        self._pressure = admission.pressure
        self._fit = fit
        engine.counters.start(WOULD_HAVE_SAVED)
        logger.warning(
            "TIERED_KV_MODE=observe: decisions are made and traced, but no KV is kept. To keep "
            "KV, unset TIERED_KV_MODE"
        )

    @property
    def would_have_saved(self) -> dict[str, int]:
        """Number of prefilled prompt tokens that would have been found in manage mode, by tier,
        since the start."""
        totals = self._engine.counters.totals
        return {tier: int(totals[name]) for name, tier in WOULD_HAVE_SAVED.items()}

    def look(self, turn: Turn, num_computed: int, step: int) -> None:
        """Search for the tokens that a waiting turn would find beyond the engine's own hits.
        Searches on the first call, every ``LOOK_EVERY`` steps, and when ``num_computed`` changes.

        Args:
            num_computed: tokens of the prompt that are in VRAM. ``turn.source.vram_tokens`` is the
                value from the last call.
        """
        seen, restores, promotions = turn.observed, self._pages.restores, self._pages.promotions
        changed, looked_at = num_computed != turn.source.vram_tokens, seen.looked_at
        if not changed and looked_at is not None and step - looked_at < LOOK_EVERY:
            return
        seen.looked_at = step
        restores.withdraw(turn)
        if not turn.request.reads_cache:
            return
        start, pins = self._in_vram(turn, num_computed), len(self._pins)
        self._pressure.for_waiting(turn, start, step)
        if len(self._pins) < pins:
            start = self._in_vram(turn, num_computed)
        seen.vram_tokens, seen.cpu_tokens, seen.ssd_tokens = start - num_computed, 0, 0
        if not turn.may_restore:
            return
        promotions.bring_up(turn, start, self._fit, lambda: True)
        below = promotions.within_reach(turn)
        hit = restores.find(turn, start, self._engine.turns.running, below)
        if hit is not None:
            seen.ssd_tokens = min(hit.tokens, sum(promotions.tokens_from_below(turn)))
            seen.cpu_tokens = hit.tokens - seen.ssd_tokens

    def _in_vram(self, turn: Turn, num_computed: int) -> int:
        """Return the number of tokens of a prompt that would be in VRAM if the pins were real."""
        if not self._pins:
            return num_computed
        facts, limit = self._engine.facts, turn.request.num_tokens - 1
        if facts.groups:
            found = self._pages.promotions.in_vram(turn, limit, num_computed)
        else:
            found = self._run_in_vram(turn, limit)
        return max(num_computed, found // facts.hit_tokens * facts.hit_tokens)

    def _run_in_vram(self, turn: Turn, limit: int) -> int:
        """Return the same as ``promotions.in_vram``, for engines that keep pages only in VRAM."""
        facts, cached, hashes = (
            self._engine.facts,
            self._engine.pool.cached,
            turn.request.block_hashes,
        )
        stride, block = facts.block_size // facts.hash_tokens, 0
        stop = min(limit // facts.block_size, len(hashes) // stride)
        while block < stop and cached(hashes[(block + 1) * stride - 1], CONTEXT):
            block += 1
        return block * facts.block_size

    def on_admitted(self, turn: Turn) -> None:
        """Count the tokens that an admitted turn would have found, and mark their pages as used."""
        seen, counters = turn.observed, self._engine.counters
        self._pages.dispatch.restore(turn, 0)
        self._pages.restores.withdraw(turn)
        counters.add("would_have_saved_vram", seen.vram_tokens)
        counters.add("would_have_saved_cpu", seen.cpu_tokens)
        counters.add("would_have_saved_ssd", seen.ssd_tokens)


class ObservingWorker(WorkerHalf):
    """One rank's side of the connector in observe mode. Does nothing in a step. See
    ``WorkerHalf``."""

    _virtual_slots = 0
    _compresses: tuple[int, ...] = ()

    def register(self, kv_caches: Sequence[Any]) -> None:
        """Measure this machine. KV is read for a few milliseconds, and not written.

        Raises:
            ConfigError: the CPU tier would hold no page, or the codec does not exist or does not
                work.
            UnsupportedError: the engine's KV cache consists of several allocations.
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
        logger.info(
            "CPU tier of rank %d: %d simulated slots, no memory allocated", self._rank, slots
        )

    def handshake(self) -> Handshake:
        """Return the speeds of this rank, and the capacity that its tiers would have. The tiers
        start empty."""
        said = super().handshake()
        return replace(said, slots=self._virtual_slots, compresses=self._compresses)


def make_worker_half(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    fingerprints: Callable[[], Sequence[Fingerprint]],
    clock: Callable[[], float],
) -> WorkerHalf:
    """Create a rank's worker half for the configured mode."""
    make = ObservingWorker if config.observes else WorkerHalf
    return make(facts, config, rank, fingerprints, clock)
