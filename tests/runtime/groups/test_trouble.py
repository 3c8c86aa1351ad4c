"""Failures of one KV type cost time, and never change an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

from .kinds import ANSWER, JOB, MODELS, PROMPT, cpu_tokens, forget_vram, readable

SEVERAL = {name: groups for name, groups in MODELS.items() if len(groups) > 1}
several = pytest.mark.parametrize("groups", SEVERAL.values(), ids=SEVERAL)
ahead = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])


def returning(rig: Rig) -> list[int]:
    """Run a turn, evict it from VRAM, and return the prompt of the next turn."""
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    return PROMPT + answer + text(30, seed=2)


@several
@ahead
@pytest.mark.parametrize("which", [0, 1], ids=["first group", "second group"])
def test_a_group_that_does_not_arrive_is_recomputed_with_all_others(
    make_rig: MakeRig, groups: Sequence[GroupSpec], ahead: bool, which: int
) -> None:
    """With several groups, vLLM accepts no report of single failed blocks, so the whole request is
    recomputed."""
    rig = make_rig(groups=groups, blocks=200, extra={"cpu_gib": 0.01}, ahead=ahead)
    faulty = rig.inject(FaultyTransfer)
    prompt = returning(rig)
    for _ in range(which):
        faulty.fail_next(Direction.LOAD, [])
    faulty.fail_next(Direction.LOAD, [0])
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    assert faulty.struck == which + 1
    assert rig.count("restore_failures") == 1
    forget_vram(rig)
    longer = prompt + rig.outputs["t2"] + text(9, seed=4)
    assert rig.ask("t3", longer, params=JOB) == expected(longer, 4)
    rig.pins.release_all()
    rig.check_clean()


@several
@ahead
def test_a_request_aborted_while_its_groups_load_leaves_nothing(
    make_rig: MakeRig, groups: Sequence[GroupSpec], ahead: bool
) -> None:
    rig = make_rig(groups=groups, blocks=200, extra={"cpu_gib": 0.01}, ahead=ahead)
    faulty = rig.inject(FaultyTransfer)
    prompt = returning(rig)
    faulty.hold(Direction.LOAD)
    rig.add("t2", prompt, params=JOB)
    for _ in range(3):
        rig.step()
    assert rig.turn("t2").loading
    rig.abort("t2")
    rig.step()
    faulty.let_go()
    rig.run()
    assert rig.ask("t3", prompt, params=JOB) == expected(prompt, 4)
    rig.pins.release_all()
    rig.check_clean()


@several
def test_a_cache_reset_makes_pages_of_every_group_unreachable(
    make_rig: MakeRig, groups: Sequence[GroupSpec]
) -> None:
    rig = make_rig(groups=groups, blocks=200, extra={"cpu_gib": 0.01})
    prompt = returning(rig)
    assert rig.reset_cache()
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    assert cpu_tokens(rig) == 0


@several
def test_a_restore_that_cannot_be_ordered_is_computed(
    make_rig: MakeRig, groups: Sequence[GroupSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(groups=groups, blocks=200, extra={"cpu_gib": 0.01})
    prompt = returning(rig)
    rig.add("t2", prompt, params=JOB)
    restores = rig.pages.restores
    find = restores.find

    def gone(*args: object) -> object:
        hit = find(*args)  # type: ignore[arg-type]
        if hit is not None:
            rig.index.forget(next(hit.keys))
        return hit

    monkeypatch.setattr(restores, "find", gone)
    rig.step()
    monkeypatch.undo()
    rig.run()
    assert rig.outputs["t2"] == expected(prompt, 4)
    assert rig.count("hook_errors") == 1


@several
def test_contexts_are_promoted_from_ssd_also_after_a_restart(
    make_rig: MakeRig, groups: Sequence[GroupSpec], tmp_path: Path
) -> None:
    extra = {"cpu_gib": 0.01, "ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.02, "codec": "raw"}
    rig = make_rig(groups=groups, blocks=200, extra=extra)
    rig.policy = Always(Decision(Tier.STORE))
    prompt = returning(rig)
    rig.run()
    for key in readable(rig):
        rig.index.forget(key)
    rig.add("t2", prompt, params=JOB)
    rig.run()
    assert rig.outputs["t2"] == expected(prompt, 4)
    assert cpu_tokens(rig) == len(PROMPT) + ANSWER - 1
    assert rig.count("prompt_tokens_ssd") > 0
    rig.run()
    rig.check_clean()
    rig.close()

    again = make_rig(groups=groups, blocks=200, extra=extra)
    assert again.ask("t3", prompt, params=JOB) == expected(prompt, 4)
    unit = again.half.facts.hit_tokens
    assert cpu_tokens(again) >= (len(PROMPT) - 1) // unit * unit


@ahead
def test_a_failed_restore_does_not_block_later_requests(make_rig: MakeRig, ahead: bool) -> None:
    """After a failed restore, vLLM queues the request before requests that already hold blocks, and
    reserves space for it again. Both requests still finish."""
    rig = make_rig(groups=MODELS["window"], blocks=16, extra={"cpu_gib": 0.01}, ahead=ahead)
    faulty = rig.inject(FaultyTransfer)
    prompt = returning(rig)
    faulty.hold(Direction.LOAD)
    faulty.fail_next(Direction.LOAD, [0])
    rig.add("fails", prompt, params=JOB)
    rig.add("comes", prompt)
    rig.step()
    assert all(rig.turn(name).loading for name in ("fails", "comes"))
    faulty.let_go()
    rig.run(limit=200)
    for name in ("fails", "comes"):
        assert rig.outputs[name] == expected(prompt, 4)
    assert rig.count("restore_failures") == 1
    rig.pins.release_all()
    rig.check_clean()


def test_other_restores_wait_for_a_request_whose_restore_failed(make_rig: MakeRig) -> None:
    """vLLM reserves space for a request whose restore failed until the request fits, and lets no
    other restore use that space. Another request in front of it would block it forever, so the
    other request is held back."""
    rig = make_rig(groups=MODELS["full and window"], blocks=40, extra={"cpu_gib": 0.01})
    other = text(150, seed=9)
    rig.ask("t0", other)
    faulty, prompt = rig.inject(FaultyTransfer), returning(rig)
    faulty.fail_next(Direction.LOAD, [0])
    rig.add("fails", prompt)
    while not rig.turn("fails").restore.failed:
        rig.step()
        rig.wait_for_worker()
    rig.add("comes", other)
    assert rig.half.match("comes", 0) == (None, False)
    rig.run(limit=200)
    assert rig.outputs["fails"] == expected(prompt, 4)
    assert rig.outputs["comes"] == expected(other, 4)
    assert cpu_tokens(rig) == len(PROMPT) + ANSWER - 1 + len(other) - 1, "both had been offered"
    rig.pins.release_all()
    rig.check_clean()
