"""Bundles: pages of CPU memory that are kept compressed, in the pages' own slots.

A bundle is created in the slots of its pages. Its pages are encoded into separate memory. Their
records are then written contiguously over the slots, the last of which are no longer needed. Pages
that do not shrink stay raw. A record may cross from one slot to the next, wherever the next slot
lies.

The contents of a slot are known only from the tables of bundles in this module and in the index of
the scheduler half and, if memory outlives its engine, from a note in the bundle. So each record has
a digest, and a read returns either the page that was packed or nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.base import Bytes, Codec, CodedPage, EncodedPage
from tiered_kv.codecs.scratch import Scratch
from tiered_kv.codecs.training import CodecTraining
from tiered_kv.keys import PageKey
from tiered_kv.storage.segment.format import payload_digest

logger = logging.getLogger(__name__)

Map = Callable[[Callable[[Bytes], EncodedPage], Iterable[Bytes]], Iterable[EncodedPage]]
"""Applies a function to each page, perhaps on several threads, and returns the results in order."""


@dataclass(frozen=True, slots=True)
class Record:
    """A page of a bundle.

    Attributes:
        offset: position in the concatenated slots of the bundle, bytes.
        digest: digest of plane and frame.
    """

    offset: int
    plane_bytes: int
    frame_bytes: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.plane_bytes + self.frame_bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """Pages that were packed together.

    Attributes:
        codec: codec of the records; None if the pages are stored raw.
    """

    slots: tuple[int, ...]
    codec: Codec | None
    records: dict[PageKey, Record]


class Note(Protocol):
    """Note about a bundle, in the bundle's slots, from which a later engine finds the pages."""

    def room(self, codec: Codec, pages: int) -> int:
        """Return the number of bytes to reserve at the start of the first slot.

        Args:
            codec: codec of the bundle.
            pages: number of pages that are packed.
        """

    def write(self, bundle: Bundle) -> None:
        """Write the note once the bundle's pages are in place. Does not raise."""


