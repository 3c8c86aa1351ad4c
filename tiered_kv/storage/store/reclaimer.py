"""Reclaiming of room: the choice of the next segment to die, and its death.

Room comes from deleting whole segments; the store's owner decides which of their pages are
worth writing once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.storage.disk.aligned import aligned_bytes
from tiered_kv.storage.segment.format import MIN_PAGES
from tiered_kv.storage.segment.packing import PageToWrite

from .capacity import Capacity, Outlook
from .catalogue import Catalogue, Segment
from .options import StoreContext
from .page_reader import PageReader
from .page_writer import PageWriter

_MOVE_BYTES = 8 << 20


class Reclaimer:
    """Makes room in one store."""

    def __init__(
        self,
        context: StoreContext,
        catalogue: Catalogue,
        capacity: Capacity,
        getter: PageReader,
        putter: PageWriter,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._capacity = capacity
        self._reader = getter
        self._writer = putter

    def proposal(self) -> Proposal | None:
        """See ``SegmentStore.proposal``."""
        victim = self._victim()
        if victim is None:
            return None
        return Proposal(victim.number, tuple(place.key for place in victim.places()))

    def _is_short(self, outlook: Outlook, left: int) -> bool:
        segment = outlook.segment
        enough = 2 * segment if outlook.share >= 8 * segment else segment
        if outlook.owed >= enough:
            # Others have what is due to this store, and are told to give way: it gives way
            # itself only when it can write nothing at all.
            return outlook.blocked and left < segment // MIN_PAGES
        return outlook.room // segment * segment + left < enough  # only whole segments are of use

    def _victim(self) -> Segment | None:
        """Choose the segment to die; None if there is room.

        It is the one with the fewest live bytes if more than half of it is dead, else the
        oldest. The active one goes only if it is full, and there is no other.
        """
        outlook, active = self._capacity.outlook(), self._catalogue.active
        left = active.writer.room if active is not None and active.writer is not None else 0
        if not self._is_short(outlook, left):
            return None
        sealed = [s for s in self._catalogue.segments.values() if s.writer is None]
        if not sealed:
            return active if left < outlook.segment // MIN_PAGES else None
        emptiest = min(sealed, key=lambda segment: segment.live_bytes)
        return emptiest if 2 * emptiest.live_bytes < emptiest.end else sealed[0]

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> list[PageKey]:
        """See ``SegmentStore.reclaim``."""
        victim = self._catalogue.segments.get(segment)
        if victim is None:
            return []
        victim.writer = None  # survivors go elsewhere
        keys = [place.key for place in victim.places()]
        surviving = set(survivors)
        moving = [key for key in keys if key in surviving]
        per_batch = max(1, _MOVE_BYTES // self._context.options.page_format.page_bytes)
        for start in range(0, len(moving), per_batch):
            self._move(moving[start : start + per_batch])
        self._catalogue.delete(victim)
        return [key for key in keys if key not in self._catalogue.pages]

    def _move(self, keys: Sequence[PageKey]) -> None:
        """Write pages once more, with the codec of today; those that are damaged are dropped."""
        written = [self._catalogue.pages[key].place.written for key in keys]
        page_bytes = self._context.options.page_format.page_bytes
        memory = aligned_bytes(len(keys) * page_bytes)[: len(keys) * page_bytes]
        pages = memory.reshape(len(keys), page_bytes)
        bad = self._reader.get(list(zip(keys, pages, strict=True)))
        items = [
            PageToWrite(i, key, pages[i], written[i]) for i, key in enumerate(keys) if i not in bad
        ]
        self._writer.append(items, while_reclaiming=True)
