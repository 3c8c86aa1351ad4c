"""A long context in CPU memory is restored over several steps, and enters the prefix cache as it
arrives."""

from __future__ import annotations

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.pages import pieces, restores
from tiered_kv.messages import Orders
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

LONG = text(320, seed=3)
"""A prompt of twenty pages. Its last token is always computed."""
PAGES_A_STEP = 4


@pytest.fixture
def rig(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig on which the long context is only in CPU memory, while another request is decoding."""
    monkeypatch.setattr(restores, "WHOLE_PAGES", 8)
    monkeypatch.setattr(restores, "PAGES_A_STEP", 8)
    monkeypatch.setattr(pieces, "PAGES_A_STEP", PAGES_A_STEP)
    made = make_rig(blocks=100)
    assert made.ask("first", LONG) == expected(LONG, 4)
    made.fill()
    made.add("other", text(40, seed=8), max_tokens=60)
    for _ in range(3):
        made.step()
    return made


def finish(rig: Rig) -> None:
    rig.run()
    assert rig.outputs["other"] == expected(rig.prompts["other"], 60)
    rig.wait_for_worker()
    rig.step()
    rig.check_clean()


@pytest.mark.parametrize("tokens", [False, True], ids=["pages", "tokens"])
def test_no_step_orders_more_than_its_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    if tokens:
        monkeypatch.setattr(pieces, "PAGES_A_STEP", 512)
        monkeypatch.setattr(pieces, "TOKENS_A_STEP", PAGES_A_STEP * 16 + 15)
    rig.step()  # the limits hold from the next step on
    rig.add("again", LONG)
    start, ordered = rig.worker_half.start, list[int]()

    def started(orders: Orders) -> None:
        ordered.append(sum(len(load.blocks) for load in orders.loads))
        start(orders)

    rig.worker_half.start = started
    while not rig.outputs["again"]:
        rig.step()
        rig.wait_for_worker()
    assert [pages for pages in ordered if pages] == [PAGES_A_STEP] * 5
    assert len(rig.outputs["other"]) > 5, "it did not wait"
    finish(rig)
    assert rig.outputs["again"] == expected(LONG, 4)
    assert rig.count("prompt_tokens_cpu") == 319
    assert rig.count("restores_in_pieces") == 0, "CPU memory had all pages"


def test_another_request_finds_pages_that_have_arrived(rig: Rig) -> None:
    faulty = rig.inject(FaultyTransfer)
    rig.add("again", LONG)
    rig.step()
    rig.wait_for_worker()
    faulty.hold(Direction.LOAD)  # copies ordered from here on do not arrive
    for _ in range(3):
        rig.step()
    assert not rig.outputs["again"]

    rig.add("twin", LONG[:200])
    rig.step()

    turn = rig.turn("twin")
    assert 0 < turn.source.vram_tokens <= 3 * PAGES_A_STEP * 16, "no page that has not arrived"
    faulty.let_go()
    finish(rig)
    assert rig.outputs["twin"] == expected(LONG[:200], 4)
    assert rig.outputs["again"] == expected(LONG, 4)


def test_pages_of_a_failed_piece_and_later_ones_are_computed(rig: Rig) -> None:
    faulty = rig.inject(FaultyTransfer)
    rig.add("again", LONG)
    rig.step()
    faulty.fail_next(Direction.LOAD, {1})
    finish(rig)
    assert faulty.struck == 1
    assert rig.outputs["again"] == expected(LONG, 4)
    assert rig.ask("later", LONG) == expected(LONG, 4)


def test_a_page_evicted_before_its_piece_is_ordered_is_computed(rig: Rig) -> None:
    rig.add("again", LONG)
    rig.step()
    gone = rig.turn("again").page_keys()[15]
    rig.index.forget(gone)
    finish(rig)
    assert rig.outputs["again"] == expected(LONG, 4)
    assert rig.count("restore_failures") == 0, "it was never ordered"


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_an_abort_or_reset_meanwhile_leaves_nothing(rig: Rig, end: str) -> None:
    rig.add("again", LONG)
    rig.step()
    rig.step()
    assert len(rig.pages.pieces) == 1
    if end == "abort":
        rig.abort("again")
    else:
        rig.half.reset()
    assert len(rig.pages.pieces) == 0
    finish(rig)
    assert rig.ask("once more", LONG) == expected(LONG, 4)


def test_a_preempted_turn_counts_only_pages_that_arrived_again(rig: Rig) -> None:
    """At the turn's first admission, VRAM had half of its prompt. After its preemption, VRAM has
    nothing. Another request then finds only the pages that have been restored again."""
    half = LONG[:160]
    rig.add("half", half, max_tokens=40)
    while not rig.outputs["half"]:
        rig.step()
    rig.add("again", LONG, max_tokens=30)
    while len(rig.outputs["again"]) < 2:
        rig.step()
        rig.wait_for_worker()
    assert rig.turn("again").source.vram_tokens >= 160
    rig.abort("half")
    faulty = rig.inject(FaultyTransfer)

    again = next(one for one in rig.scheduler.running if one.request_id == "again")
    rig.scheduler.running.remove(again)
    rig.scheduler._preempt_request(again, rig.now)  # noqa: SLF001
    rig.pool.evict_blocks(set(range(rig.options.blocks)))
    while not len(rig.pages.pieces):
        rig.step()
    rig.wait_for_worker()
    faulty.hold(Direction.LOAD)
    rig.step()
    rig.add("twin", LONG[:300])
    rig.step()

    assert 0 < rig.turn("twin").source.vram_tokens <= 2 * PAGES_A_STEP * 16
    faulty.let_go()
    finish(rig)
    assert rig.outputs["twin"] == expected(LONG[:300], 4)
    assert rig.outputs["again"] == expected(LONG, 30)
