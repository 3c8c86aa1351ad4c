"""vLLM's hooks around a sleep, in which it frees its KV cache, and the hook order of its newer
model runner. Both exist since vLLM 0.33."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import tiers
from tiered_kv.connectors.vllm.connector import TieredContinuumConnector
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

PROMPT = text(200, seed=1)


def fall_asleep(rig: Rig) -> None:
    """Do what vLLM does when it goes to sleep: reset the caches, then free the memory of the KV
    cache."""
    assert rig.reset_cache()
    assert rig.scheduler.reset_connector_cache()
    rig.worker.unregister_kv_caches()
    rig.memory.fill_(-1)


def wake_up(rig: Rig) -> None:
    rig.worker.restore_kv_caches()
    rig.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): rig.worker.get_handshake_metadata()}
    )


def test_the_connector_declares_that_the_engine_may_sleep() -> None:
    assert TieredContinuumConnector.supports_sleep_mode(None)


def test_an_engine_that_slept_keeps_pages_as_before(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.ask("before", PROMPT)
    fall_asleep(rig)
    wake_up(rig)
    assert rig.ask("t1", PROMPT) == expected(PROMPT, 4)
    assert rig.count("prompt_tokens_cpu") == 0, "nothing of before the sleep"
    rig.fill()
    assert rig.ask("t2", PROMPT) == expected(PROMPT, 4)
    assert rig.count("prompt_tokens_cpu") > 0
    rig.check_clean()


def test_copies_in_progress_finish_before_the_memory_is_freed(make_rig: MakeRig) -> None:
    rig = make_rig()
    faulty = rig.inject(FaultyTransfer)
    faulty.hold(Direction.SAVE)
    rig.add("t1", PROMPT)
    for _ in range(5):
        rig.step()
    assert "t1" in rig.finished
    assert faulty.held
    rig.worker.unregister_kv_caches()
    rig.memory.fill_(-1)
    assert not faulty.held
    assert rig.worker_half.backend is None
    rig.worker.unregister_kv_caches()  # vLLM frees the KV cache memory of a sleeping engine
    wake_up(rig)
    rig.worker.restore_kv_caches()
    rig.run()
    assert rig.count("pages_saved") == 200 // 16 + 1
    # Otherwise the request would find blocks whose contents were lost in the sleep.
    rig.pool.evict_blocks(set(range(len(rig.pool.blocks))))
    assert rig.ask("t2", PROMPT) == expected(PROMPT, 4)
    assert rig.count("prompt_tokens_cpu") == 199
    rig.check_clean()


def test_a_copy_ordered_during_a_sleep_fails(make_rig: MakeRig) -> None:
    """A copy ordered while the KV cache is freed fails, because it must not touch memory that may
    be in other use by then."""
    rig = make_rig()
    rig.ask("t1", PROMPT)
    rig.fill()
    rig.worker.unregister_kv_caches()
    longer = PROMPT + text(60, seed=3)
    assert rig.ask("t2", longer) == expected(longer, 4), "computed, as it was not restored"
    assert rig.count("restore_failures") > 0
    assert rig.count("save_failures") > 0
    wake_up(rig)
    rig.fill()
    assert rig.ask("t3", longer) == expected(longer, 4)
    rig.check_clean()


def test_a_second_handshake_does_not_restore_the_initial_index_of_the_stores(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    extra = tiers(tmp_path, slots=200)
    first = make_rig(extra=extra)
    first.ask("t1", PROMPT)
    first.close()
    rig = make_rig(extra=extra)
    assert rig.tiers.gauges()["ssd_pages"] > 0
    fall_asleep(rig)
    wake_up(rig)
    assert rig.tiers.gauges()["ssd_pages"] == 0


def test_saves_may_start_after_the_polls_of_their_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's newer model runner (since 0.33) runs the draft model between the polls and the saves
    of a step. Pages are still saved and restored."""
    rig = make_rig()
    worker = rig.worker
    save, clear = worker.wait_for_save, worker.clear_connector_metadata

    def finalize() -> None:
        save()
        clear()

    monkeypatch.setattr(worker, "wait_for_save", lambda: None)
    monkeypatch.setattr(worker, "clear_connector_metadata", finalize)
    rig.ask("t1", PROMPT)
    rig.fill()
    assert rig.ask("t2", PROMPT) == expected(PROMPT, 4)
    assert rig.count("prompt_tokens_cpu") > 0
    rig.check_clean()
