"""Pages are demoted before they are evicted, and not so many at a time that no page can be
evicted."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.lower_tiers.demotion import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_AHEAD,
    MOST_DEMOTING,
    LookAhead,
    last_flush,
    next_pause_s,
)
from tiered_kv.keys import PageKey


@pytest.mark.parametrize(
    ("slots", "tier_pages", "window"),
    [
        (1 << 20, None, MOST_AHEAD),
        (64, None, 48),
        (64, 20, 10),
        (1, None, 1),
        (64, 0, 1),
    ],
)
def test_the_window(slots: int, tier_pages: int | None, window: int) -> None:
    found = LookAhead.of(slots, tier_pages)
    assert found.window == window
    assert 1 <= found.most_demoting <= min(MOST_DEMOTING, window)


@pytest.mark.parametrize(
    ("free", "taken", "looked_at", "ahead", "due"),
    [
        (32, 100, 0, 0, True),
        (33, 100, 0, 0, False),  # more than half of the slots are free
        (0, 100, 95, 0, False),  # the pages were examined a moment ago
        (0, 100, 94, 0, True),
        (0, 100, 0, 100, False),  # as many pages were written as arrived
    ],
)
def test_when_pages_are_examined(
    free: int, taken: int, looked_at: int, ahead: int, due: bool
) -> None:
    look = LookAhead.of(64, None)
    found = look.due(free=free, num_slots=64, taken=taken, looked_at=looked_at, ahead=ahead)
    assert found is due


def test_pauses_grow_up_to_a_bound() -> None:
    pause_s, seen = FIRST_PAUSE_S, []
    while pause_s < LONGEST_PAUSE_S:
        pause_s = next_pause_s(pause_s)
        seen.append(pause_s)
    assert seen == [2, 4, 8, 16, 32, 60]
    assert next_pause_s(pause_s) == LONGEST_PAUSE_S


def test_the_last_flush_writes_the_newest_pages_first_and_each_once() -> None:
    old, new, stored = (PageKey(name) for name in (b"old", b"new", b"stored"))
    pages = [(old, 3), (stored, 1), (new, 4), (old, 2), (new, 5)]
    assert last_flush(pages, {stored}) == [(new, 5), (old, 2)]
