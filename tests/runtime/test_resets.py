"""Resetting vLLM's prefix cache works whatever is pinned or pending, and no earlier KV is found
afterwards."""

from __future__ import annotations

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig


def test_a_running_request_is_not_saved_once_its_kv_was_reset(make_rig: MakeRig) -> None:
    """vLLM refuses to reset the cache while a request runs, and the request continues with its
    earlier KV, which may be of old weights. None of its pages is saved."""
    rig = make_rig()
    prompt = text(100, seed=3)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()

    assert not rig.scheduler.reset_prefix_cache(), "vLLM refuses while a request runs"
    rig.run()

    assert rig.count("resets") == 1
    assert len(rig.index) == 0, "nothing of it is kept in the new generation"
    rig.check_clean()


def test_blocks_that_vllm_does_not_reset_are_not_found_by_new_requests(make_rig: MakeRig) -> None:
    """If vLLM refuses a reset, the running request keeps its blocks. A new request with the same
    prompt does not find them, because it would save them under the keys of the new weights."""
    rig = make_rig()
    prompt = text(100, seed=3)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.add("new", prompt)
    rig.run()
    assert rig.outputs["new"] == expected(prompt, 4)
    assert rig.count("prompt_tokens_vram") == 0
    rig.check_clean()


def test_resetting_the_connector_alone_forgets_its_pages(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(200, seed=5)
    rig.ask("t1", prompt)
    assert len(rig.index) > 0

    assert rig.scheduler.reset_connector_cache()

    assert len(rig.index) == 0
    rig.check_clean()


# -- resets that vLLM refuses -----------------------------------------------------------------


def blocks_of(rig: Rig, request_id: str) -> set[int]:
    return {block.block_id for block in rig.tables[request_id]}


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_restored_after_a_reset_are_not_found(make_rig: MakeRig, ahead: bool) -> None:
    """A reset is refused while a restore is in flight. vLLM hashes the restored blocks when the
    restore has finished, but later requests do not find them, because they are from the previous
    generation."""
    rig = make_rig(ahead=ahead)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    prompt = text(200, seed=1)
    rig.ask("t1", prompt)
    rig.now += 10
    rig.fill()
    rig.add("t2", prompt, max_tokens=60)
    while not ("t2" in rig.turns.by_id and rig.turn("t2").loading):
        rig.step()

    assert not rig.scheduler.reset_prefix_cache(), "vLLM refuses while blocks are being filled"
    while not rig.outputs["t2"]:
        rig.wait_for_worker()
        rig.step()
    saved = rig.count("pages_saved")
    rig.add("t3", prompt, max_tokens=1)
    while "t3" not in rig.finished:
        rig.step()

    assert "t2" not in rig.finished, "its blocks are where they were"
    assert rig.count("prompt_tokens_vram") == rig.count("prompt_tokens_cpu") == 0
    rig.run()
    assert rig.outputs["t2"] == expected(prompt, 60)
    assert rig.count("pages_saved") - saved == 13, "those that t3 computed"
    rig.check_clean()


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_that_a_request_fills_after_a_reset_are_not_found(
    make_rig: MakeRig, ahead: bool
) -> None:
    rig = make_rig(max_batched_tokens=64, ahead=ahead)
    prompt = text(300, seed=1)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(2):
        rig.step()  # 128 tokens of the prompt are computed

    assert not rig.scheduler.reset_prefix_cache()
    while not rig.outputs["old"]:
        rig.step()
    # This request computes the first 128 tokens again while the old request runs.
    rig.add("short", prompt[:129], max_tokens=1)
    while "short" not in rig.finished:
        rig.step()
    rig.add("long", prompt, max_tokens=2)
    while "long" not in rig.finished:
        assert not blocks_of(rig, "old") & blocks_of(rig, "long")
        rig.step()

    assert "old" not in rig.finished
    assert rig.count("prompt_tokens_vram") == 128, "what short computed"
    rig.run()
    assert rig.outputs["old"] == expected(prompt, 60)
    rig.check_clean()


def test_a_request_that_starts_over_after_a_refused_reset_is_like_any_other(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    prompt = text(100, seed=4)
    rig.add("old", prompt, max_tokens=40)
    for _ in range(5):
        rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.step()
    rig.ask("new", prompt)
    assert rig.count("prompt_tokens_vram") == 96
    rig.check_clean()
