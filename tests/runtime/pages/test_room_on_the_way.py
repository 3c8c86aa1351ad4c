"""Pages being promoted from SSD, or demoted to it, occupy only a part of CPU memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.between_turns.waiting import CONTEXT, JOB, LONG, pinned, reader, waiting_rig
from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import tiers
from tiered_kv.keys import PageKey
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.stores import SSD


def keys(count: int) -> list[PageKey]:
    return [PageKey(n.to_bytes(48, "little")) for n in range(count)]


@pytest.mark.parametrize(("slots", "room"), [(64, 32), (3, 1), (2, 1), (1, 1)])
def test_promotions_that_are_due_take_at_most_half_the_slots(
    make_rig: MakeRig, tmp_path: Path, slots: int, room: int
) -> None:
    rig = make_rig(extra=tiers(tmp_path, slots=slots))
    tier, pages = rig.tiers[SSD], keys(100)
    rig.pages.book.stores[SSD].index.add(pages)
    assert rig.index.num_slots == slots
    assert rig.pages.promotions.promote_ahead(pages, due=rig.now)
    (order,) = tier.take().promotes
    assert list(order.keys) == pages[:room]


def test_slots_that_other_turns_wait_for_are_left_to_them(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(extra=tiers(tmp_path, slots=64))
    rig.ask("first", CONTEXT)
    rig.wait_for_worker()
    tier, index = rig.tiers[SSD], rig.index
    rig.pages.book.stores[SSD].index.add(pages := keys(100))
    mine = list(index.least_valuable(64))
    assert len(mine) == 21
    index.clear()
    rig.pages.book.stores[SSD].index.add(mine)
    rig.fill()
    rig.add("again", CONTEXT)
    assert rig.half.match("again", 0) == (None, False)
    assert rig.turn("again").tiers.keys
    coming = len(rig.turn("again").tiers.keys)
    tier.take()
    assert rig.pages.promotions.promote_ahead(pages, due=rig.now)
    (order,) = tier.take().promotes
    assert len(order.keys) == 32 - coming


@pytest.mark.parametrize(("taken", "goes_down"), [(31, False), (32, True), (33, True)])
def test_pages_are_demoted_once_half_the_slots_are_taken(
    make_rig: MakeRig, tmp_path: Path, taken: int, goes_down: bool
) -> None:
    rig = make_rig(extra=tiers(tmp_path, slots=64))
    pages = keys(taken)
    rig.index.commit_all(pages, rig.index.reserve_all(pages))
    rig.tiers[SSD].demote_ahead()
    assert any(rig.tiers[SSD].outboxes) is goes_down


def test_a_busy_engine_promotes_a_context_when_it_is_due(make_rig: MakeRig, tmp_path: Path) -> None:
    """On an engine that is never idle, a context on SSD is promoted when its job is expected back,
    a minute after its turn, and not before."""
    rig = waiting_rig(make_rig, tmp_path)
    rig.add("busy", text(20, seed=9), max_tokens=400)
    rig.add("t1", CONTEXT, params=JOB)
    while "t1" not in rig.finished:
        rig.step()
    reader(rig).says("t1", LONG)
    for _ in range(4):
        rig.step()
        rig.wait_for_worker()
    assert pinned(rig) == 0
    assert len(rig.pages.book.stores[SSD].index) == 21
    rig.index.clear()
    for wait_s, ordered in ((59.0, 0), (1.5, 21)):
        rig.now += wait_s
        for _ in range(16):
            rig.step()
        assert rig.count("pages_promoted_ahead") == ordered
    assert "busy" not in rig.finished
    rig.abort("busy")
    rig.run()
