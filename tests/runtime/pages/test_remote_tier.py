"""The remote tier on real servers: an engine finds the context of another engine, and no failure of
the store changes an answer or delays other requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import PAGE
from tests.runtime.stories.test_tiers import CONTEXT
from tiered_kv.connectors.runtime.lower_tiers.demotion import (
    FIRST_DOUBT_S,
    ONE_STALL_S,
    LookAhead,
    most_waiting,
)
from tiered_kv.connectors.runtime.pages import lookups
from tiered_kv.orders import OrderKind
from tiered_kv.remote import breaker
from tiered_kv.storage.remote_pages import PAGE_PREFIX
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.valkey import ValkeyCluster, ValkeyServer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.tiers import REMOTE

JOB: dict[str, Any] = {"job_id": "job"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server


def remote(server: ValkeyServer, *, slots: int = 64, **more: Any) -> dict[str, Any]:
    """Return settings for ``slots`` slots in CPU memory and the remote store."""
    return settings_with(server.url, slots=slots, **more)


def settings_with(url: str, *, slots: int = 64, **more: Any) -> dict[str, Any]:
    gib = (slots * PAGE + 1) / (1 << 30)
    return {"cpu_gib": gib, "codec": "raw", "policy": "lru", "remote": url, **more}


def ask(rig: Rig, name: str, prompt: Sequence[int] = CONTEXT, **params: object) -> None:
    """Run a turn, and wait for all orders, including those that finish after the turn."""
    rig.add(name, prompt, params=params or None)
    while rig.scheduler.has_requests() or rig.orders_under_way:
        rig.step()
        rig.wait_for_worker()
        rig.now += 0.001
    assert rig.outputs[name] == expected(prompt, 4)


def settle(rig: Rig) -> None:
    """Step until the orders of a turn's end are finished."""
    for _ in range(200):
        rig.step()
        rig.wait_for_worker()
        if not rig.orders_under_way:
            return
        rig.now += 0.01
        time.sleep(0.005)
    raise AssertionError("orders are under way for ever")


def pages_in(server: ValkeyServer) -> int:
    return server.talk(b"KEYS", PAGE_PREFIX + b"*").count(PAGE_PREFIX)


def write(make_rig: MakeRig, server: ValkeyServer, **more: Any) -> None:
    """Compute a turn of a job on one engine, wait until its context is in the store, and close the
    engine."""
    rig = make_rig(extra=remote(server, **more), max_batched_tokens=64)
    ask(rig, "first", job_id="job")
    settle(rig)
    assert pages_in(server) >= 20
    rig.close()


def test_a_jobs_next_turn_is_found_by_another_engine(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    write(make_rig, server)
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "again", job_id="job")
    assert rig.count("prompt_tokens_remote") >= 304
    assert rig.count("prompt_tokens_ssd") == 0
    assert rig.count("pages_fetched") >= 19
    assert rig.half.counters.of_tier(REMOTE).totals["pages_fetched"] >= 19
    assert rig.count("pages_promoted") == 0, "the counter of this engine's own tiers"
    rig.check_clean()


def test_a_shared_folder_does_the_same_without_a_server(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    settings = settings_with(f"{folder.as_uri()}?gib=1")
    rig = make_rig(extra=settings, max_batched_tokens=64)
    ask(rig, "first", job_id="job")
    settle(rig)
    rig.close()
    rig = make_rig(extra=settings, max_batched_tokens=64)
    ask(rig, "again", job_id="job")
    assert rig.count("prompt_tokens_remote") >= 304
    rig.check_clean()


@pytest.mark.parametrize("waiting", ["a few", "too many"])
def test_excess_pages_wait_and_those_beyond_the_queue_are_counted(
    make_rig: MakeRig, server: ValkeyServer, waiting: str
) -> None:
    slots = 64
    at_once, more = LookAhead.of(slots, None).most_demoting, most_waiting(slots)
    unshared = 0 if waiting == "a few" else 3
    pages = at_once + (more // 2 if waiting == "a few" else more + unshared)
    prompt = text(16 * pages - 8, seed=7)  # the last block is not full
    rig = make_rig(
        extra=remote(server, slots=slots), max_batched_tokens=64, max_model_len=16 * slots
    )
    ask(rig, "first", prompt, job_id="job")
    settle(rig)
    assert pages_in(server) == pages - unshared
    assert rig.half.counters.of_tier(REMOTE).totals.get("pages_not_shared", 0) == unshared
    rig.check_clean()


def test_a_turn_that_ends_with_a_whole_page_is_written_to_its_end(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    """When the turn ends, no page is left to save, but the pages of its last step are still being
    saved. These pages are written to the store too."""
    rig = make_rig(extra=remote(server, slots=128), max_batched_tokens=2048)
    prompts = {name: text(320, seed=at) for at, name in enumerate(("one", "two"))}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 1, params={"job_id": name})
    rig.run()
    settle(rig)
    assert pages_in(server) == 40
    rig.check_clean()


def test_only_new_pages_are_written(make_rig: MakeRig, server: ValkeyServer) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "first", job_id="job")
    settle(rig)
    before = rig.count("pages_shared")
    assert before == pages_in(server) >= 20
    ask(rig, "second", [*CONTEXT, *text(64, seed=2)], job_id="job")
    settle(rig)
    assert 4 <= rig.count("pages_shared") - before <= 6
    rig.check_clean()


def test_a_finished_job_leaves_nothing_for_others(make_rig: MakeRig, server: ValkeyServer) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "only", job_id="job", is_last_step=True)
    settle(rig)
    assert pages_in(server) == 0
    rig.check_clean()


