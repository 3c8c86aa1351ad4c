"""A rank's CPU memory that outlives its engine: determines which pages a later engine may use.

A page is found again only if the scheduler has confirmed that every rank has the whole page, its
bytes were hashed, and its slot was not written since. Compressed pages are recorded when they are
packed, even if they were not hashed before: the records of a bundle have digests, and under memory
pressure pages are packed as soon as they are saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tiered_kv.codecs.base import Codec
from tiered_kv.codecs.registry import from_table
from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.machine import usable_cores
from tiered_kv.messages import AdoptedBundle, AdoptedPages, Orders
from tiered_kv.orders import OrderId, PackOrder, PromoteOrder, SaveOrder
from tiered_kv.storage.bundles import Bundle, Bundles, Note
from tiered_kv.transfer.memory_file.lasting_memory import LandedPage, LastingMemory
from tiered_kv.transfer.memory_file.memory_format import Geometry, contents_of
from tiered_kv.transfer.memory_file.opening import memory_path, open_memory
from tiered_kv.transfer.memory_file.slot_table import BundleNote, NotedPage, note_bytes
from tiered_kv.transfer.memory_file.validation import Validation

logger = logging.getLogger(__name__)


class PackNote(Note):
    """Records the pages of a pack order in the memory file. Created on the worker's thread before
    anything is written to the pages' slots, and written by the packing thread.

    Args:
        order: the pack order.
        saved: for each page that every rank is known to have whole, the time of that confirmation,
            nanoseconds since 1970.
    """

    def __init__(
        self, memory: LastingMemory, order: PackOrder, saved: Mapping[PageKey, int]
    ) -> None:
        self._memory = memory
        self._group = order.group
        self._num_slots = len(order.slots)
        self._saved = saved
        memory.invalidate(order.slots)
        self._tickets = {slot: memory.ticket(slot) for slot in order.slots}
        self._room = 0

    def room(self, codec: Codec, pages: int) -> int:
        wanted = note_bytes(codec.table, self._num_slots, pages)
        self._room = wanted if self._saved and wanted <= self._memory.slot_bytes else 0
        return self._room

    def write(self, bundle: Bundle) -> None:
        try:
            if bundle.codec is None:  # the pages stay in their slots
                self._validate(bundle)
            elif self._room:
                note = self._note(bundle, bundle.codec)
                if note.pages:
                    self._memory.validate_bundle(note, [self._tickets[at] for at in note.slots])
        except Exception:  # a page that cannot be found again is still usable now
            logger.exception(
                "pages cannot be recorded in the memory file, and will not survive a restart"
            )

    def _validate(self, bundle: Bundle) -> None:
        for slot, (key, record) in zip(bundle.slots, bundle.records.items(), strict=True):
            if key in self._saved:
                page = LandedPage(slot, key, record.nbytes, self._saved[key])
                self._memory.hash_and_validate(page, self._tickets[slot])

    def _note(self, bundle: Bundle, codec: Codec) -> BundleNote:
        noted = [
            NotedPage(key, self._saved[key], record)
            for key, record in bundle.records.items()
            if key in self._saved
        ]
        return BundleNote(self._group, codec.codec_id, codec.table, bundle.slots, tuple(noted))


def adopt_bundles(
    memory: LastingMemory, groups: Mapping[int, Bundles], num_slots: int, trusted: str
) -> tuple[AdoptedBundle, ...]:
    """Adopt the bundles of the previous engine that this engine can read. The slots of other
    bundles count as free.

    Args:
        groups: bundles of each page group that is compressed.
        num_slots: number of slots available to pages.
        trusted: name of the only third-party codec that may be imported.
    """
    codecs = dict[tuple[int, int, bytes], Codec | None]()
    found = list[AdoptedBundle]()
    for note in memory.bundles:
        which = note.group, note.codec_id, note.table
        if which not in codecs:
            codecs[which] = _codec(note, groups, trusted)
        codec = codecs[which]
        if codec is None or max(note.slots) >= num_slots:
            continue
        records = {page.key: page.record for page in note.pages}
        groups[note.group].adopt(Bundle(note.slots, codec, records))
        keys, saved = zip(*((page.key, page.saved) for page in note.pages), strict=True)
        found.append(AdoptedBundle(note.slots, keys, saved))
    return tuple(found)


def _codec(note: BundleNote, groups: Mapping[int, Bundles], trusted: str) -> Codec | None:
    bundles = groups.get(note.group)
    if bundles is None:
        return None
    try:
        return from_table(note.codec_id, note.table, bundles.page_format, trusted)
    except Exception as error:  # includes anything that a third-party codec raises
        logger.warning("compressed pages from the previous engine cannot be read: %s", error)
        return None


VALIDATE_S = 1.0
"""Time for hashing remaining pages at a clean stop, seconds. vLLM gives a worker 5 seconds to stop,
and the final flush to SSD may take 3 of them."""


class LastingPages:
    """Keeps the records of a memory file correct. Used on the worker's thread.

    Args:
        memory: the memory file. Its pool closes the file, after this object has been closed.
        page_bytes: size of a page of each group, bytes.
    """

    def __init__(self, memory: LastingMemory, page_bytes: Sequence[int]) -> None:
        self._memory = memory
        self._keep = memory.keep
        memory.keep = _kept_if_this_fails(memory)
        self._page_bytes = page_bytes
        self._validation = Validation(memory)
        self._unsettled: dict[OrderId, SaveOrder | PromoteOrder] = {}
        self._landed: dict[int, LandedPage] = {}  # by slot, until overwritten
        found = memory.adopted
        self._adopted = AdoptedPages(
            tuple(found),
            tuple(page.key for page in found.values()),
            tuple(page.saved for page in found.values()),
        )

    def overwrite(self, slots: Sequence[int], by: SaveOrder | PromoteOrder | None = None) -> None:
        """Record that slots are about to be overwritten.

        Args:
            by: order that fills the slots, if a settlement for it will follow.
        """
        self._memory.invalidate(slots)
        for slot in slots:
            self._landed.pop(slot, None)
        if by is not None:
            self._unsettled[by.order_id] = by

    def packing(self, order: PackOrder) -> Note:
        """Prepare the record of pages that are about to be compressed in their slots."""
        saved = dict[PageKey, int]()
        for slot, key in zip(order.slots, order.keys, strict=True):
            page = self._landed.pop(slot, None) or self._memory.valid(slot)
            if page is not None and page.key == key:
                saved[key] = page.saved
        return PackNote(self._memory, order, saved)

    def adopt_bundles(self, groups: Mapping[int, Bundles], num_slots: int, trusted: str) -> None:
        """Adopt the compressed pages of the previous engine."""
        found = adopt_bundles(self._memory, groups, num_slots, trusted)
        self._adopted = replace(self._adopted, bundles=found)

    def offer(self) -> AdoptedPages:
        """Return the pages of the previous engine for the scheduler. The engine has started: from
        now on a clean stop deletes the file, unless it is to be kept."""
        self._memory.keep = self._keep
        return self._adopted

    def on_orders(self, orders: Orders) -> None:
        """Handle the scheduler's notifications of finished orders. Must be called before this step
        writes to any slot."""
        if orders.reset:  # no other engine has keys of a new generation
            self._memory.clear()
            self._unsettled.clear()
            self._landed.clear()
        landed = list[LandedPage]()
        for settlement in orders.settled:
            order = self._unsettled.pop(settlement.order_id, None)
            if order is None:
                continue
            group = order.group if isinstance(order, SaveOrder) else order.store.group
            landed += (
                LandedPage(slot, key, self._page_bytes[group], settlement.at)
                for i, (slot, key) in enumerate(zip(order.slots, order.keys, strict=True))
                if i not in settlement.bad
            )
        if landed:
            self._landed.update((page.slot, page) for page in landed)
            self._validation.landed(landed)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every page is hashed; False on timeout."""
        return self._validation.wait_idle(timeout_s)

    def close(self) -> None:
        """Hash remaining pages for at most ``VALIDATE_S``, if the file is kept. Idempotent."""
        self._validation.close(VALIDATE_S if self._memory.keep else 0.0)


