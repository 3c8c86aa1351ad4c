"""Compressed pages on one rank: compresses pages in their slots, and restores compressed pages.

Packing threads yield to all other work on the machine. Restores do not, because requests wait for
them. Pages are decoded on several threads into staging slots, and copied to VRAM while the next
pages are decoded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
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
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.machine import run_beside, spare_cores
from tiered_kv.orders import LoadOrder, OrderId, OrderReport, PackOrder
from tiered_kv.page_group import KvKind
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.storage.bundles import Bundles, Note
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[tuple[OrderId, OrderReport]], None]
"""Receives the report of an order, on any thread."""

CORES_SHARE = 4
"""One spare core in ``CORES_SHARE`` may encode, and one may decode, but at least one core each."""
NICE = 10
"""Niceness of packing threads."""


class Compressor:
    """Packs and restores pages, on separate threads.

    Args:
        groups: bundles of each page group that is compressed.
        slots: the CPU pool's slots.
        staging: slots for decoded pages on their way to VRAM, at least two.
        make_backend: creates a transfer backend between VRAM and the CPU pool, used only by this
            object.
        threads: number of threads that encode, and of threads that decode.
        report: called on the packing thread with the report of each pack.

    Attributes:
        staging: number of staging slots.
        backend: the transfer backend; None while VRAM is released.
    """

    def __init__(
        self,
        groups: Mapping[int, Bundles],
        slots: NDArray[np.uint8],
        staging: Sequence[int],
        make_backend: Callable[[], TransferBackend],
        threads: int,
        report: Report,
    ) -> None:
        self.groups = groups
        self.staging = len(staging)
        self._slots = slots
        self._halves = staging[: len(staging) // 2], staging[len(staging) // 2 :]
        self._make_backend = make_backend
        self.backend: TransferBackend | None = make_backend()
        self._report = report
        self._results: SimpleQueue[CopyResult] = SimpleQueue()
        self._packs = run_beside("pack", 1, NICE)
        self._encoders = run_beside("encode", threads, NICE)
        self._loads = run_beside("unpack", 1)
        self._decoders = run_beside("decode", threads)

    # -- packing ----------------------------------------------------------------------

    def pack(self, order: PackOrder, note: Note | None = None) -> None:
        """Start to compress a bundle. ``note`` records its pages for a later engine."""
        self._packs.submit(self._pack, order, note)

    def _pack(self, order: PackOrder, note: Note | None) -> None:
        began, slots = time.perf_counter(), 0
        bundles = self.groups.get(order.group)
        try:
            if bundles is not None:
                slots = bundles.pack(order.keys, order.slots, self._encoders.map, note)
        except Exception:
            logger.exception(
                "compression failed, and CPU memory lost %s",
                count(len(order.slots), "page"),
            )
        failed = frozenset[int]() if slots else frozenset(range(len(order.slots)))
        nbytes = len(order.slots) * self._slots.shape[1]
        report = OrderReport(1, failed, nbytes, time.perf_counter() - began, slots)
        self._report((order.order_id, report))

    # -- restoring ----------------------------------------------------------------------

    def load(self, order: LoadOrder) -> None:
        """Start a restore that includes compressed pages."""
        fence = self.backend.fence() if self.backend is not None else None
        self._loads.submit(self._load, order, fence)

    def _load(self, order: LoadOrder, fence: AbstractContextManager[None] | None) -> None:
        began, good = time.perf_counter(), set[int]()
        try:
            if fence is not None:
                good = self._restore(order, fence)
        except Exception:
            logger.exception("%d compressed pages could not be restored", len(order.cold))
        nbytes = len(good) * self.groups[order.group].page_bytes if good else 0
        failed = frozenset(range(len(order.slots))).difference(good)
        seconds = time.perf_counter() - began
        self._results.put(CopyResult(order.order_id, failed, nbytes, seconds))

    def _restore(self, order: LoadOrder, fence: AbstractContextManager[None]) -> set[int]:
        """Copy the uncompressed pages, then the compressed pages. The next part is decoded while a
        part is copied. Returns the indices of the pages that are in VRAM."""
        backend, good = self.backend, set[int]()
        if backend is None:
            return good
        sent = list[tuple[int, int]]()
        resident = [(i, slot) for i, slot in enumerate(order.slots) if slot >= 0]
        with fence:
            try:
                for part in chain([resident] if resident else (), self._decoded(order)):
                    good.update(_arrived(backend, sent))
                    sent = part
                    blocks, slots = [order.blocks[i] for i, _ in part], [slot for _, slot in part]
                    backend.submit(
                        CopyJob(order.order_id, Direction.LOAD, blocks, slots, order.group)
                    )
            finally:  # always: nothing may write to blocks once they are reported
                good.update(_arrived(backend, sent))
        return good

    def _decoded(self, order: LoadOrder) -> Iterator[list[tuple[int, int]]]:
        """Decode an order's compressed pages, alternating between the halves of the staging slots.
        Yields the indices and slots of the good pages of each half."""
        bundles = self.groups[order.group]
        places = [i for i, slot in enumerate(order.slots) if slot < 0]
        pages = list(zip(places, order.cold, strict=True))

        def decode(page: tuple[int, PageKey], slot: int) -> bool:
            place, key = page
            out = self._slots[slot, : bundles.page_bytes]
            good = bundles.read(cold_place(order.slots[place]), key, out)
            if not good:
                logger.error(
                    "a compressed page in CPU memory is damaged: its tokens are recomputed"
                )
            return good

        for number, at in enumerate(range(0, len(pages), len(self._halves[0]))):
            half = self._halves[number % 2]
            part = pages[at : at + len(half)]
            good = self._decoders.map(decode, part, half)
            yield [(i, slot) for (i, _), slot, fits in zip(part, half, good, strict=False) if fits]

    def poll(self) -> list[CopyResult]:
        """Return the results of restores since the last call."""
        return drained(self._results)

    # -- lifecycle ------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until all work that was started before has finished."""
        for threads in (self._packs, self._loads):
            threads.submit(int).result()  # runs after everything queued before

    def release_vram(self) -> None:
        """Finish the restores in flight. Later restores fail. Idempotent."""
        self._loads.submit(self._drop_backend).result()

    def take_vram(self) -> None:
        """Allow restores again. VRAM may be at another address."""
        if self.backend is None:
            self.backend = self._make_backend()

    def _drop_backend(self) -> None:
        backend, self.backend = self.backend, None
        if backend is not None:
            backend.close()

    def close(self) -> None:
        """Finish work in flight, and stop the threads. Idempotent."""
        with suppress(RuntimeError):  # closed before
            self.release_vram()
        for threads in (self._packs, self._encoders, self._loads, self._decoders):
            threads.shutdown()


