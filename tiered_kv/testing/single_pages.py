"""Calls of the page index for single pages, for tests. The runtime calls the index with all pages
of an order.
"""

from __future__ import annotations

from typing import Any

from tiered_kv.keys import PageKey


def reserve(index: Any, key: PageKey) -> int | None:
    """Call ``reserve_all`` for one page. Returns the slot; None if no slot is available."""
    slots: list[int] = index.reserve_all((key,))
    return slots[0] if slots else None


def commit(index: Any, key: PageKey, slot: int) -> bool:
    """Call ``commit_all`` for one page. Returns False if the page was forgotten in the meantime."""
    return bool(index.commit_all((key,), (slot,)))
