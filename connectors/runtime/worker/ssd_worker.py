"""One rank's SSD tier: its segment store, the thread that serves it, and its last flush."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.codecs.choice import (
    choose,
    codec_from,
    make_codec,
    measure_codec,
    synthetic_page,
)
from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.affinity import CORES
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.errors import ConfigError
from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.messages import SsdOrders, SsdReport, StoredPages
from tiered_kv.orders import OrderId, OrderReport, SaveOrder
from tiered_kv.storage.disk.files import RealFiles
from tiered_kv.storage.disk.probe import DiskSpeed, measure_disk
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.storage.store.options import io_threads
from tiered_kv.storage.store.store import SegmentStore, StoreError, StoreOptions
from tiered_kv.transfer.cpu_pool import CpuPool

logger = logging.getLogger(__name__)

ASSUMED_SPEED = DiskSpeed(read=1e9, write=1e9)
FLUSH_S = 3.0
"""Time for the last flush. vLLM gives a worker 5 seconds to end, then tells it again (which
disturbs no flush) and kills it 4 seconds later; Python alone takes 2 of them to end one."""


class WorkerSsd:
    """The SSD side of a worker half.

    Args:
        rank: this worker's rank.
        fingerprint: of the engine's pages.
        pool: slots that pages come from and go to.

    Raises:
        ConfigError: the path cannot be used; the sentence says what to do.
    """

    def __init__(
        self,
        facts: EngineFacts,
        config: TierConfig,
        rank: int,
        fingerprint: Fingerprint,
        pool: CpuPool,
    ) -> None:
        assert config.ssd_path is not None
        cores = max(1, len(CORES) // facts.ranks)
        threads = config.io_threads or io_threads(cores)
        options = StoreOptions(
            root=config.ssd_path,
            fingerprint=fingerprint.digest(),
            replica=facts.replica,
            rank=rank,
            ranks=facts.ranks,
            page_format=facts.page_format,
            capacity_bytes=config.ssd_bytes,
            io_threads=threads,
        )
        with _on_all_cores():
            try:
                RealFiles().make_folders(config.ssd_path)
                disk = _measure(config.ssd_path, threads)
                codec, bandwidth = _choose(
                    config.codec, facts.page_format, disk, min(cores, threads)
                )
                self._open = partial(SegmentStore, codec=codec, codec_from=codec_from)
                store = self._open(options)
            except StoreError as error:
                raise ConfigError(f"TIERED_KV_SSD_PATH={config.ssd_path}: {error}") from error
            except OSError as error:
                raise ConfigError(
                    f"TIERED_KV_SSD_PATH={config.ssd_path} cannot be used ({error.strerror}): "
                    "make it writable for the server, or name another folder"
                ) from error
            self.io = IoThread(store, pool.slots)
        self.stored = StoredPages(tuple(store.keys()), bandwidth, store.stored_bytes)
        self._options = options
        self._rank = rank
        self._lasting = fingerprint.lasting
        # What slots hold that is perhaps nowhere else, by whose save; the newest last.
        self._holds: dict[int, tuple[PageKey, OrderId]] = {}
        self._distrusted: set[OrderId] = set()
        self._counted = Counter[str]()
        self._counted_of = store
        self._failures = 0
        self._said = SsdReport()

    # -- orders in ----------------------------------------------------------------

    def carry_out(self, orders: SsdOrders) -> None:
        """Hand a step's orders to the I/O thread."""
        if orders.fingerprint is not None:
            self._options = replace(self._options, fingerprint=orders.fingerprint)
            self._lasting = False
            self._holds.clear()
            self.io.replace_store(partial(self._open, self._options))
        if orders.distrusted:
            self._distrusted.update(orders.distrusted)
            for slot, (_, order_id) in list(self._holds.items()):
                if order_id in self._distrusted:
                    del self._holds[slot]
        if orders.lost:
            self.io.drop(orders.lost)
        if (dying := orders.reclaims.get(self._rank)) is not None:
            self.io.reclaim(dying.segment, dying.survivors)
        # Each machine's clock began at a time of its own.
        ahead_s = 0.0 if orders.sent_at is None else self.io.now() - orders.sent_at
        for promote in orders.promotes:
            self._forget_slots(promote.slots)
            self.io.submit(promote, ahead_s)
        for demote in orders.demotes:
            self.io.submit(demote, ahead_s)
        if orders.hurried:
            self.io.hurry(orders.hurried)

    def saving(self, order: SaveOrder) -> None:
        """Slots are about to be written."""
        self._forget_slots(order.slots)

    def saved(self, order: SaveOrder, failed: frozenset[int]) -> None:
        """Slots now hold pages that are perhaps nowhere else."""
        for i, (slot, key) in enumerate(zip(order.slots, order.keys, strict=True)):
            if i not in failed and order.order_id not in self._distrusted:
                self._holds[slot] = (key, order.order_id)

    def _forget_slots(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._holds.pop(slot, None)

    # -- reports out ----------------------------------------------------------------

    def take_reports(self) -> tuple[dict[OrderId, OrderReport], SsdReport | None]:
        """What became of orders, and what the store says if it is something new."""
        reports, gone = self.io.take_reports(), self.io.take_gone()
        proposal = self.io.proposal
        if not reports and not gone and proposal == self._said.proposal:
            return reports, None
        store, added = self.io.store, Counter[str]()
        if store is not self._counted_of:  # a reset came between
            added += self._count_up(self._counted_of)
            self._counted, self._counted_of = Counter(), store
        added += self._count_up(store)
        failures = self.io.failures
        added["ssd_errors"] += failures - self._failures
        self._failures = failures
        self._said = SsdReport(tuple(gone), proposal, dict(+added), store.stored_bytes)
        return reports, self._said

    def _count_up(self, store: SegmentStore) -> Counter[str]:
        """What the store did since the last call; of one store at a time."""
        stats = store.stats
        totals = Counter(
            ssd_bytes_written=stats.bytes_written,
            ssd_bytes_read=stats.bytes_read,
            ssd_pages_bad=stats.pages_bad,
            ssd_segments_bad=stats.segments_bad,
            ssd_pages_refused=stats.pages_refused,
            ssd_errors=stats.write_errors + stats.read_errors,
        )
        added, self._counted = totals - self._counted, totals
        return added

    def close(self) -> None:
        """Flush what the time allows, the newest pages first; release the store."""
        last: list[tuple[PageKey, int]] = []
        if self._lasting:
            stored = self.io.store
            newest: dict[PageKey, int] = {}
            for slot, (key, _) in reversed(self._holds.items()):
                newest.setdefault(key, slot)
            last = [(key, slot) for key, slot in newest.items() if key not in stored]
        written = self.io.close(last, FLUSH_S, discard=not self._lasting)
        if last:
            logger.info("flushed %d of %d pages to SSD", written, len(last))


def _measure(folder: Path, threads: int) -> DiskSpeed:
    try:
        return measure_disk(folder, threads)
    except OSError as error:  # a full disk can still give what it has
        logger.warning("the disk under %s cannot be measured (%s)", folder, error)
        return ASSUMED_SPEED


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Threads started within may run on all cores of the process, whatever core this one is
    bound to."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _choose(name: str, page_format: PageFormat, disk: DiskSpeed, cores: int) -> tuple[Codec, float]:
    """The codec, and the bytes of pages per second it will promote with."""
    if name == "auto":
        choice = choose(page_format, disk.read / 1e6, disk.write / 1e6, cores)
        logger.info("TIERED_KV_CODEC=auto: %s", choice.reason)
        codec = choice.codec
    else:
        try:
            codec = make_codec(name, page_format)
        except ValueError as error:
            raise ConfigError(f"TIERED_KV_CODEC={name}: {error}; or write auto") from error
    one = measure_codec(codec, synthetic_page(page_format))
    seconds = max(one.stored_bytes / disk.read, one.decode_s / cores)
    return codec, page_format.page_bytes / seconds
