"""Pages that all ranks have from before.

A page of the index has one slot on every rank, and one save. Ranks die at different moments, so
that one may hold a page that another has just overwritten, or holds from an earlier save. A save
that failed on one rank may have left nonsense on the others, which computed with what that one
gave them. So a page counts only where every rank has the same key in the same slot by the same
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .memory_format import SlotHeader


def agreed(ranks: Sequence[Mapping[int, SlotHeader]]) -> dict[int, SlotHeader]:
    """Pages by slot that every rank has, the one saved longest ago first, each key once.

    Args:
        ranks: valid pages by slot, of every rank of the engine.

    Returns:
        The first rank's headers. Of two slots with one key, the one that was saved last.
    """
    if not ranks:
        return {}
    first, *others = ranks
    shared = {
        slot: page
        for slot, page in first.items()
        if all(_same(page, other.get(slot)) for other in others)
    }
    newest = {
        page.key: slot for slot, page in sorted(shared.items(), key=lambda it: (it[1].saved, it[0]))
    }
    return {
        slot: shared[slot]
        for slot in sorted(newest.values(), key=lambda slot: (shared[slot].saved, slot))
    }


def _same(one: SlotHeader, other: SlotHeader | None) -> bool:
    return other is not None and (one.key, one.saved, one.tokens) == (
        other.key,
        other.saved,
        other.tokens,
    )
