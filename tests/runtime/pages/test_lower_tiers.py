"""Pages are demoted before they are evicted, and promoted when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.stories.test_tiers import CONTEXT, push_out
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.demotion import FIRST_PAUSE_S
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import LowerTier
from tiered_kv.connectors.runtime.pages import promotions
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Reports, StoredPages
from tiered_kv.orders import DemoteOrder, OrderId
from tiered_kv.pages.order_book import Settled
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.tiers import TierSpec

PAGE = 16 * CELL


def tiers(path: Path, *, slots: int = 64, ssd_gib: float = 0.02) -> dict[str, Any]:
    """Return settings for ``slots`` slots in CPU memory, and for pages on SSD under ``path``."""
    return {
        "cpu_gib": (slots * PAGE + 1) / (1 << 30),
        "ssd_path": str(path / "ssd"),
        "ssd_gib": ssd_gib,
        "codec": "raw",
    }


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return make_rig(extra=tiers(tmp_path), max_batched_tokens=64)


def store(rig: Rig) -> Any:
    return rig.worker.worker_half.stores[SSD].io.store


def ask_again(rig: Rig, name: str = "again") -> None:
    assert rig.ask(name, CONTEXT) == expected(CONTEXT, 4)


def test_pages_in_cpu_memory_are_not_read_from_ssd(rig: Rig) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    ask_again(rig, "second")
    promoted = rig.count("pages_promoted")
    assert rig.pool.reset_prefix_cache()
    ask_again(rig, "third")
    assert rig.count("prompt_tokens_cpu") == 2 * 319
    assert rig.count("pages_promoted") == promoted
    rig.check_clean()


def test_pages_in_vram_are_not_read_from_ssd(rig: Rig) -> None:
    rig.policy = Always(Decision(Tier.STORE))
    rig.ask("first", CONTEXT, params={"job_id": "j"})
    assert len(rig.pages.book.stores[SSD].index) == 21
    rig.index.clear()
    ask_again(rig)
    assert rig.count("pages_promoted") == 0
    assert rig.count("prompt_tokens_vram") >= 304


def test_the_contents_are_reported_before_the_first_query(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """vLLM exports gauges only during steps, so an engine runs one step right after its start to
    report what SSD contains."""
    first = make_rig(extra=tiers(tmp_path, slots=200))
    first.ask("first", CONTEXT)
    first.close()

    second = make_rig(extra=tiers(tmp_path, slots=200))
    assert second.scheduler.has_requests(), "or the engine would sleep"
    second.step()
    assert not second.scheduler.has_requests(), "one step is enough"
    told = second.last_stats.kv_connector_stats
    assert told["ssd_pages"] == len(store(second)) >= 20
    assert told["ssd_bytes"] == store(second).stored_bytes > 0
    assert told["cpu_slots"] == 200
    second.step()
    assert second.last_stats.kv_connector_stats is None, "nothing new"


def test_the_last_flush_is_made_though_copies_fail_at_the_end(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_rig(extra=tiers(tmp_path, slots=200))
    first.ask("first", CONTEXT)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(first.worker.worker_half.backend, "drain", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        first.close()

    second = make_rig(extra=tiers(tmp_path, slots=200))
    ask_again(second)
    assert second.count("prompt_tokens_ssd") >= 304
    second.check_clean()


def test_an_engine_with_other_weights_finds_nothing(make_rig: MakeRig, tmp_path: Path) -> None:
    first = make_rig(extra=tiers(tmp_path))
    first.ask("first", CONTEXT)
    first.close()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"retrained")

    second = make_rig(extra=tiers(tmp_path))
    assert len(store(second)) == 0
    ask_again(second)
    assert second.count("prompt_tokens_ssd") == 0


@dataclass
class Gate:
    """Blocks the store's reads until ``open`` is set."""

    open: threading.Event
    asked: threading.Event


@pytest.fixture
def gate(rig: Rig) -> Iterator[Gate]:
    """Put the context on SSD only, and block the store's reads."""
    rig.ask("first", CONTEXT)
    push_out(rig)
    made = Gate(threading.Event(), threading.Event())
    target = store(rig)
    read: Callable[[Sequence[Any]], frozenset[int]] = target.get

    def slow(pages: Sequence[Any]) -> frozenset[int]:
        made.asked.set()
        assert made.open.wait(300)
        return read(pages)

    target.get = slow
    yield made
    made.open.set()


