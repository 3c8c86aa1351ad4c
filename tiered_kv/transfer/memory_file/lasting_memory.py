"""Memory for the CPU pool's slots that outlives the process, and the headers of the slots.

Users must keep four rules, so that a page found under a key is always the page of that key:

- Slots are invalidated before anything writes to them, including device copies and compressors, and
  even if the write is then refused.
- A slot is validated once its bytes have landed, and are known to be right on every rank. A save
  may be reported as done even if its blocks were freed during the copy.
- A slot is validated with the ticket that it had when its bytes landed, so that a late validation
  does not apply to bytes written since. A ticket is a number that changes whenever the slot is
  invalidated.
- Adopted pages are checked before anything reads them (``check_adopted``). Pages of bundles are
  checked at every read, as always.

Hashing a page of 256 KiB that is not in the cache takes 16 to 18 µs (xxh3-128 on one core of a
Xeon, 15 GB/s, the speed of a memory copy), and writing its header 3 µs. That is a twelfth of a
core for each GB/s of saves. So hashing runs on a separate thread (``validation``). A page that is
not hashed yet is used normally, but is not found again by the next engine.

Quarantined slots: slots that a copy of a dead process may still write to.

A killed process may leave device copies in progress. They write to the pages of the file, which the
driver keeps pinned for them, even after another process has opened the file. There is no reliable
sign of their end:

- The lock of the file is not enough. A dying process closes its files in no reliable order: its
  lock may be released before the driver's handle, whose release ends the copies.
- The process id is not enough either. The next owner may run in another container, which cannot see
  the process. Moreover, NVIDIA's driver finishes a killed process's work in a separate thread if
  its locks are taken (``nvidia_close_deferred`` in its open source), after the process is gone.

Only slots that were invalid are in danger. A slot is invalidated before a copy into it is
submitted, and validated after the copy's event has passed, so no copy writes to a valid slot.
Copies by CPUs and disks are no danger either: a thread in such a copy keeps the lock.

So slots that are found invalid are quarantined: nothing is written to them for a while. They are
few: slots of saves in progress, of discards, and of pages that were not hashed yet. Slots that were
never used are not quarantined. A copy takes milliseconds, and the end of a CUDA context seconds. An
engine that has allocated VRAM for its own cache on the same device has seen the other context end,
but the other context may have been on another device.
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
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import FormatError

from .memory_format import ENTRY_BYTES, BundleHeader, FileHeader, SlotHeader
from .slot_table import BundleNote, SlotTable, pack_note, parse_note

REST_S = 30.0
"""Duration of the quarantine of slots, which starts when the file is opened, seconds.

