"""Cold pages on one rank: compresses pages in their slots, and restores them from there.

Packing yields to everything else on the machine. Restores do not, since a request waits for them:
pages are decoded on several threads, into slots that are kept for this, and copied while the next
ones are decoded. A restore with some cold pages is two copies, reported as one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.autotune import measure_codec, synthetic_page
from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.pages.cpu_compression import staging_slots, worth_compressing
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.machine import CORES, spare_cores
from tiered_kv.orders import LoadOrder, OrderId, OrderReport, PackOrder
from tiered_kv.page_group import KvKind
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.storage.bundles import Bundles, Note
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

logger = logging.getLogger(__name__)

T = TypeVar("T")

CORES_SHARE = 4
"""One spare core in this many may encode, and one decode; a single one where none is to spare."""
NICE = 10
"""Niceness of packing."""


class Compressor:
    """Packs and restores, each on threads of its own.

    Args:
        groups: bundles of each page group that is compressed.
        slots: the CPU pool's slots.
        staging: slots for decoded pages on their way, at least two.
        make_backend: makes a backend between VRAM and the pool, for this alone.
        threads: number of threads that encode, and of those that decode.

    Attributes:
        staging: number of those slots.
    """

    def __init__(
        self,
        groups: Mapping[int, Bundles],
        slots: NDArray[np.uint8],
        staging: Sequence[int],
        make_backend: Callable[[], TransferBackend],
        threads: int,
    ) -> None:
        self.groups = groups
        self.staging = len(staging)
        self._slots = slots
        self._halves = staging[: len(staging) // 2], staging[len(staging) // 2 :]
        self._make_backend = make_backend
        self._backend: TransferBackend | None = make_backend()
        self._reports: SimpleQueue[tuple[OrderId, OrderReport]] = SimpleQueue()
        self._results: SimpleQueue[CopyResult] = SimpleQueue()
        self._packs = _executor("pack", 1, be_nice=True)
        self._encoders = _executor("encode", threads, be_nice=True)
        self._loads = _executor("unpack", 1)
        self._decoders = _executor("decode", threads)

    # -- packing ----------------------------------------------------------------------

    def pack(self, order: PackOrder, note: Note | None = None) -> None:
        """Begin to pack a bundle."""
        self._packs.submit(self._pack, order, note)

    def _pack(self, order: PackOrder, note: Note | None) -> None:
        began, slots = time.perf_counter(), 0
        bundles = self.groups.get(order.group)
        try:
            if bundles is not None:
                slots = bundles.pack(order.keys, order.slots, self._encoders.map, note)
        except Exception:
            logger.exception("%d pages are lost: they cannot be compressed", len(order.slots))
        failed = frozenset[int]() if slots else frozenset(range(len(order.slots)))
        nbytes = len(order.slots) * self._slots.shape[1]
        report = OrderReport(1, failed, nbytes, time.perf_counter() - began, slots)
        self._reports.put((order.order_id, report))

    # -- restoring ----------------------------------------------------------------------

    def load(self, order: LoadOrder) -> None:
        """Begin to restore an order's cold pages. Their result has the indices of the order."""
        places = [i for i, slot in enumerate(order.slots) if slot < 0]
        backend = self._backend
        fence = backend.fence() if backend is not None else None
        self._loads.submit(self._load, order, places, fence)

    def _load(
        self, order: LoadOrder, places: Sequence[int], fence: AbstractContextManager[None] | None
    ) -> None:
        began, good = time.perf_counter(), set[int]()
        try:
            if fence is not None:
                good = self._restore(order, places, fence)
        except Exception:
            logger.exception("a restore of %d compressed pages failed", len(places))
        bundles = self.groups.get(order.group)
        nbytes = len(good) * bundles.page_bytes if bundles is not None else 0
        failed = frozenset(places).difference(good)
        seconds = time.perf_counter() - began
        self._results.put(CopyResult(order.order_id, failed, nbytes, seconds))

    def _restore(
        self, order: LoadOrder, places: Sequence[int], fence: AbstractContextManager[None]
    ) -> set[int]:
        """Decode and copy, one half of the staging slots after the other; give the places that are
        in VRAM."""
        backend, good = self._backend, set[int]()
        if backend is None:
            return good
        keys = dict(zip(places, order.cold, strict=True))
        sent = list[int]()
        step = len(self._halves[0])
        with fence:
            try:
                for number, at in enumerate(range(0, len(places), step)):
                    some, half = places[at : at + step], self._halves[number % 2]
                    fit = self._decode(order, [(i, keys[i]) for i in some], half)
                    good.update(_arrived(backend, sent))  # the other half is free from here on
                    sent = [i for i, _ in fit]
                    blocks, slots = [order.blocks[i] for i in sent], [slot for _, slot in fit]
                    backend.submit(CopyJob(number, Direction.LOAD, blocks, slots, order.group))
            finally:  # whatever happens: blocks that are reported are not written to any more
                good.update(_arrived(backend, sent))
        return good

    def _decode(
        self, order: LoadOrder, pages: Sequence[tuple[int, PageKey]], slots: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Decode pages into slots; give the places of those that are good, with their slots."""
        bundles = self.groups[order.group]

        def decode(page: tuple[int, PageKey], slot: int) -> bool:
            place, key = page
            out = self._slots[slot, : bundles.page_bytes]
            good = bundles.read(cold_place(order.slots[place]), key, out)
            if not good:
                logger.error("a compressed page in CPU memory is bad: its tokens are computed")
            return good

        slots = slots[: len(pages)]
        good = self._decoders.map(decode, pages, slots)
        return [
            (place, slot) for (place, _), slot, ok in zip(pages, slots, good, strict=True) if ok
        ]

    # -- reports ------------------------------------------------------------------------

    def take_reports(self) -> dict[OrderId, OrderReport]:
        """Reports of packs since the last call."""
        return dict(_all(self._reports))

    def poll(self) -> list[CopyResult]:
        """Results of loads since the last call."""
        return _all(self._results)

    # -- life -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until what was begun before is over."""
        for threads in (self._packs, self._loads):
            threads.submit(int).result()  # behind all of it

    def release_vram(self) -> None:
        """Finish the restores under way. From now on they fail. Idempotent."""
        self._loads.submit(self._drop_backend).result()

    def take_vram(self) -> None:
        """Restore again, into VRAM that may be elsewhere."""
        if self._backend is None:
            self._backend = self._make_backend()

    def _drop_backend(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def close(self) -> None:
        """Finish what is under way, and end the threads. Idempotent."""
        with suppress(RuntimeError):  # closed before
            self.release_vram()
        for threads in (self._packs, self._encoders, self._loads, self._decoders):
            threads.shutdown()


def _arrived(backend: TransferBackend, sent: Sequence[int]) -> set[int]:
    """Wait for the copy under way; give the places that it filled."""
    backend.drain()
    failed = frozenset[int]().union(*(one.failed for one in backend.poll()))
    return {place for i, place in enumerate(sent) if i not in failed}


def _all(queue: SimpleQueue[T]) -> list[T]:
    found = list[T]()
    while not queue.empty():
        found.append(queue.get())
    return found


def _executor(name: str, threads: int, *, be_nice: bool = False) -> ThreadPoolExecutor:
    def begin() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, CORES)  # whatever core the engine's thread is bound to
            if be_nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    return ThreadPoolExecutor(threads, f"tiered-kv-{name}", begin)


def make_compressor(
    facts: EngineFacts,
    codec: str,
    slots: NDArray[np.uint8],
    make_backend: Callable[[], TransferBackend],
) -> Compressor | None:
    """Make a rank's compressor; None if nothing is to be compressed.

    Args:
        codec: its name, as ``TIERED_KV_CODEC`` gives it.
        slots: the CPU pool's slots, of which the last ones are kept for what is decoded.

    Raises:
        ConfigError: there is no such codec, or it does not work.
    """
    staging = staging_slots(len(slots))
    if not staging:
        return None
    threads = threads_of(facts)
    groups = {at: Bundles(slots, made) for at, made in codecs_of(facts, codec).items()}
    if not groups:
        return None
    last = range(len(slots) - staging, len(slots))
    return Compressor(groups, slots, last, make_backend, threads)


def threads_of(facts: EngineFacts) -> int:
    """Threads of a rank that encode, and as many that decode."""
    return max(1, spare_cores(facts.ranks) // facts.ranks // CORES_SHARE)


def codecs_of(facts: EngineFacts, codec: str) -> dict[int, Codec]:
    """Codecs for the pages of groups that are worth compressing in CPU memory, by group.

    Args:
        codec: its name, as ``TIERED_KV_CODEC`` gives it.

    Raises:
        ConfigError: there is no such codec, or it does not work.
    """
    found, threads = dict[int, Codec](), threads_of(facts)
    for at, group in enumerate(facts.groups):
        state = group.reach.kind is KvKind.STATE
        made = _codec(codec, group.page_format, threads) if not state else None
        if made is not None:
            found[at] = made
    return found


def _codec(name: str, page_format: PageFormat, threads: int) -> Codec | None:
    """The codec for a group's pages in CPU memory; None if they are not worth compressing."""
    try:
        codec = parse("centred" if name == "auto" else name)(page_format)
    except ValueError:  # it does not know such pages
        return None
    if codec.stores_in_place:
        return None
    try:
        measured = measure_codec(codec, synthetic_page(page_format))
    except Exception as error:  # of whatever a stranger's codec does
        raise ConfigError(f"TIERED_KV_CODEC={name}: {error}; write auto") from error
    if not worth_compressing(page_format.page_bytes, measured.stored_bytes):
        return None
    rate = page_format.page_bytes / measured.decode_s / 1e9
    logger.info(
        "CPU memory is compressed: codec %s decodes %.2f GB/s on each of %d threads",
        codec.name,
        rate,
        threads,
    )
    return codec


class ColdLoads:
    """Restores in two parts: the pages that are not compressed, and the rest."""

    def __init__(self) -> None:
        self._raw: dict[OrderId, list[int]] = {}  # places of the pages that are not compressed
        self._first: dict[OrderId, CopyResult] = {}

    def split(self, order: LoadOrder) -> CopyJob | None:
        """The copy of an order's pages that are not compressed; None if all are."""
        raw = [i for i, slot in enumerate(order.slots) if slot >= 0]
        if not raw:
            return None
        self._raw[order.order_id] = raw
        blocks, slots = [order.blocks[i] for i in raw], [order.slots[i] for i in raw]
        return CopyJob(order.order_id, Direction.LOAD, blocks, slots, order.group)

    def on_raw(self, result: CopyResult) -> CopyResult | None:
        """Take in the result of a copy of pages that are not compressed; gives that of its order,
        None until both parts are over."""
        raw = self._raw.get(OrderId(result.job_id))
        if raw is None:
            return result
        failed = frozenset(raw[i] for i in result.failed)
        return self._merge(CopyResult(result.job_id, failed, result.nbytes, result.seconds))

    def on_cold(self, result: CopyResult) -> CopyResult | None:
        """The same for the other part, whose indices are those of the order."""
        return self._merge(result) if OrderId(result.job_id) in self._raw else result

    def _merge(self, result: CopyResult) -> CopyResult | None:
        order_id = OrderId(result.job_id)
        first = self._first.pop(order_id, None)
        if first is None:
            self._first[order_id] = result
            return None
        del self._raw[order_id]
        return CopyResult(
            result.job_id,
            first.failed | result.failed,
            first.nbytes + result.nbytes,
            max(first.seconds, result.seconds),
        )
