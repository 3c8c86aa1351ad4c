"""Memory for the CPU pool's slots that outlives the process, and the headers of the slots.

Whoever uses it keeps four rules, so that no page is ever found that is not the one of its key:

- Slots are made invalid before anything writes to them, a copy by a device or a compressor
  included, and also where the write is then refused.
- A slot is made valid once its bytes have landed, and are known to be right on every rank. A save
  that is reported as done may be one whose blocks were given up under way.
- It is made valid with the ticket that it had when its bytes landed, so that a validation that
  comes late says nothing of the bytes that came since.
- Pages from before are checked before anything reads them (``check_adopted``); those of bundles
  whenever they are read, as always.

Hashing a page of 256 KiB that is not in the cache takes 16 to 18 µs (xxh3-128 on one core of a
Xeon, 15 GB/s, as fast as it copies memory), and writing its header 3 µs. That is a twelfth of a
core for each GB/s of saves. So it is for a thread of its own (``validation``): a page that is not
hashed yet is used all the same, and merely not found again.

Slots that a copy of a dead process may still write to, and how long they rest.

A killed process leaves copies by devices under way. They write to the pages of the file, which the
driver holds for them, whoever has the file by then. Nothing tells when they end:

- The lock of the file says little. A dying process gives up its files in no order that one could
  rely on: its lock may go before the driver's handle, whose release ends the copies.
- Its process id says little more. The next owner may live in another container, which does not see
  it. And NVIDIA's driver ends a killed process' work in a thread of its own if it finds its locks
  taken (``nvidia_close_deferred`` in its open source), when the process is gone already.

Only slots that were invalid are in danger. A slot becomes invalid before a copy into it is
submitted, and valid after the copy's event has passed, so that no copy writes to a valid slot.
Copies by processors and disks are no danger either: a thread within one keeps the lock.

So slots that are found invalid rest: nothing is written to them for a while. They are few, those of
saves under way, of discards, and of pages that were not hashed yet. Slots never used do not rest.
A copy takes milliseconds and the end of a CUDA context seconds. An engine that has got VRAM for its
own cache on the same device has seen the other's context end, but it may be another device.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.file_lock import unlock
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import FormatError

from .memory_format import ENTRY_BYTES, BundleHeader, FileHeader, SlotHeader
from .slot_table import BundleNote, SlotTable, pack_note, parse_note

REST_S = 30.0
"""Time that slots rest from the moment the file's lock was had, seconds.

