"""Pages of CPU memory on their way to a store: from slots of their own, or from bundles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.base import CodedPage
from tiered_kv.keys import PageKey

from .base import PageStore

ColdSource: TypeAlias = Callable[[PageKey, int], CodedPage | None]
"""Gives a compressed page by its key and place; None if it is not there, or damaged."""


def put_pages(
    store: PageStore,
    pages: Sequence[tuple[PageKey, int]],
    slots: NDArray[np.uint8],
    cold_page: ColdSource,
) -> tuple[frozenset[int], int]:
    """Store pages, compressed ones as they are where the store can take them.

    Args:
        pages: their keys and places: slots, or below 0 places in bundles.
        slots: the CPU pool's slots, uint8 ``[num_slots, page_bytes]``.

    Returns:
        Indices of those that are not stored; the number of pages that the store was given.
    """
    raw = [(i, key, slot) for i, (key, slot) in enumerate(pages) if slot >= 0]
    places = [(i, key, slot) for i, (key, slot) in enumerate(pages) if slot < 0]
    failed = set[int]()
    if raw:
        bad = store.put([(key, slots[slot]) for _, key, slot in raw])
        failed.update(raw[i][0] for i in bad)
    found = [(i, key, cold_page(key, place)) for i, key, place in places]
    cold = [(i, key, coded) for i, key, coded in found if coded is not None]
    failed.update(i for i, _, coded in found if coded is None)
    if cold:
        bad = store.put_coded([(key, coded) for _, key, coded in cold])
        failed.update(cold[i][0] for i in bad)
    return frozenset(failed), len(raw) + len(cold)