def held_bytes(facts: EngineFacts, config: TierConfig, rank: int) -> int:
    """Return the memory that this rank's file already occupies, bytes; 0 without a file."""
    if config.cpu_path is None:
        return 0
    with suppress(OSError):
        return memory_path(config.cpu_path, facts.replica, rank).stat().st_size
    return 0


def open_lasting(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    slots: int,
    fingerprints: Sequence[Fingerprint],
    *,
    on_gpu: bool,
    clock: Callable[[], float],
) -> LastingMemory | None:
    """Open this rank's memory file, with the valid pages of the previous engine. Returns None if no
    file is configured, in observe mode, or if no later engine could have the same keys.

    Raises:
        ConfigError: the file cannot be opened or created; the message says what to do.
    """
    folder: Path | None = config.cpu_path
    if folder is None or config.observes:
        return None
    if not all(one.lasting for one in fingerprints):
        logger.warning(
            "pages in CPU memory will not survive a restart: the model has no files by which the "
            "next engine could recognize its weights"
        )
        return None
    geometry = Geometry(
        contents_of([one.digest() for one in fingerprints]),
        rank,
        facts.ranks,
        facts.replica,
        slots,
        facts.slot_bytes,
    )
    memory = open_memory(folder, geometry, keep=config.cpu_keep, clock=clock)
    try:
        memory.check_adopted(max(1, usable_cores() // facts.ranks))
        if on_gpu and (rest_s := memory.rest_s()):
            logger.info(
                "waiting %.0f s for the GPU copies of the previous engine to finish", rest_s
            )
            time.sleep(rest_s)
    except BaseException:
        memory.keep = _kept_if_this_fails(memory)
        memory.close()
        raise
    return memory


def _kept_if_this_fails(memory: LastingMemory) -> bool:
    """Return True if the file should be kept even if the engine fails to start, because it may
    contain pages of the previous engine."""
    return memory.keep or bool(memory.adopted or memory.bundles)
