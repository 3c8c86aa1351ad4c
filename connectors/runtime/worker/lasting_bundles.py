"""Compressed pages in memory that outlives its engine: noted when they are packed, and found again.

A page is noted if the scheduler has said that it is whole on every rank, hashed or not: the records
of a bundle have digests of their own. Under pressure pages are packed as soon as they are saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tiered_kv.codecs.base import Codec
from tiered_kv.codecs.registry import from_table
from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedBundle
from tiered_kv.orders import PackOrder
from tiered_kv.storage.bundles import Bundle, Bundles, Note
from tiered_kv.transfer.memory_file.bundle_note import BundleNote, NotedPage, note_bytes
from tiered_kv.transfer.memory_file.lasting_memory import LastingMemory
from tiered_kv.transfer.memory_file.memory_format import SlotHeader

logger = logging.getLogger(__name__)


class PackNote(Note):
    """Note of the pages of one order to compress. Made by the worker's thread, before anything is
    written to their slots; written by the one that compresses.

    Args:
        order: what is about to be packed.
        saved: for pages that are known to be whole on every rank, since when, nanoseconds since
            1970.
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
            if bundle.codec is None:  # the pages are where they were
                self._validate(bundle)
            elif self._room:
                note = self._note(bundle, bundle.codec)
                if note.pages:
                    self._memory.validate_bundle(note, [self._tickets[at] for at in note.slots])
        except Exception:  # pages that are not found again are no reason to lose them now
            logger.exception("compressed pages cannot be noted")

    def _validate(self, bundle: Bundle) -> None:
        for slot, (key, record) in zip(bundle.slots, bundle.records.items(), strict=True):
            if key in self._saved:
                digest = self._memory.digest(slot, record.nbytes)
                page = SlotHeader(key, record.nbytes, self._saved[key], digest)
                self._memory.validate(slot, self._tickets[slot], page)

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
    """Take over the bundles of the engine before, as far as this one can read them; the others are
    left to whoever gets their slots.

    Args:
        groups: bundles of each page group that is compressed.
        num_slots: number of slots that pages may have.
        trusted: name of the one codec out of tree that may be imported for this.
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
    except Exception as error:  # of a stranger's codec as well
        logger.warning("compressed pages of the engine before cannot be read: %s", error)
        return None