def test_a_prefix_that_two_jobs_share_is_written_although_both_have_ended(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    for at, name in enumerate(("one", "two")):
        ask(rig, name, [*CONTEXT[:160], *text(100, seed=at)], job_id=name, is_last_step=True)
        settle(rig)
    assert pages_in(server) == 10
    rig.check_clean()


def test_an_empty_store_costs_little_time(make_rig: MakeRig, server: ValkeyServer) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "first", job_id="job")
    assert rig.count("prompt_tokens_recomputed") == len(CONTEXT)
    assert rig.count("fetch_failures") == rig.count("lookups_overdue") == 0
    rig.check_clean()


def test_changed_pages_are_recomputed_and_the_store_is_paused(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    write(make_rig, server)
    names = server.talk(b"KEYS", PAGE_PREFIX + b"*")
    assert names
    script = (
        b"for _, k in ipairs(redis.call('KEYS', ARGV[1])) do "
        b"local v = redis.call('GET', k) "
        b"redis.call('SET', k, string.sub(v, 1, -2) .. string.char(255 - string.byte(v, -1))) end"
    )
    server.talk(b"EVAL", script, b"0", PAGE_PREFIX + b"*")
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "again", job_id="job")
    assert rig.count("prompt_tokens_remote") == 0
    assert rig.count("remote_pages_bad") >= 19
    tier = next(tier for store, tier in rig.pages.tiers.items() if store.tier == REMOTE)
    doubted = [tier.answers]
    rig.now += 2 * FIRST_DOUBT_S
    assert [*doubted, tier.answers] == [False, True], "it is not asked for a while"
    rig.check_clean()


def test_a_stopped_store_delays_no_request(make_rig: MakeRig, server: ValkeyServer) -> None:
    write(make_rig, server)
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    server.pause()
    try:
        overdue, prompts = [], [CONTEXT, *(text(320, seed=at) for at in range(1, 4))]
        for at in range(4):
            rig.now += ONE_STALL_S * (at == 1)
            rig.add(f"turn{at}", prompts[at])
            while len(rig.outputs[f"turn{at}"]) < 4:
                rig.step()
                rig.now += 0.02
            overdue.append(rig.count("lookups_overdue"))
        waited = [after - before for before, after in pairwise([0, *overdue])]
        assert max(waited) == 1, "a turn asks once, and not for the rest"
        assert sum(waited) <= 2, "later ones do not ask"
    finally:
        server.go_on()
    for at in range(4):
        assert rig.outputs[f"turn{at}"] == expected(prompts[at], 4)
    rig.run()
    rig.check_clean()


@pytest.mark.parametrize(("ratio", "queries"), [(1, 0), (1024, 1)])
def test_few_pages_behind_a_long_vram_prefix_are_not_queried(
    make_rig: MakeRig,
    server: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
    ratio: int,
    queries: int,
) -> None:
    monkeypatch.setattr(lookups, "FOUND_PER_PREFILLED", ratio)
    rig = make_rig(extra=remote(server), max_batched_tokens=1024, blocks=100)
    ask(rig, "first")
    rig.add("again", [*CONTEXT, *text(64, seed=5)])
    rig.step()
    assert rig.half.pages.book.number(OrderKind.LOOK_UP) == queries
    rig.run()
    rig.check_clean()


