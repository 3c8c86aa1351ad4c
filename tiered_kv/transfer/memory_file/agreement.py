"""Pages that all ranks have from before.

A page of the index has one slot on every rank, and one save. Ranks die at different moments, so
that one may hold a page that another has just overwritten, or holds from an earlier save. A save
that failed on one rank may have left nonsense on the others, which computed with what that one
gave them. So a page counts only where every rank has the same key in the same slot from the same
settlement.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedPages


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
