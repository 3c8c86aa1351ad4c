"""Calls of the page index for single pages. The runtime uses whole orders, but tests use single
pages.
"""

from __future__ import annotations

from typing import Any

from tiered_kv.keys import PageKey


def reserve(index: Any, key: PageKey) -> int | None:
    """``reserve_all`` for one page; None if no slot is available."""
    slots: list[int] = index.reserve_all((key,))
    return slots[0] if slots else None


def commit(index: Any, key: PageKey, slot: int) -> bool:
    """``commit_all`` for one page; False if the page was forgotten in the meantime."""
    return bool(index.commit_all((key,), (slot,)))
