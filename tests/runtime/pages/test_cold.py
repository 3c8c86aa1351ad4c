"""CPU memory keeps pages compressed, and returning jobs find their own pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cold import (
    SLOTS,
    Held,
    cold_settings,
    come_back,
    damage,
    fill_cpu,
    inject_cold,
    prompt,
    start_packing,
)
from tests.runtime.cold import held as held
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.conftest import MakeRig
from tests.runtime.groups.kinds import MODELS
from tiered_kv.codecs.base import Bytes, CodecError, EncodedPage
from tiered_kv.orders import LoadOrder
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.shrinking import Shrinking
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

pytestmark = pytest.mark.usefixtures("small_bundles")
JOBS = 10
"""Number of jobs whose pages exceed the slots, but fit if they are compressed."""
CONTEXT = 163
"""Tokens of a job's context with KV: its first prompt and answer without the last token."""


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(extra=cold_settings())


def cold_restores(rig: Rig) -> list[LoadOrder]:
    """Return a list that receives the orders to restore compressed pages from now on."""
    compressor, orders = rig.worker_half.compressor, list[LoadOrder]()
    load = compressor.load

    def noted(order: LoadOrder) -> None:
        orders.append(order)
        load(order)

    compressor.load = noted
    return orders


def test_more_pages_than_slots_are_held_and_restored_correctly(rig: Rig) -> None:
    jobs = JOBS - 1  # leaves space for the pages of their second turns
    fill_cpu(rig, jobs)
    assert len(rig.index) > SLOTS
    assert rig.count("pages_compressed") == rig.index.cold.compressed > SLOTS // 2
    page, told = rig.half.facts.slot_bytes, rig.half.stats.totals() | rig.half.stats.gauges()
    assert told["bytes_compressed"] == told["pages_compressed"] * page
    assert told["cpu_bytes_whole_compressed"] == rig.index.cold.compressed * page
    assert told["cpu_bytes_compressed"] == rig.index.cold.num_slots * page
    assert told["cpu_bytes_whole"] > told["cpu_bytes_most"] >= told["cpu_bytes"]
    assert told["compression_seconds"] > 0
    orders = cold_restores(rig)
    for job in range(jobs):
        assert come_back(rig, job) == CONTEXT
        rig.settle()  # before the next job takes slots
    assert any(len(order.cold) < len(order.slots) for order in orders), "none partly compressed"
    cold = sum(len(order.cold) for order in orders)
    assert rig.count("pages_decompressed") == cold
    assert rig.count("bytes_decompressed") == cold * page < rig.count("bytes_restored")
    staging = rig.worker_half.compressor.staging
    assert any(len(order.cold) > staging for order in orders), "all fit together"
    assert rig.count("restore_failures") == rig.count("compression_failures") == 0
    rig.settle()
    rig.check_clean()