class Bundles:
    """The bundles of one page group, on one rank.

    ``pack`` is called by one thread at a time, ``read`` and ``copy`` by any number concurrently. No
    thread may read a bundle before ``pack`` has returned.

    Args:
        slots: the CPU pool's slots, uint8 ``[slots, bytes]``, at least as large as a page.
        codec: codec of bundles, which is trained on the first pages.

    Attributes:
        page_format: format of the pages.
        page_bytes: size of a page, bytes.
    """

    def __init__(self, slots: NDArray[np.uint8], codec: Codec) -> None:
        self.page_format = codec.page_format
        self.page_bytes = codec.page_format.page_bytes
        self._training = CodecTraining(codec)
        self._preferred: Callable[[], Codec | None] = lambda: None
        self._slots = slots
        self._bundles: dict[int, Bundle] = {}
        self._in_slot: dict[int, Bundle] = {}  # the same bundles, by each of their slots
        self._scratch = Scratch()
        self._has_failed = False

    def pack(
        self, keys: Sequence[PageKey], slots: Sequence[int], each: Map, note: Note | None = None
    ) -> int:
        """Compress the pages ``keys[i]`` in ``slots[i]`` into the first of these slots.

        Args:
            each: maps the encoder over the pages.
            note: note of the bundle; None if the bundle does not outlive its engine.

        Returns:
            The number of slots that are needed; all of them if the pages do not shrink, or cannot
            be encoded.
        """
        page_bytes, slot_bytes = self.page_bytes, self._slots.shape[1]
        pages = [self._slots[slot, :page_bytes] for slot in slots]
        codec, encoded = self._encoded(pages, each)
        offset = note.room(codec, len(keys)) if codec is not None and note is not None else 0
        needed = -(-(offset + sum(one.nbytes for one in encoded)) // int(slot_bytes))
        records = dict[PageKey, Record]()
        if codec is None or needed >= len(slots):
            for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
                digest = payload_digest(page.data)
                records[key] = Record(i * slot_bytes, page_bytes, 0, digest)
            return self._kept(Bundle(tuple(slots), None, records), note)
        used = tuple(slots[:needed])
        for key, one in zip(keys, encoded, strict=True):
            begin = offset
            for part in (one.plane, one.frame):
                at = 0
                for piece in self._pieces(used, offset, part.nbytes):
                    piece[:] = part[at : at + piece.nbytes]
                    at += piece.nbytes
                offset += part.nbytes
            stored = self._bytes(used, begin, one.nbytes)
            digest = payload_digest(stored.data)
            records[key] = Record(begin, one.plane.nbytes, one.frame.nbytes, digest)
        return self._kept(Bundle(used, codec, records), note)

    def _kept(self, bundle: Bundle, note: Note | None) -> int:
        self._keep(bundle)
        if note is not None:
            note.write(bundle)
        return len(bundle.slots)

    def adopt(self, bundle: Bundle) -> None:
        """Adopt a bundle of a previous engine. Must be called before the first page is packed."""
        self._keep(bundle)
        if bundle.codec is not None:
            self._training.adopt(bundle.codec)

    def _keep(self, bundle: Bundle) -> None:
        """Register a bundle, and drop the bundles whose slots it overwrites."""
        for slot in bundle.slots:
            if (old := self._in_slot.get(slot)) is not None:
                del self._bundles[old.slots[0]]
                for one in old.slots:
                    del self._in_slot[one]
        self._bundles[bundle.slots[0]] = bundle
        self._in_slot.update(dict.fromkeys(bundle.slots, bundle))

    def encode_like(self, preferred: Callable[[], Codec | None]) -> None:
        """Encode with the codec of another store. ``preferred`` returns that codec, or None while
        the codec is unknown."""
        self._preferred = preferred

    def _encoded(
        self, pages: Sequence[Bytes], each: Map
    ) -> tuple[Codec | None, Sequence[EncodedPage]]:
        """Encode pages. Returns their codec and the encoded pages, or None and no pages if the
        pages stay raw."""
        try:
            codec = self._codec(pages)
            encoded = list(each(codec.encode, pages))
        except Exception as error:  # codecs may raise anything; the raw bytes are intact
            level = logging.DEBUG if self._has_failed else logging.ERROR
            self._has_failed = True
            logger.log(level, "pages in CPU memory cannot be compressed: %r", error)
            return None, ()
        # A plane that aliases its page could be overwritten while the bundle is written.
        return (None, ()) if codec.stores_in_place else (codec, encoded)

    def _codec(self, pages: Sequence[Bytes]) -> Codec:
        preferred = self._preferred()
        if preferred is not None and not preferred.stores_in_place:
            return preferred
        if self._training.wanted:
            self._training.see(pages)
        return self._training.codec

    def read(self, first_slot: int, key: PageKey, out: Bytes) -> bool:
        """Decode a page of the bundle with this first slot into ``out``. Returns False if the page
        is missing or damaged; ``out`` then has undefined contents."""
        found = self._find(first_slot, key)
        if found is None:
            return False
        try:
            found.decode(out)
        except Exception:  # codecs may raise anything; other pages must not be affected
            logger.exception("a compressed page in CPU memory cannot be decoded")
            return False
        return True

    def copy(self, first_slot: int, key: PageKey) -> CodedPage | None:
        """Return a copy of an encoded page of the bundle with this first slot; None if the page is
        missing or damaged."""
        found = self._find(first_slot, key)
        if found is None:
            return None
        plane, frame = found.page.plane.copy(), found.page.frame.copy()
        return CodedPage(found.codec, EncodedPage(plane, frame))

    def _find(self, first_slot: int, key: PageKey) -> CodedPage | None:
        """Return an encoded page, whose bytes are valid until the next call on this thread; None if
        the page is missing or damaged."""
        bundle = self._bundles.get(first_slot)
        record = bundle.records.get(key) if bundle is not None else None
        if bundle is None or record is None:
            return None
        stored = self._bytes(bundle.slots, record.offset, record.nbytes)
        if payload_digest(stored.data) != record.digest:
            return None
        middle = record.plane_bytes
        return CodedPage(bundle.codec, EncodedPage(stored[:middle], stored[middle:]))

    def _bytes(self, slots: Sequence[int], offset: int, nbytes: int) -> Bytes:
        """Return the bytes of a bundle as one array, which is a copy if the bytes cross from one
        slot to the next."""
        pieces = list(self._pieces(slots, offset, nbytes))
        if len(pieces) == 1:
            return pieces[0]
        whole = self._scratch.bytes(nbytes)
        at = 0
        for piece in pieces:
            whole[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return whole

    def _pieces(self, slots: Sequence[int], offset: int, nbytes: int) -> Iterator[Bytes]:
        """Yield views of a range of a bundle's bytes, one view for each slot in the range."""
        slot_bytes, end = self._slots.shape[1], offset + nbytes
        while offset < end:
            index, at = divmod(offset, slot_bytes)
            stop = min(slot_bytes, at + end - offset)
            yield self._slots[slots[index], at:stop]
            offset += stop - at
