"""The worker half: moves bytes, and owns every buffer. It makes no decisions.

In a step, ``start`` performs the sync restores and starts the async ones, ``save`` starts the saves
after the forward pass, and ``finish`` polls. All methods run on the worker's thread. The backend
has its own threads or streams.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.keys import Fingerprint
from tiered_kv.messages import AdoptedPages, Handshake, Orders, Reports, Speeds, TierReport
from tiered_kv.orders import (
    FailLoad,
    ImportOrder,
    LoadOrder,
    OrderId,
    OrderReport,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
)
from tiered_kv.storage.registry import make_tiers
from tiered_kv.tiers import StoreId
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import CpuPool

from .compressor import Compressor, drained, make_compressor
from .cpu_memory import flops_of, make_memory, slots_of, storage_of
from .lasting_pages import LastingPages
from .snapshot_worker import SnapshotWorker
from .speed_probe import measure_copies
from .tier_worker import TierWorker

logger = logging.getLogger(__name__)


class Arrivals(NamedTuple):
    """Requests whose async restore finished.

    Attributes:
        requests: all these requests, whether the restore succeeded or not.
        failed: the requests that must be prefilled again; empty if the engine recovers by block.
    """

    requests: set[str]
    failed: set[str]


class WorkerHalf:
    """One rank's side of the connector.

    Args:
        facts: the engine's configuration.
        config: the operator's settings.
        rank: this worker's rank.
        fingerprints: returns the fingerprint of each page group; called only if there are lower
            tiers or a file for CPU memory.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        facts: EngineFacts,
        config: TierConfig,
        rank: int,
        fingerprints: Callable[[], Sequence[Fingerprint]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._config = config
        self._rank = rank
        self._fingerprints = fingerprints
        self._clock = clock
        self._speeds = Speeds(copy=0.0, flops=0.0)
        self.stores: dict[StoreId, TierWorker] = {}
        self.pool: CpuPool | None = None
        self.backend: TransferBackend | None = None  # None while VRAM is released
        self.compressor: Compressor | None = None
        self.snapshots: SnapshotWorker | None = None
        self.lasting: LastingPages | None = None
        self._kv_caches: Sequence[Any] = ()
        self._orders: dict[OrderId, SaveOrder | LoadOrder] = {}
        self._reports: dict[OrderId, OrderReport] = {}
        self._reported: SimpleQueue[tuple[OrderId, OrderReport]] = SimpleQueue()  # from threads
        self._parts: Counter[str] = Counter()  # unfinished parts of async restores, by request
        self._more: set[str] = set()  # requests whose restore has further orders to come
        self._failed: set[str] = set()
        self._arrived: set[str] = set()
        self.bad_blocks: set[int] = set()
        self._failed_syncs = 0
        self._newly_failed = False

    def register(self, kv_caches: Sequence[Any]) -> None:
        """Register the engine's KV tensors and allocate this rank's share of the CPU tier.

        Args:
            kv_caches: views of the single allocation that ``EngineFacts.groups`` describe.

        Raises:
            ConfigError: the CPU tier does not fit into memory or holds no page, or a configured
                codec, file or store cannot be used.
            UnsupportedError: the engine's KV cache consists of several allocations.
        """
        self._speeds = replace(self._speeds, flops=flops_of(kv_caches))
        if not self._facts.groups or self._config.cpu_gib == 0:
            return
        slots = slots_of(self._facts, self._config)
        on_gpu = storage_of(kv_caches).device.type == "cuda"
        slot_bytes = self._facts.slot_bytes
        memory, self.lasting = make_memory(
            self._facts,
            self._config,
            self._rank,
            slots,
            self._fingerprints,
            on_gpu=on_gpu,
            clock=self._clock,
        )
        self.pool = CpuPool(memory, slot_bytes)
        self._kv_caches = kv_caches
        self.backend = self._make_backend(self.pool)
        logger.info(
            "CPU tier of rank %d: %d slots of %d KiB, %.2f GiB%s",
            self._rank,
            slots,
            slot_bytes >> 10,
            slots * slot_bytes / (1 << 30),
            ", pinned" if self.pool.pinned else "",
        )
        copy = measure_copies(self.backend, self.pool, self._facts.num_blocks)
        self._speeds = replace(self._speeds, copy=copy)
        pool = self.pool
        try:
            self.compressor = make_compressor(
                self._facts,
                self._config.codec,
                pool.slots,
                lambda: self._make_backend(pool),
                self._reported.put,
            )
            bundles = self.compressor.groups if self.compressor is not None else {}
            if self._config.snapshot_path is not None:
                self.snapshots = SnapshotWorker(
                    self._facts, self._rank, pool.slots, bundles, self._reported.put
                )
            tiers = make_tiers(self._config)
            if self.lasting is not None:
                self.lasting.overwrite(range(self._slots(), slots))  # staging slots hold no pages
                self.lasting.adopt_bundles(bundles, self._slots(), self._config.codec)
            fingerprints = self._fingerprints() if tiers else ()
            for tier in tiers:
                for i, fingerprint in enumerate(fingerprints):
                    self.stores[StoreId(tier.spec.tier, i)] = TierWorker(
                        tier,
                        i,
                        self._facts,
                        self._rank,
                        fingerprint,
                        pool,
                        bundles.get(i),
                        self._clock,
                    )
        except BaseException:
            self.close()
            raise

    def _make_backend(self, pool: CpuPool) -> TransferBackend:
        import torch

        storage, layouts = storage_of(self._kv_caches), [one.layout for one in self._facts.groups]
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if storage.device.type == "cuda":
            from tiered_kv.transfer.cuda.backend import CudaTransfer

            return CudaTransfer(layouts, raw, pool)
        from tiered_kv.transfer.cpu import CpuTransfer

        return CpuTransfer(layouts, raw.numpy(), pool)

    def release_vram(self) -> None:
        """Finish the copies in flight before the engine frees its KV cache. Later copies fail until
        ``take_vram``. The tiers below VRAM keep working. Idempotent."""
        backend, self.backend = self.backend, None
        if backend is not None:
            self._stop(backend)
        if self.compressor is not None:
            self.compressor.release_vram()

    def take_vram(self) -> None:
        """Allow copies again: the engine's tensors have memory, perhaps at another address. Does
        nothing unless VRAM was released."""
        if self.pool is not None and self.backend is None:
            self.backend = self._make_backend(self.pool)
            if self.compressor is not None:
                self.compressor.take_vram()

    def _stop(self, backend: TransferBackend) -> None:
        try:
            backend.drain()
            for result in backend.poll():
                self._done(result)
        finally:
            backend.close()

    def handshake(self) -> Handshake:
        """Return this rank's speeds, number of slots and page sizes, and the pages that its stores
        and its CPU memory already contain."""
        return Handshake(
            self._speeds,
            slots=self._slots(),
            page_bytes=tuple(group.page_bytes for group in self._facts.groups),
            compresses=tuple(self.compressor.groups) if self.compressor is not None else (),
            stored={store: tier.stored for store, tier in self.stores.items()},
            adopted=self.lasting.offer() if self.lasting is not None else AdoptedPages(),
        )

    def _slots(self) -> int:
        """Return the number of slots for pages, without the staging slots."""
        slots = len(self.pool.slots) if self.pool is not None else 0
        return slots - (self.compressor.staging if self.compressor is not None else 0)

    # -- a step -----------------------------------------------------------------

    def start(self, orders: Orders) -> None:
        """Start a step's orders. Sync restores have finished on return; async restores have
        started."""
        if self.pool is None:
            return
        if self.lasting is not None:
            self.lasting.on_orders(orders)
        for store, tier_orders in orders.stores.items():
            for promote in tier_orders.promotes:
                self._overwrite(promote.slots, promote)
            if store in self.stores:
                self.stores[store].carry_out(tier_orders)
        for snapshot in orders.snapshots:
            if isinstance(snapshot, ImportOrder):
                self._overwrite(snapshot.slots)
            if self.snapshots is not None:
                self.snapshots.carry_out(snapshot)
        loads: list[FailLoad | LoadOrder] = [*orders.loads, *orders.failed_loads]
        self._parts.update(one.request_id for one in loads if one.mode is RestoreMode.ASYNC)
        for one in loads:
            if isinstance(one, LoadOrder) and one.more:
                self._more.add(one.request_id)
            else:
                self._more.discard(one.request_id)
        for refused in orders.failed_loads:
            self._restored(refused.request_id, refused.mode, refused.blocks, failed=True)
        for order in orders.loads:
            self._orders[order.order_id] = order
            job = CopyJob(order.order_id, Direction.LOAD, order.blocks, order.slots, order.group)
            if order.cold and self.compressor is not None:
                self.compressor.load(order)
            elif order.cold or self.backend is None:
                self._done(CopyResult.refusal(job))
            elif order.mode is RestoreMode.SYNC:
                self._done(self.backend.run(job))
            else:
                self.backend.submit(job)
        for pack in orders.packs:
            note = self.lasting.packing(pack) if self.lasting is not None else None
            for tier in self.stores.values():
                tier.packed(pack)
            if self.compressor is not None:
                self.compressor.pack(pack, note)

    def save(self, orders: Orders) -> None:
        """Start a step's saves, after the forward pass.

        After a failed sync restore, the forward pass has computed on invalid KV. Later steps may do
        so too, until the scheduler has received the report. The saves of these steps are refused.
        """
        if self.pool is None or not orders.saves:
            return
        tainted = orders.seen_failures.get(self._rank, 0) < self._failed_syncs
        for order in orders.saves:
            job = CopyJob(order.order_id, Direction.SAVE, order.blocks, order.slots, order.group)
            self._orders[order.order_id] = order
            if tainted or self.backend is None:
                self._done(CopyResult.refusal(job))
                continue
            self._overwrite(order.slots, order)
            self.backend.submit(job)

    def finish(self) -> Arrivals:
        """Return the requests whose async restore finished since the last call."""
        if self.backend is not None and self._orders:
            for result in self.backend.poll():
                self._done(result)
        if self.compressor is not None:
            for result in self.compressor.poll():
                self._done(result)
        arrived, self._arrived = self._arrived, set()
        failed = arrived & self._failed
        self._failed -= failed
        return Arrivals(arrived, failed)

    def take_bad_blocks(self) -> set[int]:
        """Return the VRAM blocks whose restore failed since the last call."""
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def take_reports(self) -> Reports | None:
        """Return the results of orders since the last call; None if there are none."""
        news: dict[StoreId, dict[int, TierReport]] = {}
        for store, tier in self.stores.items():
            settled, report = tier.take_reports()
            self._reports.update(settled)
            if report is not None:
                news[store] = {self._rank: report}
        self._reports.update(drained(self._reported))
        if not self._reports and not self._newly_failed and not news:
            return None
        reports, self._reports = self._reports, {}
        self._newly_failed = False
        failures = {self._rank: self._failed_syncs} if self._failed_syncs else {}
        return Reports(reports, failures, news)

    def _overwrite(
        self, slots: tuple[int, ...], by: SaveOrder | PromoteOrder | None = None
    ) -> None:
        if self.lasting is not None:
            self.lasting.overwrite(slots, by)
        for tier in self.stores.values():
            tier.forget_slots(slots)

    def _done(self, result: CopyResult) -> None:
        order_id = OrderId(result.job_id)
        order = self._orders.pop(order_id)
        self._reports[order_id] = OrderReport(1, result.failed, result.nbytes, result.seconds)
        if isinstance(order, SaveOrder):
            for store, tier in self.stores.items():
                if store.group == order.group:
                    tier.saved(order, result.failed)
            return
        bad = [order.blocks[i] for i in result.failed]
        self._restored(order.request_id, order.mode, bad, failed=bool(bad))

    def _restored(
        self, request_id: str, mode: RestoreMode, bad: Sequence[int], *, failed: bool
    ) -> None:
        if self._facts.recovers_by_block:
            self.bad_blocks.update(bad)
        elif failed:
            self._failed.add(request_id)
        if mode is RestoreMode.ASYNC:
            self._parts[request_id] -= 1
            if not self._parts[request_id]:
                del self._parts[request_id]
                if request_id not in self._more:
                    self._arrived.add(request_id)
        elif bad:
            self._failed_syncs += 1
            self._newly_failed = True

    def close(self) -> None:
        """Finish copies in flight, flush to the lower tiers, stop threads and free the CPU memory.

        Idempotent. An error in one of these operations does not prevent the others.
        """
        with ExitStack() as last_to_first:
            if self.pool is not None:
                last_to_first.callback(self.pool.close)
                self.pool = None
            if self.lasting is not None:
                last_to_first.callback(self.lasting.close)
            for tier in self.stores.values():
                last_to_first.callback(tier.close)
            if self.compressor is not None:
                last_to_first.callback(self.compressor.close)
            if self.snapshots is not None:
                last_to_first.callback(self.snapshots.close)
            if self.backend is not None:
                backend, self.backend = self.backend, None
                self._stop(backend)
        self.stores = {}
        self.compressor = None
