"""The last write: pages that go down while the engine is ending, as many as the time allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tiered_kv.keys import PageKey

logger = logging.getLogger(__name__)

LEAST_BYTES = 8 << 20
"""Smallest write, bytes. The end may be late by the time it takes."""

Put: TypeAlias = Callable[[Sequence[tuple[PageKey, int]]], tuple[frozenset[int], int]]
"""Writes pages, given as key and place. Gives the indices of those that failed, and the number of
pages that the store was asked to take."""


def write_last(
    put: Put,
    last: Sequence[tuple[PageKey, int]],
    deadline: float,
    clock: Callable[[], float],
    most: int,
    page_bytes: int,
) -> int:
    """Write what the time allows; give the number of pages that are durable. Never raises.

    A group under way is not given up: each is as large as half of the time left has room for, at
    the speed of the one before.

    Args:
        last: pages as key and place, the most important first.
        deadline: on ``clock``.
        most: pages of a group.
    """
    least = min(most, max(1, LEAST_BYTES // page_bytes))
    written = start = 0
    step = least
    try:
        while start < len(last) and (began := clock()) < deadline:
            group = last[start : start + step]
            start += len(group)
            failed, asked = put(group)
            written += len(group) - len(failed)
            if not asked:  # their bundles are gone, which says nothing of the store
                continue
            if len(failed) == len(group):
                break
            now = clock()
            room = asked * (deadline - now) / (2 * max(now - began, 1e-6))
            step = max(least, int(min(room, most)))
    except Exception:
        logger.exception("the last write to a tier ended early")
    return written