def test_the_wait_for_an_answer_depends_on_the_whole_prompt(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    """The store does not answer for the first pages of a long prompt. The turn waits in proportion
    to the whole prompt, because without these pages all others would be recomputed too."""
    rig = make_rig(extra=remote(server), max_batched_tokens=2048, max_model_len=2048, blocks=200)
    prompt = text(100 * 16, seed=7)
    rig.gaps.prefills.fit.observe(0, len(prompt), 160.0)
    server.pause()
    try:
        rig.add("long", prompt)
        rig.step()
        # This is longer than the limit for the first 64 pages, but shorter than the limit for all
        # 100.
        rig.now += 6.0
        rig.step()
        assert not rig.outputs["long"]
        assert rig.count("lookups_overdue") == 0
        rig.now += 3.0
        rig.step()
        assert rig.count("lookups_overdue") == 1
    finally:
        server.go_on()
    rig.run()
    assert rig.outputs["long"] == expected(prompt, 4)
    rig.check_clean()


def test_a_store_that_writes_slowly_does_not_keep_an_idle_engine_stepping(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    server.pause()
    try:
        rig.add("first", CONTEXT, params=JOB)
        until = time.monotonic() + 60
        while rig.scheduler.has_requests():
            assert time.monotonic() < until, "the engine may not sleep"
            rig.step()
            rig.now += 0.001
        assert rig.pages.book.number(OrderKind.DEMOTE) > 0
    finally:
        server.go_on()
    rig.run()
    assert pages_in(server) >= 20
    assert rig.count("pages_shared") == pages_in(server)
    rig.check_clean()


def test_a_store_that_is_killed_and_restarted_is_used_again(
    make_rig: MakeRig, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE_S", 1.0)
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    server.kill()
    for at in range(8):  # a long outage
        ask(rig, f"in vain {at}", job_id="job")
        settle(rig)
        rig.now += 1.0
    assert rig.count("share_failures") > 0
    server.start()
    until = time.monotonic() + 60
    turn = 0
    while not pages_in(server):
        assert time.monotonic() < until
        # Time must pass, because servers are paused after failures, and not all pauses end
        # together.
        rig.now += 1.0
        turn += 1
        ask(rig, f"turn {turn}", [*CONTEXT, *text(16 * (turn % 8), seed=turn)], job_id="job")
        settle(rig)
        time.sleep(0.1)
    rig.check_clean()


def test_pages_of_another_generation_are_not_shared(
    make_rig: MakeRig, server: ValkeyServer
) -> None:
    """After a reset the weights may have changed. Stored pages are deleted, and no more are
    written."""
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    ask(rig, "first", job_id="job")
    settle(rig)
    assert pages_in(server) >= 20
    rig.half.before_reset()
    assert rig.pool.reset_prefix_cache()
    settle(rig)
    assert pages_in(server) == 0
    ask(rig, "second", job_id="job")
    settle(rig)
    assert pages_in(server) == 0
    assert rig.count("prompt_tokens_remote") == 0
    rig.check_clean()


def test_tenants_find_only_their_own_pages(make_rig: MakeRig, server: ValkeyServer) -> None:
    rig = make_rig(extra=remote(server), max_batched_tokens=64)
    rig.add("mine", CONTEXT, params=JOB, salt="mine")
    rig.run()
    settle(rig)
    assert pages_in(server) >= 20
    rig.close()
    other = make_rig(extra=remote(server), max_batched_tokens=64)
    other.add("yours", CONTEXT, params=JOB, salt="yours")
    while other.scheduler.has_requests() or other.orders_under_way:
        other.step()
        other.wait_for_worker()
        other.now += 0.001
    assert other.count("prompt_tokens_remote") == 0
    other.check_clean()


def test_pages_are_spread_over_servers_and_one_may_be_down(
    make_rig: MakeRig, server: ValkeyServer, tmp_path: Path
) -> None:
    with ValkeyServer(tmp_path) as second:
        url = f"{server.url},{second.server}"
        first = make_rig(extra=remote(server, remote=url), max_batched_tokens=64)
        stores = [tier.io.store for tier in first.worker_half.stores.values()]
        assert [store.retry_s for store in stores] == [None], "no request waits for it while down"
        contexts = [text(96, seed=100 + at) for at in range(8)]
        for at, context in enumerate(contexts):
            ask(first, f"first {at}", context, job_id=f"job {at}")
        settle(first)
        here, there = pages_in(server), pages_in(second)
        assert here
        assert there
        first.close()
        rig = make_rig(extra=remote(server, remote=url), max_batched_tokens=64)
        for at, context in enumerate(contexts):
            ask(rig, f"again {at}", context, job_id=f"job {at}")
        whole = rig.count("prompt_tokens_remote")
        assert whole >= 8 * 80, "each context lies on one server"
        rig.close()
        second.kill()
        rig = make_rig(extra=remote(server, remote=url), max_batched_tokens=64)
        for at, context in enumerate(contexts):
            ask(rig, f"once more {at}", context, job_id=f"job {at}")
        assert 0 < rig.count("prompt_tokens_remote") < whole
        rig.check_clean()


def test_a_cluster_is_read_again_once_a_replica_is_promoted(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    contexts = [text(96, seed=100 + at) for at in range(12)]

    def ask_all(rig: Rig, name: str) -> int:
        """Return the number of prompt tokens from the store."""
        before = rig.count("prompt_tokens_remote")
        for at, context in enumerate(contexts):
            ask(rig, f"{name} {at}", context, job_id=f"{name} {at}")
        return rig.count("prompt_tokens_remote") - before

    with ValkeyCluster(tmp_path) as cluster:
        lost = cluster.nodes[0]
        settings = settings_with(cluster.url(lost))
        first = make_rig(extra=settings, max_batched_tokens=64)
        ask_all(first, "first")
        settle(first)
        first.close()
        cluster.wait(cluster.replicated)
        rig = make_rig(extra=settings, max_batched_tokens=64)
        whole = ask_all(rig, "second")
        assert whole >= 12 * 80
        rig.close()
        rigs = [make_rig(extra=settings, max_batched_tokens=64) for _ in range(2)]
        lost.kill()
        assert ask_all(rigs[0], "during the failover") <= whole
        cluster.wait(lambda: cluster.has_promoted(cluster.partner(lost)))
        assert ask_all(rigs[1], "after it") >= 0.9 * whole
        for rig in rigs:
            rig.check_clean()