def test_a_context_that_returns_twice_concurrently_is_right_for_both(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    for name in ("one", "two"):
        rig.add(name, prompt(0))
    rig.run()
    for name in ("one", "two"):
        assert rig.outputs[name] == expected(prompt(0), 4)
    rig.settle()
    rig.check_clean()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_turn_whose_pages_are_being_packed_waits_and_loses_nothing(
    make_rig: MakeRig, held: Held, ahead: bool
) -> None:
    rig = make_rig(extra=cold_settings(), ahead=ahead)
    start_packing(rig, held)
    rig.add("again", prompt(0))
    for _ in range(5):
        rig.step()
    assert not rig.turn("again").source.admitted
    assert rig.index.cold.being_compressed
    held.let_go()
    rig.run()
    assert rig.outputs["again"] == expected(prompt(0), 4)
    assert rig.count("prompt_tokens_cpu") == len(prompt(0)) - 1
    rig.settle()
    rig.check_clean()


def test_a_turn_of_another_job_does_not_wait(rig: Rig, held: Held) -> None:
    start_packing(rig, held)
    rig.add("new", text(40, seed=5))
    while "new" not in rig.finished:
        rig.step()
    assert rig.index.cold.being_compressed
    held.let_go()
    rig.settle()
    rig.check_clean()


# -- resets -------------------------------------------------------------------------------


def after_a_reset(rig: Rig) -> None:
    """Assert that nothing from before the reset is found, and that the new generation is compressed
    too."""
    before = rig.count("prompt_tokens_cpu")
    assert rig.ask("anew", prompt(0)) == expected(prompt(0), 4)
    assert rig.count("prompt_tokens_cpu") == before
    rig.settle()
    assert not rig.index.cold.being_compressed
    rig.check_clean()
    compressed = rig.count("pages_compressed")
    fill_cpu(rig, JOBS, tag="anew")
    assert rig.count("pages_compressed") > compressed
    assert come_back(rig, 1, "anew") == CONTEXT
    rig.settle()
    rig.check_clean()


def test_a_reset_while_pages_are_being_packed(rig: Rig, held: Held) -> None:
    start_packing(rig, held)
    assert rig.reset_cache()
    assert not rig.index.cold.being_compressed
    rig.step()
    held.let_go()
    after_a_reset(rig)


def test_a_reset_while_pages_are_compressed(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    assert rig.reset_cache()
    assert len(rig.index) == 0
    rig.check_clean()
    after_a_reset(rig)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_reset_while_compressed_pages_are_restored(
    make_rig: MakeRig, held: Held, ahead: bool
) -> None:
    rig = make_rig(extra=cold_settings(), ahead=ahead)
    start_restore(rig, held)
    assert not rig.scheduler.reset_prefix_cache(), "vLLM refuses while blocks are being filled"
    rig.step()
    held.let_go()
    rig.run()
    assert rig.outputs["again"] == expected(prompt(0), 4)
    after_a_reset(rig)


# -- requests and engines that end early -----------------------------------------------------


def start_restore(rig: Rig, held: Held) -> None:
    """Start a restore of compressed pages, and block it."""
    fill_cpu(rig, JOBS)
    held.decodes.clear()
    rig.add("again", prompt(0))
    while not ("again" in rig.turns.by_id and rig.turn("again").loading):
        rig.step()


def test_a_request_aborted_during_its_restore_leaves_nothing(rig: Rig, held: Held) -> None:
    start_restore(rig, held)
    rig.abort("again")
    for _ in range(3):
        rig.step()
    assert rig.free_blocks < rig.free_at_start, "its blocks are written to"
    held.let_go()
    rig.settle()
    rig.check_clean()
    assert come_back(rig, 0) == CONTEXT


@pytest.mark.parametrize("start", [start_packing, start_restore])
def test_an_engine_that_closes_finishes_pending_work(rig: Rig, held: Held, start: Any) -> None:
    """An engine is closed while pages are being compressed or restored. The fixture that detects
    leaked threads finds none."""
    start(rig, held)
    held.while_it_waits(rig.close)
    assert rig.worker_half.compressor is None
    rig.close()


@pytest.mark.parametrize("start", [start_packing, start_restore])
def test_an_engine_that_frees_its_vram_loses_nothing(rig: Rig, held: Held, start: Any) -> None:
    start(rig, held)
    held.while_it_waits(rig.worker_half.release_vram)
    rig.worker_half.take_vram()
    rig.run()
    rig.settle()
    assert rig.pool.reset_prefix_cache()
    assert come_back(rig, 1) == CONTEXT
    assert rig.count("restore_failures") == rig.count("compression_failures") == 0
    rig.settle()
    rig.check_clean()


def test_without_vram_restores_fail_and_their_tokens_are_computed(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    rig.worker_half.release_vram()
    rig.add("again", prompt(0))
    while not rig.count("restore_failures"):
        rig.step()
    rig.worker_half.take_vram()
    rig.run()
    assert rig.outputs["again"] == expected(prompt(0), 4)
    rig.settle()
    rig.check_clean()


# -- damage -----------------------------------------------------------------------------------


def test_a_damaged_page_is_recomputed(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    cold = rig.index.cold.compressed
    assert damage(rig)
    for job in range(JOBS):
        assert come_back(rig, job) == CONTEXT, "it shows only on the way"
        rig.settle()  # before the next job takes slots
    assert 0 < rig.count("restore_failures") <= cold
    rig.settle()
    rig.check_clean()
    assert come_back(rig, 0) > 0
    rig.check_clean()


def test_pages_that_cannot_be_encoded_stay_uncompressed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Shrinking, "encode", broken)
    fill_cpu(rig, JOBS)
    cold = rig.index.cold
    assert cold.num_slots == cold.compressed > 0, "in slots of their own"
    assert rig.count("compression_failures") == 0
    said = [line for line in caplog.messages if "cannot be compressed" in line]
    assert len(said) == 1, "once, however many bundles there are"
    rig.check_clean()
    orders = cold_restores(rig)
    assert sum(come_back(rig, job) for job in reversed(range(JOBS))) > CONTEXT
    rig.settle()
    assert sum(len(order.cold) for order in orders) == rig.count("pages_decompressed") > 0
    assert rig.count("restore_failures") == 0
    rig.check_clean()


def test_pages_that_cannot_be_decoded_are_computed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cpu(rig, JOBS)
    monkeypatch.setattr(Shrinking, "decode", broken)
    for job in range(JOBS):
        come_back(rig, job)
    assert rig.count("restore_failures") > 0
    rig.settle()
    rig.check_clean()


def broken(self: Shrinking, page: Bytes | EncodedPage, out: Bytes | None = None) -> EncodedPage:
    """Fail, as a broken codec does."""
    if out is not None:
        out[:] = 255
    raise CodecError("injected")


def test_pages_whose_copy_fails_next_to_compressed_pages_are_recomputed(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    faulty, orders = inject_cold(rig), cold_restores(rig)
    for job in range(JOBS):
        faulty.fail_next(Direction.LOAD, [0])
        come_back(rig, job)
    assert any(len(order.cold) < len(order.slots) for order in orders)
    assert rig.count("restore_failures") == faulty.struck > 0
    rig.settle()
    rig.check_clean()


# -- groups and tiers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "jobs", "compressed"),
    [(MODELS["full and window"], 6, {0, 1}), (MODELS["full and state"], 7, {0})],
    ids=["window", "state"],
)
def test_pages_of_several_groups_are_compressed(
    make_rig: MakeRig, groups: Sequence[GroupSpec], jobs: int, compressed: set[int]
) -> None:
    rig = make_rig(groups=groups, blocks=48, extra=cold_settings())
    fill_cpu(rig, jobs)
    orders = cold_restores(rig)
    assert [come_back(rig, job) for job in range(4)].count(CONTEXT) >= 3
    assert {order.group for order in orders} == compressed
    assert rig.count("restore_failures") == 0
    rig.settle()
    rig.check_clean()


def test_a_turn_waits_for_the_pages_of_every_group(make_rig: MakeRig) -> None:
    rig = make_rig(groups=MODELS["full and window"], extra=cold_settings())
    fill_cpu(rig, 2)
    assert rig.pool.reset_prefix_cache()
    rig.add("again", prompt(0))
    window = [key for key in rig.turn("again").page_keys(1) if rig.index.readable(key)]
    order = rig.pages.book.plan_pack(window, 1)
    for _ in range(3):
        rig.step()
    assert not rig.turn("again").source.admitted
    rig.worker_half.compressor.pack(order)
    rig.run()
    assert rig.outputs["again"] == expected(prompt(0), 4)
    assert rig.count("prompt_tokens_cpu") == len(prompt(0)) - 1
    rig.settle()
    rig.check_clean()


def test_compressed_pages_are_demoted_and_right_after_a_restart(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    extra = cold_settings(ssd_path=str(tmp_path / "ssd"), ssd_gib=0.1)
    rig = make_rig(extra=extra)
    fill_cpu(rig, 2 * JOBS)
    assert rig.count("pages_compressed") > 0
    assert rig.count("pages_demoted") > 0
    rig.close()
    second = make_rig(extra=extra)
    second.policy = rig.policy
    assert [come_back(second, job) for job in range(2 * JOBS)] == [CONTEXT] * 2 * JOBS
    assert second.count("restore_failures") == second.count("promotion_failures") == 0
    second.settle()
    second.check_clean()


def test_the_last_flush_includes_compressed_pages(make_rig: MakeRig, tmp_path: Path) -> None:
    extra = cold_settings(ssd_path=str(tmp_path / "ssd"), ssd_gib=0.1)
    rig = make_rig(extra=extra)
    rig.worker_half.stores[SSD].io.store.put = lambda pages: frozenset(range(len(pages)))
    rig.worker_half.stores[SSD].io.store.put_coded = lambda pages: frozenset(range(len(pages)))
    fill_cpu(rig, JOBS)
    assert rig.count("pages_demoted") == 0
    del rig.worker_half.stores[SSD].io.store.put, rig.worker_half.stores[SSD].io.store.put_coded
    assert damage(rig, bundles=1)
    rig.close()
    second = make_rig(extra=extra)
    second.policy = rig.policy
    restored = [come_back(second, job) for job in range(JOBS)]
    assert sum(tokens == CONTEXT for tokens in restored) == JOBS - 1
    assert min(restored) < CONTEXT, "what was damaged is not on SSD"
    second.settle()
    second.check_clean()