The quarantine is long compared to the time in which a CUDA context ends, and mostly over when a
starting engine receives its first request.
"""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LandedPage:
    """A page whose bytes are in its slot.

    Attributes:
        nbytes: size of the page, bytes.
        saved: time at which the page was known to be complete on every rank, nanoseconds since
            1970.
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
        lock: descriptor that holds the file's lock; closed with this object.
        mapped: mapping of the whole file; closed with this object.
        keep: True to keep the file when this object is closed.
        clock: monotonic seconds. The quarantine starts when this object is created, after the lock
            was acquired.

    Attributes:
        keep: True to keep the file when this object is closed. May be changed until then.
        slot_bytes: size of a slot, bytes.
        adopted: pages of previous engines, by slot.
        bundles: notes of bundles of previous engines.
        resting: quarantined slots, which were invalid when the file was opened. Nothing may be
            written to them until the quarantine ends.
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
            emptied = count(len(torn), "slot")
            logger.warning("%s: emptied %s with incomplete headers", path, emptied)
            self._table.invalidate(torn)
        self.adopted: Mapping[int, SlotHeader] = found
        self._clock = clock
        self._rested_at = clock() + REST_S
        self.resting = frozenset(self._table.invalid())
        self.bundles = self._find_bundles()
        # A slot's bytes have one ticket number, which changes before the bytes change.
        self._tickets: NDArray[np.uint64] = np.zeros(geometry.slots, np.uint64)
        self._changing = threading.Lock()
        _open.add(self)

    def _find_bundles(self) -> list[BundleNote]:
        """Return the notes of complete bundles. Slots of incomplete or unreadable bundles are
        invalidated. Incomplete bundles are expected after a kill, so only unreadable bundles are
        logged."""
        found, stray = self._table.bundles()
        notes = list[BundleNote]()
        for header, slots in found:
            try:
                notes.append(self._read_note(header, slots))
            except FormatError as error:
                lost = count(len(slots), "slot")
                logger.warning("%s: ignored a bundle of %s: %s", self.path, lost, error)
                stray += slots
        self._table.invalidate(stray)
        return notes

    def _read_note(self, header: BundleHeader, slots: Sequence[int]) -> BundleNote:
        start = slots[0] * self.slot_bytes
        packed = self.view[start : start + header.note_bytes].tobytes()
        if xxhash.xxh3_128_digest(packed) != header.digest:
            raise FormatError("the bundle's record is damaged")
        note = parse_note(packed, self.slot_bytes)
        if note.slots[0] != slots[0] or sorted(note.slots) != sorted(slots):
            raise FormatError("the bundle's record belongs to other slots")
        return note

    def rest_s(self) -> float:
        """Time until the quarantine ends, seconds; 0 without quarantined slots."""
        return max(0.0, self._rested_at - self._clock()) if self.resting else 0.0

    # -- headers ------------------------------------------------------------------

    def valid(self, slot: int) -> SlotHeader | None:
        """Return the header of a valid slot; None if the slot is not valid, its header is damaged,
        or the memory is closed."""
        with self._changing, suppress(FormatError):
            return self._table.read(slot) if self._fd >= 0 else None
        return None

    def invalidate(self, slots: Sequence[int]) -> None:
        """Invalidate slots whose bytes are about to change, or must not be found again. Does
        nothing once the memory is closed."""
        if not len(slots) or self._fd < 0:
            return
        with self._changing:
            self._tickets[list(slots)] += np.uint64(1)
            self._table.invalidate(slots)

    def clear(self) -> None:
        """Invalidate all slots, so that their pages are never found again."""
        if self._fd < 0:
            return
        with self._changing:
            self._tickets += np.uint64(1)
            self._table.invalidate_all()

    def ticket(self, slot: int) -> int:
        """Return the number of a slot's current bytes, which changes with the next ``invalidate``.
        The worker's thread must read the ticket when the bytes have landed."""
        return int(self._tickets[slot])

    def validate(self, slot: int, ticket: int, header: SlotHeader) -> bool:
        """Mark a slot as valid, if it still contains the bytes of the ticket.

        Returns:
            True if the slot was marked.

        Raises:
            ValueError: the key or the page is too long for a header.
        """
        with self._changing:
            if self._fd < 0 or self._tickets[slot] != ticket:
                return False
            self._table.validate(slot, header)
        return True

    def hash_and_validate(self, page: LandedPage, ticket: int) -> None:
        """Hash a page and mark its slot as valid, unless the slot's bytes have changed since the
        ticket was read.

        Raises:
            ValueError: the key or the page is too long for a header.
        """
        if self.ticket(page.slot) == ticket:
            digest = self.digest(page.slot, page.nbytes)
            header = SlotHeader(page.key, page.nbytes, page.saved, digest)
            self.validate(page.slot, ticket, header)

    def validate_bundle(self, note: BundleNote, tickets: Sequence[int]) -> bool:
        """Write a bundle's note and mark its slots as valid, if they still contain the bytes of the
        tickets. Must be called before the slots are reused.

        Args:
            tickets: a ticket for each slot of the note.

        Returns:
            True if the slots were marked.

        Raises:
            ValueError: a key is too long for a note, or there are no pages.
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
        """Return the xxh3-128 of the first bytes of a slot. Releases the interpreter lock."""
        start = slot * self.slot_bytes
        return xxhash.xxh3_128_digest(self.view[start : start + nbytes].data)

    def check_adopted(self, threads: int) -> None:
        """Drop adopted pages whose bytes do not match their headers, and invalidate their slots.
        Reads all adopted pages, at 15 GB/s per thread up to the memory bandwidth."""

        def good(slot: int) -> bool:
            page = self.adopted[slot]
            return self.digest(slot, page.nbytes) == page.digest

        with ThreadPoolExecutor(threads) as pool:
            fits = dict(zip(self.adopted, pool.map(good, self.adopted, chunksize=1), strict=True))
        bad = [slot for slot, fit in fits.items() if not fit]
        if bad:
            logger.error("%s: ignored %s", self.path, count(len(bad), "damaged page"))
            self.invalidate(bad)
            self.adopted = {slot: page for slot, page in self.adopted.items() if fits[slot]}

    # -- the end ------------------------------------------------------------------

    def close(self) -> None:
        """Release the memory, and delete the file unless it is to be kept. Idempotent.

        No device copy may be in progress, and nothing may write to a view any more.
        """
        if self._fd < 0:
            return
        _open.discard(self)
        if not self.keep:
            with suppress(OSError):  # the file may have been removed
                if os.fstat(self._fd).st_ino == self.path.lstat().st_ino:
                    self.path.unlink()
        with self._changing:
            # No copy of this process is in progress, but a copy of a previous process may be.
            self._table.forget_invalid(self.resting if self.rest_s() else ())
            lock = self._let_go()
        unlock(lock)
        os.close(lock)

    def _let_go(self) -> int:
        """Release the memory. Returns the descriptor of the lock."""
        lock, self._fd = self._fd, -1
        self.view = np.empty(0, np.uint8)
        self._table = SlotTable(np.empty(0, np.uint8), 0, 0)
        try:
            self._map.close()
        except BufferError:  # views still exist; unmapped with the last view
            logger.debug("memory was closed although a view of it still exists")
        return lock

    def leave_to_parent(self) -> None:
        """Leave the file to the parent process; called in a forked child.

        A child that kept the descriptor would hold the lock after its parent's death.
        """
        self._changing = threading.Lock()  # a thread of the parent may hold the old lock
        os.close(self._let_go())


def _in_child() -> None:
    for memory in list(_open):
        memory.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
