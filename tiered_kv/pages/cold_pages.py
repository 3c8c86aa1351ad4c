"""Cold pages: pages of CPU memory that are kept compressed, in bundles.

A bundle's pages are compressed together, in place: their records fill the first of their own
slots, and the others are free. So no slot is ever in two hands, and nothing is needed to begin.

Lives on the scheduler thread, like the index that owns it. Every method is O(1) per page.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence, ValuesView
from dataclasses import dataclass

from tiered_kv.keys import PageKey


def cold_place(place: int) -> int:
    """Place of a cold page, below 0, from the first slot of its bundle; and the other way."""
    return -1 - place


@dataclass(slots=True, eq=False)
class Bundle:
    """Pages that are compressed together.

    Attributes:
        slots: its slots, in the order of its records.
        keys: its pages that are still wanted.
        packed: False until its records are whole on every rank.
        readers: copies under way of pages in it; its slots stay put meanwhile.
    """

    slots: list[int]
    keys: dict[PageKey, None]
    packed: bool = False
    readers: int = 0


class ColdPages:
    """The bundles of an index, by page.

    Attributes:
        num_slots: slots of all bundles.
    """

    def __init__(self) -> None:
        self._bundles: dict[int, Bundle] = {}  # by first slot
        self._of: dict[PageKey, Bundle] = {}
        self._readable = 0
        self.num_slots = 0

    def __len__(self) -> int:
        """Number of pages that can be read."""
        return self._readable

    def __contains__(self, key: PageKey) -> bool:
        """True if the page can be read."""
        bundle = self._of.get(key)
        return bundle is not None and bundle.packed

    @property
    def pages(self) -> KeysView[PageKey]:
        """Every page that is cold, or about to be."""
        return self._of.keys()

    @property
    def bundles(self) -> ValuesView[Bundle]:
        """All bundles."""
        return self._bundles.values()

    @property
    def slots(self) -> list[int]:
        """Slots of all bundles."""
        return [slot for bundle in self._bundles.values() for slot in bundle.slots]

    def begin(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Take pages with their slots: they are about to be compressed."""
        bundle = Bundle(list(slots), dict.fromkeys(keys))
        self._bundles[slots[0]] = bundle
        self.num_slots += len(slots)
        self._of.update(dict.fromkeys(keys, bundle))

    def adopt(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Take over a bundle of an engine before."""
        self.begin(keys, slots)
        self.finish(slots[0], len(slots))

    def finish(self, first_slot: int, kept: int) -> tuple[Sequence[PageKey], list[int]]:
        """A bundle is compressed on every rank: it fills its first ``kept`` slots.

        Args:
            first_slot: first slot of the bundle.
            kept: 0 if its pages are lost.

        Returns:
            Pages that are lost; slots that are free.

        Raises:
            ValueError: no bundle that begins there is about to be compressed.
        """
        bundle = self._bundles.get(first_slot)
        if bundle is None or bundle.packed:
            raise ValueError("a bundle was packed that nobody began")
        if not kept or not bundle.keys:
            return tuple(bundle.keys), self.drop(bundle)
        bundle.packed = True
        self._readable += len(bundle.keys)
        free = bundle.slots[kept:]
        del bundle.slots[kept:]
        self.num_slots -= len(free)
        return (), free

    def first_slot(self, key: PageKey) -> int:
        """Return the first slot of a page's bundle.

        Raises:
            KeyError: the page is not cold.
        """
        return self._of[key].slots[0]

    def acquire(self, key: PageKey) -> int:
        """Keep a page's bundle in place until ``release``; gives its first slot.

        Raises:
            KeyError: the page is not cold.
        """
        bundle = self._of[key]
        bundle.readers += 1
        return bundle.slots[0]

    def release(self, first_slot: int) -> list[int]:
        """A copy from a bundle is over; gives slots that are free now.

        Raises:
            ValueError: none is under way.
        """
        bundle = self._bundles.get(first_slot)
        if bundle is None or not bundle.readers:
            raise ValueError("a cold page was released that nobody acquired")
        bundle.readers -= 1
        return [] if bundle.keys or bundle.readers else self.drop(bundle)

    def droppable(self, key: PageKey) -> Bundle | None:
        """The page's bundle, if it may be dropped now."""
        bundle = self._of[key]
        return bundle if bundle.packed and not bundle.readers else None

    def drop(self, bundle: Bundle) -> list[int]:
        """Forget a bundle; gives its slots."""
        self._readable -= bundle.packed * len(bundle.keys)
        for key in bundle.keys:
            del self._of[key]
        bundle.keys.clear()
        del self._bundles[bundle.slots[0]]
        self.num_slots -= len(bundle.slots)
        return bundle.slots

    def forget(self, key: PageKey) -> list[int]:
        """Forget a page; gives slots that are free now. A bundle goes with its last page, once
        nobody reads or writes it."""
        bundle = self._of.pop(key)
        del bundle.keys[key]
        self._readable -= bundle.packed
        if bundle.keys or bundle.readers or not bundle.packed:
            return []
        return self.drop(bundle)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages and bundles agree."""
        bundles = self._bundles.values()
        assert {key: one for one in bundles for key in one.keys} == self._of, "pages misplaced"
        assert self.num_slots == sum(len(one.slots) for one in bundles), "slots miscounted"
        assert self._readable == sum(len(one.keys) for one in bundles if one.packed)
        assert all(one.readers >= 0 for one in bundles), "released too often"