Long beside the end of a context, and mostly over when an engine that starts takes its first
request.
"""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LandedPage:
    """A page whose bytes are in its slot.

    Attributes:
        nbytes: size of the page.
        saved: time at which the scheduler knew it whole on every rank, nanoseconds since 1970.
    """

    slot: int
    key: PageKey
    nbytes: int
    saved: int


_open: weakref.WeakSet[LastingMemory] = weakref.WeakSet()


class LastingMemory:
    """The slots of a memory file that is open and locked (see ``opening``).

    Any thread may call ``validate``, ``hash_and_validate``, ``validate_bundle``, ``ticket`` and
    ``digest``. One thread calls the rest.

    Args:
        path: the file.
        lock: descriptor that holds its lock; closed with this.
        mapped: all of the file; closed with this.
        keep: leave the file there when this is closed.
        clock: monotonic seconds. The lock was had before this is made.

    Attributes:
        keep: as given; may be changed until this is closed.
        slot_bytes: size of a slot.
        adopted: pages from before, by slot.
        bundles: bundles from before, by their notes.
        resting: slots that were invalid when the file was taken over. Nothing may be written to
            them until they have rested.
    """

    pinned = False

    def __init__(
        self,
        path: Path,
        lock: int,
        mapped: mmap.mmap,
        header: FileHeader,
        *,
        keep: bool,
        clock: Callable[[], float],
    ) -> None:
        geometry = header.geometry
        self.path = path
        self.keep = keep
        self._fd = lock
        self._map = mapped
        self.slot_bytes = geometry.slot_bytes
        whole: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        end = geometry.slots_at + geometry.slots * geometry.slot_bytes
        self.view: NDArray[np.uint8] = whole[geometry.slots_at : end]
        table = whole[BLOCK : BLOCK + geometry.slots * ENTRY_BYTES]
        self._table = SlotTable(table, header.nonce, geometry.slot_bytes)
        found, torn = self._table.valid()
        if torn:
            logger.warning("%s: %d slots have torn headers and count as empty", path, len(torn))
            self._table.invalidate(torn)
        self.adopted: Mapping[int, SlotHeader] = found
        self._clock = clock
        self._rested_at = clock() + REST_S
        self.resting = frozenset(self._table.invalid())
        self.bundles = self._find_bundles()
        # A slot's bytes have one number, and get another before they change.
        self._tickets: NDArray[np.uint64] = np.zeros(geometry.slots, np.uint64)
        self._changing = threading.Lock()
        _open.add(self)

    def _find_bundles(self) -> list[BundleNote]:
        """Notes of whole bundles. What is left of others is made invalid; that is nothing odd."""
        found, stray = self._table.bundles()
        notes = list[BundleNote]()
        for header, slots in found:
            try:
                notes.append(self._read_note(header, slots))
            except FormatError as error:
                logger.warning("%s: a bundle of %d slots is left: %s", self.path, len(slots), error)
                stray += slots
        self._table.invalidate(stray)
        return notes

    def _read_note(self, header: BundleHeader, slots: Sequence[int]) -> BundleNote:
        start = slots[0] * self.slot_bytes
        packed = self.view[start : start + header.note_bytes].tobytes()
        if xxhash.xxh3_128_digest(packed) != header.digest:
            raise FormatError("its note is damaged")
        note = parse_note(packed, self.slot_bytes)
        if note.slots[0] != slots[0] or sorted(note.slots) != sorted(slots):
            raise FormatError("its note is of other slots")
        return note

    def rest_s(self) -> float:
        """Seconds until no slot rests any more."""
        return max(0.0, self._rested_at - self._clock()) if self.resting else 0.0

    # -- headers ------------------------------------------------------------------

    def valid(self, slot: int) -> SlotHeader | None:
        """The page in a slot; None if the slot is not valid."""
        with self._changing, suppress(FormatError):
            return self._table.read(slot) if self._fd >= 0 else None
        return None

    def invalidate(self, slots: Sequence[int]) -> None:
        """Make slots invalid: their bytes are about to change, or must not be found again."""
        if not len(slots) or self._fd < 0:
            return
        with self._changing:
            self._tickets[list(slots)] += np.uint64(1)
            self._table.invalidate(slots)

    def clear(self) -> None:
        """Make all slots invalid: nobody must find their pages again."""
        if self._fd < 0:
            return
        with self._changing:
            self._tickets += np.uint64(1)
            self._table.invalidate_all()

    def ticket(self, slot: int) -> int:
        """Number of the bytes that a slot holds now; another one from the next ``invalidate`` on.
        To be taken by the worker's thread when they have landed."""
        return int(self._tickets[slot])

    def validate(self, slot: int, ticket: int, header: SlotHeader) -> bool:
        """Make a slot valid, if it still holds the bytes of the ticket.

        Returns:
            True if it is valid now.

        Raises:
            ValueError: the key or the page is longer than a header can say.
        """
        with self._changing:
            if self._fd < 0 or self._tickets[slot] != ticket:
                return False
            self._table.validate(slot, header)
        return True

    def hash_and_validate(self, page: LandedPage, ticket: int) -> None:
        """Hash a page and make its slot valid, unless the slot's bytes have changed since the
        ticket was taken.

        Raises:
            ValueError: the key or the page is longer than a header can say.
        """
        if self.ticket(page.slot) == ticket:
            digest = self.digest(page.slot, page.nbytes)
            header = SlotHeader(page.key, page.nbytes, page.saved, digest)
            self.validate(page.slot, ticket, header)

    def validate_bundle(self, note: BundleNote, tickets: Sequence[int]) -> bool:
        """Write a bundle's note and make its slots valid, if they still hold the bytes of the
        tickets. Before the slots are anybody else's.

        Args:
            tickets: a ticket for each slot of the note.

        Returns:
            True if they are valid now.

        Raises:
            ValueError: a key is longer than a note can say, or there are no pages.
        """
        packed = pack_note(note)
        newest = max(page.saved for page in note.pages)
        digest = xxhash.xxh3_128_digest(packed)
        header = BundleHeader(len(packed), len(note.pages), len(note.slots), newest, digest)
        slots = list(note.slots)
        with self._changing:
            if self._fd < 0 or self._tickets[slots].tolist() != list(tickets):
                return False
            start = slots[0] * self.slot_bytes
            self.view[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
            self._table.validate_bundle(slots, header)
        return True

    def digest(self, slot: int, nbytes: int) -> bytes:
        """xxh3-128 of the first bytes of a slot; releases the interpreter lock."""
        start = slot * self.slot_bytes
        return xxhash.xxh3_128_digest(self.view[start : start + nbytes].data)

    def check_adopted(self, threads: int) -> None:
        """Drop pages from before whose bytes are not those of their headers, and make their slots
        invalid. Reads all of them: at 15 GB/s a thread, until memory is no faster."""

        def good(slot: int) -> bool:
            page = self.adopted[slot]
            return self.digest(slot, page.nbytes) == page.digest

        with ThreadPoolExecutor(threads) as pool:
            fits = dict(zip(self.adopted, pool.map(good, self.adopted, chunksize=1), strict=True))
        bad = [slot for slot, fit in fits.items() if not fit]
        if bad:
            logger.error("%s: %d pages are bad; they are not taken over", self.path, len(bad))
            self.invalidate(bad)
            self.adopted = {slot: page for slot, page in self.adopted.items() if fits[slot]}

    # -- the end ------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory back, and delete the file unless it is to be kept. Idempotent.

        No copy by a device may be under way, and nothing may write to a view any more.
        """
        if self._fd < 0:
            return
        _open.discard(self)
        if not self.keep:
            with suppress(OSError):  # of a file that somebody else removed
                if os.fstat(self._fd).st_ino == self.path.lstat().st_ino:
                    self.path.unlink()
        with self._changing:
            # No copy of this process is under way. One of a process before may be.
            self._table.forget_invalid(self.resting if self.rest_s() else ())
            lock = self._let_go()
        unlock(lock)
        os.close(lock)

    def _let_go(self) -> int:
        """Give up the memory; give the descriptor of the lock."""
        lock, self._fd = self._fd, -1
        self.view = np.empty(0, np.uint8)
        self._table = SlotTable(np.empty(0, np.uint8), 0, 0)
        try:
            self._map.close()
        except BufferError:  # somebody still holds a view: unmapped with the last of them
            logger.debug("memory is closed while a view of it is alive")
        return lock

    def leave_to_parent(self) -> None:
        """Leave the file to the parent, in its child.

        A child that kept the descriptor would hold the lock beyond its parent's death.
        """
        self._changing = threading.Lock()  # perhaps held by a thread that is not here
        os.close(self._let_go())


def _in_child() -> None:
    for memory in list(_open):
        memory.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
