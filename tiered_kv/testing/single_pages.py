"""The page index one page at a time: the product moves whole orders, tests tell of pages."""

from __future__ import annotations

from enum import Enum
from typing import Any

from tiered_kv.keys import PageKey


class PageState(Enum):
    """State of a page that is not absent."""

    SAVING = "saving"
    CPU = "cpu"


def state(index: Any, key: PageKey) -> PageState | None:
    """State of a page; None if it is absent."""
    if index.readable(key):
        return PageState.CPU
    return PageState.SAVING if index.known(key) else None


def reserve(index: Any, key: PageKey) -> int | None:
    """``reserve_all`` for one page; None when no slot can be had."""
    slots: list[int] = index.reserve_all((key,))
    return slots[0] if slots else None


def commit(index: Any, key: PageKey, slot: int) -> bool:
    """``commit_all`` for one page; False if it was forgotten meanwhile."""
    arrived: int = index.commit_all((key,), (slot,))
    return arrived == 1
