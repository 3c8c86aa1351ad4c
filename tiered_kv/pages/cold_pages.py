"""Cold pages: pages that CPU memory keeps compressed, in bundles.

A bundle is compressed in place. The records of its pages fill the first of the pages' own slots,
and its other slots become free. No slot ever has two owners, and starting a bundle needs no free
slot.

All code runs on the scheduler thread, like the index that owns these pages. Every method is O(1)
per page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Sequence, ValuesView
from dataclasses import dataclass

from tiered_kv.keys import PageKey

from .base import PageState

MISSING, BEING_COMPRESSED, COMPRESSED = (
    PageState.MISSING,
    PageState.BEING_COMPRESSED,
    PageState.COMPRESSED,
)


def cold_place(place: int) -> int:
    """Convert the first slot of a bundle to the negative place of its pages, or the place back to
    the slot."""
    return -1 - place


@dataclass(slots=True, eq=False)
class Bundle:
    """Pages that are compressed together.

    Attributes:
        slots: slots of the bundle, in the order of its records.
        keys: pages of the bundle that are still needed.
        state: state of these pages: BEING_COMPRESSED until the records are complete on every rank,
            then COMPRESSED.
        readers: number of copies in flight that read pages of the bundle. The slots are not freed
            until these copies finish.
    """

    slots: list[int]
    keys: dict[PageKey, None]
    state: PageState = BEING_COMPRESSED
    readers: int = 0


class ColdPages:
    """The pages of an index that are compressed or being compressed, and their bundles.

    Attributes:
        num_slots: number of slots of all bundles.
        readable: the compressed pages.
    """

    def __init__(self) -> None:
        self._bundles: dict[int, Bundle] = {}  # by first slot
        self._of: dict[PageKey, Bundle] = {}
        self.num_slots = 0
        self.readable: set[PageKey] = set()

    @property
    def compressed(self) -> int:
        """Number of compressed pages."""
        return len(self.readable)

    @property
    def being_compressed(self) -> int:
        """Number of pages that are being compressed, which cannot be read for some milliseconds."""
        return len(self._of) - self.compressed

    @property
    def pages(self) -> KeysView[PageKey]:
        """Every page that is compressed or being compressed."""
        return self._of.keys()

    @property
    def bundles(self) -> ValuesView[Bundle]:
        """All bundles."""
        return self._bundles.values()

    @property
    def slots(self) -> list[int]:
        """Return the slots of all bundles."""
        return [slot for bundle in self._bundles.values() for slot in bundle.slots]

    def state(self, key: PageKey) -> PageState:
        """Return the state of a page; MISSING if it is in no bundle."""
        bundle = self._of.get(key)
        return bundle.state if bundle is not None else MISSING

    def place(self, key: PageKey) -> int | None:
        """Return the place of a compressed page; None for any other page."""
        bundle = self._of.get(key)
        if bundle is None or bundle.state is not COMPRESSED:
            return None
        return cold_place(bundle.slots[0])

    def with_mates(self, keys: Iterable[PageKey]) -> dict[PageKey, None]:
        """Return the pages, and all pages of their bundles, which are evicted together."""
        found = dict.fromkeys(keys)
        for bundle in set(map(self._of.get, found)):
            if bundle is not None:
                found |= bundle.keys
        return found

    def begin(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Add a bundle of pages that are about to be compressed in their slots."""
        bundle = Bundle(list(slots), dict.fromkeys(keys))
        self._bundles[slots[0]] = bundle
        self.num_slots += len(slots)
        self._of.update(dict.fromkeys(keys, bundle))

    def finish(self, first_slot: int, kept: int) -> tuple[Sequence[PageKey], list[int]]:
        """Make the pages of a bundle readable after every rank has compressed them.

        Args:
            first_slot: first slot of the bundle.
            kept: number of slots that the records fill; 0 if the pages are lost.

        Returns:
            The lost pages, and the slots that have become free.

        Raises:
            ValueError: no bundle with this first slot is being compressed.
        """
        bundle = self._bundles.get(first_slot)
        if bundle is None or bundle.state is COMPRESSED:
            raise ValueError("a report arrived for a bundle that was not being compressed")
        if not kept or not bundle.keys:
            return tuple(bundle.keys), self.drop(bundle)
        bundle.state = COMPRESSED
        self.readable.update(bundle.keys)
        free = bundle.slots[kept:]
        del bundle.slots[kept:]
        self.num_slots -= len(free)
        return (), free

    def acquire(self, key: PageKey) -> int | None:
        """Return the ``place`` of a compressed page, and keep its bundle at that place until
        ``release``. Returns None for any other page."""
        place = self.place(key)
        if place is not None:
            self._of[key].readers += 1
        return place

    def acquire_all(self, keys: Sequence[PageKey]) -> list[int]:
        """Call ``acquire`` for each of these compressed pages, and return the places."""
        bundles = [*map(self._of.__getitem__, keys)]
        for bundle, copies in Counter(bundles).items():
            bundle.readers += copies
        return [cold_place(bundle.slots[0]) for bundle in bundles]

    def release(self, place: int, copies: int = 1) -> list[int]:
        """Finish copies from a bundle. Returns the slots that have become free.

        Raises:
            ValueError: fewer copies from this place are in flight.
        """
        bundle = self._bundles.get(cold_place(place))
        if bundle is None or bundle.readers < copies:
            raise ValueError("a cold page was released without being acquired")
        bundle.readers -= copies
        return [] if bundle.keys or bundle.readers else self.drop(bundle)

    def droppable(self, key: PageKey) -> Bundle | None:
        """Return the bundle of a page if the bundle may be dropped now: it is compressed, and no
        copy reads it. Otherwise return None. Raises KeyError for a page in no bundle."""
        bundle = self._of[key]
        return bundle if bundle.state is COMPRESSED and not bundle.readers else None

    def drop(self, bundle: Bundle) -> list[int]:
        """Forget a bundle and its pages. Returns the slots of the bundle, which become free."""
        self.readable.difference_update(bundle.keys)
        for key in bundle.keys:
            del self._of[key]
        bundle.keys.clear()
        del self._bundles[bundle.slots[0]]
        self.num_slots -= len(bundle.slots)
        return bundle.slots

    def forget(self, key: PageKey) -> list[int]:
        """Forget a page. Returns the slots that have become free: a bundle is dropped with its last
        page, once no copy reads or writes the bundle. Raises KeyError for a page in no bundle."""
        bundle = self._of.pop(key)
        del bundle.keys[key]
        self.readable.discard(key)
        if bundle.keys or bundle.readers or bundle.state is BEING_COMPRESSED:
            return []
        return self.drop(bundle)

    def check_integrity(self) -> None:
        """Raise AssertionError if the pages and the bundles are inconsistent."""
        bundles = self._bundles.values()
        assert {key: one for one in bundles for key in one.keys} == self._of, "pages misplaced"
        assert self.num_slots == sum(len(one.slots) for one in bundles), "slots miscounted"
        compressed = {key for key in self._of if self.state(key) is COMPRESSED}
        assert self.readable == compressed, "pages miscounted"
        assert all(one.readers >= 0 for one in bundles), "released too often"
