"""A third-party tier that must be queried: its answers are late, partial, wrong or missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages import shared_store
from tests.runtime.pages.shared_store import SHARED, Place
from tests.runtime.pages.test_lower_tiers import tiers
from tests.runtime.stories.test_tiers import CONTEXT, push_out
from tiered_kv.connectors.runtime.lower_tiers import demotion, lower_tier
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import STALLED_S
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderReport
from tiered_kv.page_group import CONTEXT as CONTEXT_GROUP
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.tier_index import ABSENT_S, PRESENT_S, AskedIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.policies.jobs.kv_hints import Intent, KvHint, Outcome, Target
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.tiers import SSD, StoreId

OURS = "tests.runtime.pages.shared_store:SharedTier"


@pytest.fixture
def place() -> Iterator[Place]:
    place = shared_store.renew()
    yield place
    place.open.set()


def shared(path: Path, **more: Any) -> dict[str, Any]:
    """Return settings with the shared tier as the only tier below CPU memory."""
    settings = {**tiers(path), "tiers": OURS, **more}
    return {name: value for name, value in settings.items() if not name.startswith("ssd")}


def ask(rig: Rig, name: str) -> None:
    """Send the context as a prompt, wait for every order, and check the answer."""
    rig.add(name, CONTEXT)
    while rig.scheduler.has_requests():
        rig.step()
        rig.wait_for_worker()
        rig.now += 0.001
    assert rig.outputs[name] == expected(CONTEXT, 4)


def write(make_rig: MakeRig, path: Path) -> None:
    """Compute the context on one engine, write it to the place, and close the engine."""
    rig = make_rig(extra=shared(path), max_batched_tokens=64)
    rig.ask("first", CONTEXT)
    push_out(rig)
    rig.run()
    rig.close()


def test_one_engines_pages_are_promoted_in_another(
    make_rig: MakeRig, tmp_path: Path, place: Place
) -> None:
    write(make_rig, tmp_path)
    assert len(place.pages) > 20
    place.asked.clear()
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    ask(rig, "again")
    assert rig.count("prompt_tokens_ssd") >= 256, "the counter of all tiers below"
    assert rig.half.counters.of_tier(SHARED).totals["pages_promoted"] >= 16
    assert len(place.asked) == len(set(place.asked)), "a fresh answer is not asked for again"
    rig.check_clean()


def test_a_hint_promotes_pages_that_another_engine_wrote(
    make_rig: MakeRig, tmp_path: Path, place: Place
) -> None:
    write(make_rig, tmp_path)
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    hint = KvHint("a", Intent.PREFETCH, Target(tokens=tuple(CONTEXT)))
    [result] = rig.half.kv_hints.carry_out("", [hint])
    assert result.outcome is Outcome.DEFERRED, "the store is queried first"
    while rig.scheduler.has_requests():
        rig.step()
        rig.wait_for_worker()
    assert rig.count("hints_prefetch_accepted") == 1
    promoted = rig.count("pages_fetched") + rig.count("pages_promoted")
    assert promoted == 20
    ask(rig, "again")
    assert rig.count("prompt_tokens_cpu") >= 304
    assert rig.count("pages_fetched") + rig.count("pages_promoted") == promoted
    rig.check_clean()


def test_a_lookup_within_a_context_names_the_runs_that_the_pages_were_written_with(
    make_rig: MakeRig, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are written in runs, which begin at every 128th page of the context. CPU memory has the
    first 141 pages. The lookup of the others names the same runs."""
    prompt = text(4_300, seed=9)
    rig = make_rig(extra=shared(tmp_path, cpu_gib=400 * 16 * CELL / 2**30), max_model_len=6_000,
                   blocks=800, max_batched_tokens=6_000)  # fmt: skip
    [tier] = rig.tiers.values()
    monkeypatch.setattr(tier, "_in_runs", True)
    rig.ask("first", prompt[: 141 * 16])
    found = list[dict[PageKey, PageKey]]()

    def runs_of(context: Sequence[PageKey]) -> dict[PageKey, PageKey]:
        found.append(demotion.runs_of(context))
        return found[-1]

    monkeypatch.setattr(lower_tier, "runs_of", runs_of)
    rig.add("next", prompt)
    rig.step()
    [runs] = found
    keys = rig.half.turns.by_id["next"].page_keys()
    asked = [key for key in keys[141:] if key in runs]
    assert len(asked) > 10
    assert [runs[key] for key in asked] == [
        keys[at // 128 * 128] for at in range(141, 141 + len(asked))
    ]


def test_a_page_in_no_tier_is_computed(make_rig: MakeRig, tmp_path: Path, place: Place) -> None:
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    ask(rig, "first")
    assert place.asked
    assert rig.count("prompt_tokens_recomputed") == len(CONTEXT)
    assert rig.count("promotion_failures") == 0


@pytest.mark.parametrize("fault", ["in part", "wrongly"])
def test_pages_that_turn_out_lost_or_bad_are_computed(
    make_rig: MakeRig, tmp_path: Path, place: Place, fault: str
) -> None:
    write(make_rig, tmp_path)
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    rig.add("again", CONTEXT)
    keys = rig.turn("again").page_keys()
    if fault == "in part":
        place.lost.update(keys[7:9])
    else:
        place.corrupt(keys[7:9])
    while rig.scheduler.has_requests():
        rig.step()
        rig.wait_for_worker()
        rig.now += 0.001
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    assert rig.count("promotion_failures") == 2
    assert rig.count("prompt_tokens_ssd") == 7 * 16, "up to the first that is missing"
    rig.check_clean()


def test_missing_answers_delay_no_request(make_rig: MakeRig, tmp_path: Path, place: Place) -> None:
    """The store hangs. A turn waits briefly for its answer, and then computes its prompt. Later
    turns do not reserve slots for promotions from it."""
    write(make_rig, tmp_path)
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    rig.add("again", CONTEXT)
    rig.step()
    place.open.clear()
    steps = 0
    while len(rig.outputs["again"]) < 4:
        rig.step()
        rig.now += 0.5
        steps += 1
        assert steps < 100
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    rig.now += STALLED_S + 60
    free = rig.index.free_slots
    for i in range(3):
        rig.add(f"later{i}", CONTEXT[: 320 - i])
        while len(rig.outputs[f"later{i}"]) < 4:
            rig.step()
            rig.now += 0.02
    assert free - rig.index.free_slots <= 20, "no slots for a store that does not answer"
    place.open.set()
    rig.run()
    rig.check_clean()


def test_both_tiers_are_used_and_the_fastest_first(
    make_rig: MakeRig, tmp_path: Path, place: Place
) -> None:
    extra = {**tiers(tmp_path), "tiers": OURS}
    rig = make_rig(extra=extra, max_batched_tokens=64)
    rig.ask("first", CONTEXT)
    push_out(rig)
    assert place.pages
    ask(rig, "again")
    assert rig.half.counters.of_tier(SSD).totals["pages_promoted"] >= 16
    assert "pages_promoted" not in rig.half.counters.of_tier(SHARED).totals
    rig.check_clean()


def test_a_page_that_one_rank_lacks_counts_as_missing() -> None:
    now = 0.0
    pages, store = AskedIndex(lambda: now), StoreId(SHARED, CONTEXT_GROUP)
    book = OrderBook(PageIndex(4, LeastRecentlyUsed()), 2, [256], 1e9, {store: pages})
    a, b = (PageKey(bytes([n]) * 48) for n in range(2))
    order = book.plan_lookup(store, [a, b], 0.05)
    assert order is not None
    book.settle({order.order_id: OrderReport(1, frozenset(), 0, 0.0)})
    assert a not in pages, "the other rank has not answered"
    book.settle({order.order_id: OrderReport(1, frozenset({1}), 0, 0.0)})
    assert (a in pages, b in pages) == (True, False)
    assert book.plan_lookup(store, [a, b], 0.05) is None
    now = PRESENT_S
    assert (a in pages, pages.unanswered([a, b])) == (False, [a]), "it may have been evicted"
    now = ABSENT_S
    assert pages.unanswered([a, b]) == [a, b], "it may have been written"


def test_the_latest_answers_are_kept_and_written_pages_are_not_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    pages = AskedIndex(lambda: now)
    keys = [PageKey(b"%048d" % number) for number in range(200)]
    pages.add(keys[:100])
    now = ABSENT_S
    pages.answer(keys[100:], False)
    assert keys[0] not in pages, "it may have been evicted"
    assert not [*pages.unwritten(keys[:100])]
    monkeypatch.setattr("tiered_kv.pages.tier_index.MOST_ANSWERS", 50)
    pages.answer(keys[:10], True)
    assert len(pages._until) == 50  # noqa: SLF001
    assert len(pages) == 10
    assert keys[9] in pages


def test_a_reset_invalidates_pending_queries(
    make_rig: MakeRig, tmp_path: Path, place: Place
) -> None:
    write(make_rig, tmp_path)
    rig = make_rig(extra=shared(tmp_path), max_batched_tokens=64)
    rig.add("again", CONTEXT)
    rig.step()
    rig.half.before_reset()
    while rig.scheduler.has_requests():
        rig.step()
        rig.wait_for_worker()
        rig.now += 0.02
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_ssd") == 0, "of the generation before"
    rig.check_clean()


def test_stores_are_closed_with_the_engine(make_rig: MakeRig, tmp_path: Path, place: Place) -> None:
    rig = make_rig(extra=shared(tmp_path))
    assert place.stores > 0
    rig.close()
    assert place.stores == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("floppy", "Use ssd"),
        ("nowhere.at_all:Tier", "install its package"),
        ("tests.runtime.pages.shared_store:Missing", "has no class Missing"),
        (f"{OURS},{OURS}", "remove one from TIERED_KV_TIERS"),
    ],
)
def test_an_unavailable_tier_is_refused(
    make_rig: MakeRig, tmp_path: Path, place: Place, name: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        make_rig(extra=shared(tmp_path, tiers=name))
