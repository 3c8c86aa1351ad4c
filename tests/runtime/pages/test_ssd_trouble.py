"""Regression tests: partial failures, ranks that disagree, and stores that are too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import ask_again, store, tiers
from tests.runtime.stories.test_tiers import CONTEXT, push_out
from tiered_kv.connectors.runtime.lower_tiers.demotion import MOST_DEMOTING
from tiered_kv.connectors.runtime.lower_tiers.reclaims import Reclaims
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reports, TierReport
from tiered_kv.orders import OrderReport
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.storage import ssd
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return make_rig(extra=tiers(tmp_path), max_batched_tokens=64)


def test_a_save_abandoned_in_flight_is_not_flushed(make_rig: MakeRig, tmp_path: Path) -> None:
    """A hook fails while a copy is slow. The copy's blocks are freed and overwritten by another
    request, and the copy then succeeds with the wrong bytes in its slots. These slots are not
    written to SSD when the engine closes."""
    first = make_rig(extra=tiers(tmp_path, slots=400), max_batched_tokens=512)
    backend = first.inject(FaultyTransfer)
    backend.hold(Direction.SAVE)
    first.add("first", CONTEXT)
    for _ in range(8):
        first.step()
    match = first.half.match

    def fails_once(*_: Any) -> Any:
        first.half.match = match
        raise RuntimeError("injected")

    first.half.match = fails_once
    for i in range(2):
        first.add(f"rival{i}", text(400, seed=5 + i))
    for _ in range(20):
        first.step()
    backend.let_go()
    first.run()
    assert first.count("hook_errors") == 1
    first.close()

    second = make_rig(extra=tiers(tmp_path, slots=400))
    ask_again(second)


def test_a_store_smaller_than_the_look_ahead_is_not_written_forever(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(extra=tiers(tmp_path, slots=6000, ssd_gib=0.012), max_batched_tokens=256)
    for i in range(180):
        rig.ask(f"r{i}", text(400, seed=100 + i))
        rig.now += 5
    for _ in range(400):
        if not rig.scheduler.has_requests():
            break
        rig.step()
        rig.wait_for_worker()
        rig.now += 5
    assert not rig.scheduler.has_requests(), "an idle engine continues to write"
    assert rig.count("ssd_pages_reclaimed") > 0
    assert rig.count("pages_demoted") <= rig.index.taken + MOST_DEMOTING
    rig.check_clean()


def test_ranks_agree_on_the_surviving_pages() -> None:
    """Two ranks propose to delete segments with the same pages, one after the other. The pages that
    were used survive on both ranks."""
    pages = TierIndex()
    reclaims = Reclaims(pages, 2, lambda _: 0.0, lambda: 0.0)
    keys = tuple(PageKey(bytes([n]) * 48) for n in range(20))
    pages.add(keys)
    pages.touch(keys[:6])
    for rank in (0, 1):
        reclaims.answer(rank, Proposal(7, keys))
    sent = reclaims.take()
    assert set(sent[0].survivors) == set(sent[1].survivors) == set(keys[:6])
    pages.touch(keys[6:8])
    reclaims.answer(0, Proposal(8, keys))
    assert set(reclaims.take()[0].survivors) == set(keys[6:8]), "a new round: both had asked"


def test_a_failed_reclaim_is_requested_again(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(extra=tiers(tmp_path, ssd_gib=0.004))
    target = store(rig)
    reclaim = target.reclaim

    def fails_once(*_: Any) -> Any:
        target.reclaim = reclaim
        raise MemoryError("injected")

    target.reclaim = fails_once
    for i in range(80):
        rig.ask(f"r{i}", text(400, seed=100 + i))
        rig.wait_for_worker()
        rig.now += 5
    assert rig.count("ssd_pages_reclaimed") > 0
    rig.check_clean()


def test_an_error_in_the_ssd_tier_leaks_no_block(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.tiers[SSD], "demote_ahead", broken)
    assert rig.ask("first", CONTEXT) == expected(CONTEXT, 4)
    rig.run()
    assert rig.count("hook_errors") > 0
    assert rig.pool.get_num_free_blocks() == rig.free_at_start


def test_a_proposal_from_before_a_reset_is_ignored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    io = rig.worker.worker_half.stores[SSD].io
    monkeypatch.setattr(io.store, "proposal", lambda: Proposal(1, (PageKey(b"k" * 48),)))
    io.reclaim(segment=0, survivors=())
    assert io.wait_idle(300)
    assert io.proposal is not None
    assert rig.scheduler.reset_prefix_cache()
    rig.step()
    rig.wait_for_worker()
    assert io.proposal is None


def test_a_disk_that_cannot_be_measured_is_still_used(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ssd, "measure_disk", full)
    rig = make_rig(extra=tiers(tmp_path), max_batched_tokens=64)
    rig.ask("first", CONTEXT)
    push_out(rig)
    ask_again(rig)
    assert rig.count("prompt_tokens_ssd") >= 256


def test_a_slow_spell_of_the_disk_is_forgotten(rig: Rig) -> None:
    """After a slow read, promotions seem slower than computing and are refused. A refused promotion
    measures nothing, so the estimated bandwidth recovers by itself."""
    rig.ask("first", CONTEXT)
    push_out(rig)
    rig.gaps.prefills.fit.observe(0, 1000, 1e-3)
    rig.pages.book.stores[SSD].bandwidth = 1000.0
    ask_again(rig)
    assert rig.count("promotions_refused") > 0
    assert rig.count("pages_promoted") == 0
    assert rig.pages.book.stores[SSD].bandwidth > 1000.0


@pytest.mark.parametrize("broken", ["the tier", "the eviction rule"])
def test_an_error_in_a_stores_report_leaks_no_block_of_a_save(
    broken: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.add("first", CONTEXT)
    while "first" not in rig.finished:
        rig.step()
    saves = rig.pages.saves.unsent.take()
    assert saves
    done = {save.order_id: OrderReport(1, frozenset(), 0, 0.0) for save in saves}
    news = TierReport((), Proposal(0, saves[0].keys), {}, 0)
    with monkeypatch.context() as patch:
        if broken == "the tier":
            patch.setattr(rig.tiers[SSD], "on_reports", lambda _: 1 / 0)
        else:
            patch.setattr(type(rig.pages.order), "return_chance", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rig.half.on_reports(Reports(done, {}, {SSD: {0: news}}))
    rig.run()
    rig.pins.release_all()
    assert rig.pages.book.in_flight == 0
    assert rig.free_blocks == rig.free_at_start