def test_a_turn_that_waits_for_its_pages_delays_no_other(rig: Rig, gate: Gate) -> None:
    rig.add("again", CONTEXT)
    rig.step()
    assert gate.asked.wait(300), "the promotion begins when the request arrives"
    other = text(40, seed=9)
    rig.add("other", other)
    for _ in range(10):
        rig.step()
    assert rig.outputs["other"] == expected(other, 4)
    assert rig.outputs["again"] == []

    gate.open.set()
    rig.run()
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_ssd") >= 256
    rig.check_clean()


@pytest.mark.parametrize(("limit", "most"), [("PAGES_A_STEP", 3), ("TOKENS_A_STEP", 63)])
def test_a_long_context_is_promoted_over_several_steps(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(promotions, limit, most)
    rig.ask("first", CONTEXT)
    push_out(rig)
    before = rig.count("prompt_tokens_ssd")
    start, ordered = rig.worker_half.start, list[int]()

    def started(orders: Orders) -> None:
        of_tiers = orders.stores.values()
        ordered.append(sum(len(one.keys) for tier in of_tiers for one in tier.promotes))
        start(orders)

    rig.worker_half.start = started
    rig.add("again", CONTEXT)
    rig.add("twin", CONTEXT[:-1])
    rig.run()
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    assert rig.outputs["twin"] == expected(CONTEXT[:-1], 4)
    assert max(ordered) == 3, "for both together"
    assert sum(ordered) >= 18
    assert rig.count("prompt_tokens_ssd") - before >= 288
    rig.check_clean()


def test_no_more_pages_wait_for_a_disk_that_hangs_than_cpu_memory_holds(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """A write that hangs reports no failure, so the tier is not paused. Once it returns, the
    waiting pages that are still in CPU memory are written."""
    rig = make_rig(extra=tiers(tmp_path, slots=40))
    rig.policy = Always(Decision(Tier.STORE))
    answers, target = threading.Event(), store(rig)
    put = target.put

    def hangs(pages: Any) -> Any:
        answers.wait()
        return put(pages)

    target.put = hangs
    tier = next(iter(rig.tiers.values()))
    try:
        for turn in range(12):
            rig.add(f"turn {turn}", text(200, seed=turn), params={"job_id": f"job {turn}"})
            while f"turn {turn}" not in rig.finished:
                rig.step()
                rig.worker_half.backend.drain()
        assert 0 < len(tier._backlog) <= rig.index.num_slots  # noqa: SLF001
    finally:
        answers.set()
    rig.run()
    assert not tier.has_more
    assert rig.count("pages_demoted") > 0
    rig.check_clean()


def test_orders_that_fail_together_count_as_one_failure(rig: Rig) -> None:
    rig.ask("first", CONTEXT)
    keys = tuple(rig.index.least_valuable(5))
    order = DemoteOrder(OrderId(0), SSD, keys, tuple(range(5)), 0.0)
    for _ in range(3):
        rig.tiers[SSD].on_demoted(Settled(order, keys, frozenset(range(5)), False, 0.0))
    goes_down = list[bool]()
    for pause_s in (0.0, FIRST_PAUSE_S):
        rig.now += pause_s
        rig.tiers.send_down(keys, None)
        goes_down.append(any(rig.tiers[SSD].outboxes))
    assert goes_down == [False, True], "it is left alone for the first pause, and no longer"
    rig.run()
    rig.check_clean()


def test_counts_of_a_store_are_reported_once_despite_resets(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> frozenset[int]:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentStore, "put", fails)
        rig.ask("first", CONTEXT)
        push_out(rig)
    failures = rig.worker.worker_half.stores[SSD].io.failures
    assert failures > 0
    rig.now += 100.0
    rig.fill(2)
    old = store(rig)
    assert rig.scheduler.reset_prefix_cache()
    rig.now += 100.0
    push_out(rig)
    rig.fill(2)
    assert store(rig) is not old
    assert rig.count("ssd_errors") == rig.worker.worker_half.stores[SSD].io.failures == failures
    written = old.stats.bytes_written + store(rig).stats.bytes_written
    assert rig.count("ssd_bytes_written") == written > 0
    rig.check_clean()


def test_a_generation_ends_with_its_engine(make_rig: MakeRig, tmp_path: Path) -> None:
    """Pages written after a reset are deleted when the engine stops. Another engine with the same
    number of resets may have different weights."""
    first = make_rig(extra=tiers(tmp_path))
    first.ask("first", CONTEXT)
    assert first.scheduler.reset_prefix_cache()
    first.ask("second", CONTEXT)
    push_out(first)
    first.close()
    assert not list((tmp_path / "ssd").rglob("*.seg"))


def test_a_turn_is_demoted_although_its_last_save_was_doubtful(rig: Rig) -> None:
    """Another request's restore fails when the turn ends, so the save that was just ordered is
    dropped. The turn's other pages are demoted without it."""
    rig.policy = Always(Decision(Tier.STORE))
    rig.add("first", CONTEXT, params={"job_id": "j"})
    while "first" not in rig.finished:
        rig.step()
        rig.wait_for_worker()
    assert rig.pages.saves.unsent, "its end"
    saved = rig.count("pages_saved")
    reports = Reports({}, {0: 1}, {})
    rig.half.on_reports(reports)
    rig.run()
    assert rig.count("pages_demoted") == rig.count("pages_saved") == saved > 0
    rig.check_clean()


def test_a_turn_that_ends_with_a_whole_page_is_demoted_completely(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """When the turn ends, no page is left to save, but the pages of its last step are still being
    saved. These pages are demoted too."""
    rig = make_rig(extra=tiers(tmp_path), max_batched_tokens=2048)
    rig.policy = Always(Decision(Tier.STORE))
    rig.add("first", CONTEXT, 1, params={"job_id": "j"})
    rig.run()
    assert rig.count("pages_demoted") == 20
    rig.check_clean()


def test_segments_are_deleted_and_used_pages_survive(make_rig: MakeRig, tmp_path: Path) -> None:
    """Many more pages are written than the SSD can hold. Old segments are deleted, and the pages of
    a context that is used again and again are kept."""
    rig = make_rig(extra=tiers(tmp_path, ssd_gib=0.004))
    for turn in range(12):
        assert rig.ask(f"hot-{turn}", CONTEXT) == expected(CONTEXT, 4)
        for i in range(6):
            rig.ask(f"cold-{turn}-{i}", text(400, seed=1000 + 10 * turn + i))
    assert rig.count("ssd_pages_reclaimed") > 0
    taken = sum(f.stat().st_blocks * 512 for f in (tmp_path / "ssd").rglob("*.seg"))
    assert taken <= 0.004 * (1 << 30)
    assert rig.count("prompt_tokens_ssd") >= 6 * 304, "the hot context was kept"
    rig.check_clean()


def test_the_error_of_a_second_engine_names_the_owner_of_the_folder(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    import os

    make_rig(extra=tiers(tmp_path))
    with pytest.raises(ConfigError, match=f"SSD_PATH.*{os.getpid()}"):
        make_rig(extra=tiers(tmp_path))


def test_only_pages_of_every_rank_are_on_ssd(rig: Rig) -> None:
    a, b, c = (PageKey(bytes([n]) * 48) for n in range(3))
    book = rig.pages.book
    engine = EngineState(
        facts=replace(rig.half.facts, ranks=2),
        pool=rig.half.pool,
        turns=rig.half.turns,
        counters=rig.half.counters,
        clock=lambda: 0.0,
    )
    tier = LowerTier(
        SSD,
        TierSpec(SSD.tier),
        engine,
        book,
        chance=lambda _: 0.0,
        group_of=lambda _: SSD.group,
        lasting=True,
    )
    tier.on_handshake({0: StoredPages((a, b), 2e9), 1: StoredPages((b, c), 1e9)})
    assert [key in book.stores[SSD].index for key in (a, b, c)] == [False, True, False]
    assert set(tier.take().lost) == {a, c}
    assert book.stores[SSD].bandwidth == 1e9, "the slower rank's"
