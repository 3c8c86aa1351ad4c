"""Pages that all ranks have from before.

A page of the index has one slot on every rank, and one save. Ranks die at different moments, so
that one may hold a page that another has just overwritten, or holds from an earlier save. A save
that failed on one rank may have left nonsense on the others, which computed with what that one
gave them. So a page counts only where every rank has the same key in the same slot from the same
settlement. A compressed page counts where every rank has it in a bundle with the same first slot.
Of the slots of its order each rank fills as many as it needs, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedBundle, AdoptedPages


def agreed(ranks: Sequence[AdoptedPages]) -> dict[PageKey, int]:
    """Slots of the pages that every rank has, the one saved longest ago first. Of two slots with
    one key, the one that was saved last.

    Args:
        ranks: pages of every rank of the engine.
    """
    if not ranks:
        return {}
    first, *others = (set(zip(one.saved, one.slots, one.keys, strict=True)) for one in ranks)
    found = dict[PageKey, int]()
    for _, slot, key in sorted(first.intersection(*others)):
        found.pop(key, None)  # to the end, where the newest are
        found[key] = slot
    return found


def agreed_bundles(ranks: Sequence[AdoptedPages]) -> list[AdoptedBundle]:
    """Bundles of the pages that every rank has compressed, the one of the oldest pages first, with
    the slots of the rank that needs the most. Of two bundles with one page, the newer one has it;
    of a bundle and a slot with one page, the slot.

    Args:
        ranks: pages of every rank of the engine.
    """
    if not ranks:
        return []
    first, *others = ({one.slots[0]: one for one in rank.bundles} for rank in ranks)
    found = [
        bundle
        for place, one in first.items()
        if all(place in bundles for bundles in others)
        and (bundle := _common([one, *(bundles[place] for bundles in others)])) is not None
    ]
    found.sort(key=lambda bundle: max(bundle.saved))
    seen, kept = set(agreed(ranks)), list[AdoptedBundle]()
    for bundle in reversed(found):
        pages = [
            pair for pair in zip(bundle.keys, bundle.saved, strict=True) if pair[0] not in seen
        ]
        if pages:
            keys, saved = zip(*pages, strict=True)
            kept.append(AdoptedBundle(bundle.slots, keys, saved))
            seen.update(keys)
    return kept[::-1]


def _common(ranks: Sequence[AdoptedBundle]) -> AdoptedBundle | None:
    """Common pages of bundles that begin in one slot, one of each rank; None if there are none, or
    if the bundles are not of one order."""
    slots = max((one.slots for one in ranks), key=len)
    if any(slots[: len(one.slots)] != one.slots for one in ranks):
        return None
    first, *others = (dict(zip(one.keys, one.saved, strict=True)) for one in ranks)
    pages = [pair for pair in first.items() if all(one.get(pair[0]) == pair[1] for one in others)]
    if not pages:
        return None
    keys, saved = zip(*pages, strict=True)
    return AdoptedBundle(slots, keys, saved)