def _arrived(backend: TransferBackend, sent: Sequence[tuple[int, int]]) -> set[int]:
    """Wait for the copy in flight. Returns the indices of the pages that were copied."""
    backend.drain()
    failed = frozenset[int]().union(*(one.failed for one in backend.poll()))
    return {i for at, (i, _) in enumerate(sent) if at not in failed}


def drained(queue: SimpleQueue[T]) -> list[T]:
    """Empty a queue whose only reader is the caller, and return its items."""
    return [queue.get() for _ in range(queue.qsize())]


def make_compressor(
    facts: EngineFacts,
    codec: str,
    slots: NDArray[np.uint8],
    make_backend: Callable[[], TransferBackend],
    report: Report,
) -> Compressor | None:
    """Create a rank's compressor; None if nothing is to be compressed.

    Args:
        codec: value of ``TIERED_KV_CODEC``.
        slots: the CPU pool's slots; the last slots are the staging slots.

    Raises:
        ConfigError: the codec does not exist, or does not work.
    """
    staging = staging_slots(len(slots))
    if not staging:
        return None
    threads = threads_of(facts)
    groups = {at: Bundles(slots, made) for at, made in codecs_of(facts, codec).items()}
    if not groups:
        return None
    last = range(len(slots) - staging, len(slots))
    return Compressor(groups, slots, last, make_backend, threads, report)


def threads_of(facts: EngineFacts) -> int:
    """Return the number of encoding threads of a rank, which is also the number of decoding
    threads: at least one, even if no core is spare."""
    return max(1, spare_cores(facts.ranks) // facts.ranks // CORES_SHARE)


def codecs_of(facts: EngineFacts, codec: str) -> dict[int, Codec]:
    """Return the codecs of the groups whose pages are worth compressing in CPU memory, by group.

    Args:
        codec: value of ``TIERED_KV_CODEC``.

    Raises:
        ConfigError: the codec does not exist, or does not work.
    """
    found, threads = dict[int, Codec](), threads_of(facts)
    for at, group in enumerate(facts.groups):
        state = group.reach.kind is KvKind.STATE
        made = _codec(codec, group.page_format, threads) if not state else None
        if made is not None:
            found[at] = made
    return found


def _codec(name: str, page_format: PageFormat, threads: int) -> Codec | None:
    """Return the codec for a group's pages in CPU memory; None if the codec does not support the
    pages, or if the pages are not worth compressing. Raises ConfigError if the codec does not exist
    or does not work."""
    try:
        codec = parse("centred" if name == "auto" else name)(page_format)
    except ValueError:  # the codec does not support such pages
        return None
    if codec.stores_in_place:
        return None
    try:
        measured = measure_codec(codec, synthetic_page(page_format))
    except Exception as error:  # a third-party codec may raise anything
        raise ConfigError(
            f"TIERED_KV_CODEC={name}: the codec failed on a test page ({error}): set another "
            "codec, or auto"
        ) from error
    if not worth_compressing(page_format.page_bytes, measured.stored_bytes):
        return None
    rate = page_format.page_bytes / measured.decode_s / 1e9
    logger.info(
        "pages in CPU memory will be compressed: codec %s decodes %.2f GB/s per thread, on %s",
        codec.name,
        rate,
        count(threads, "thread"),
    )
    return codec
