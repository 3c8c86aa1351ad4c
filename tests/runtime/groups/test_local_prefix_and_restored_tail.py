"""VRAM holds the start of a context, and the rest is restored. A model with states continues from
the state at the end of the restored part, and its output equals that of a full computation.

A state depends on every token before it. LMCache#4247 reports wrong text from another connector in
this case.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

from .kinds import ANSWER, JOB, MODELS, PROMPT, forget_vram, readable
from .test_turns import make

RECURRENT = {
    name: groups
    for name, groups in MODELS.items()
    if any(group.kind is KvKind.STATE for group in groups)
}
recurrent = pytest.mark.parametrize("groups", RECURRENT.values(), ids=RECURRENT)
ahead = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
NEXT = text(30, seed=2)


def ask_next(rig: Rig, prompt: list[int]) -> tuple[int, int]:
    """Run the job's next turn, and compare its answer with a fresh computation.

    Returns:
        Prompt tokens found in VRAM, and prompt tokens restored from CPU memory.
    """
    names = "prompt_tokens_vram", "prompt_tokens_cpu"
    before = [rig.count(name) for name in names]
    assert rig.ask("t2", prompt, max_tokens=40, params=JOB) == expected(prompt, 40)
    in_vram, restored = (rig.count(name) - n for name, n in zip(names, before, strict=True))
    return in_vram, restored


def forget_behind(rig: Rig, prompt: list[int], tokens: int, groups: Collection[int]) -> None:
    """Evict the blocks that follow the first ``tokens`` tokens of a prompt from VRAM, in some of
    vLLM's groups."""
    request = rig.make_request("hashes", prompt)
    unit = rig.half.facts.hash_tokens
    for block_hash in request.block_hashes[tokens // unit :]:
        for group in groups:
            found = rig.pool.get_cached_block(block_hash, [group])
            if found:
                rig.pool.evict_blocks({found[0].block_id})


@recurrent
@ahead
@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
def test_a_context_whose_start_another_request_left_in_vram(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool, retention: int | None
) -> None:
    rig = make(make_rig, groups, ahead=ahead, retention=retention)
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    rig.ask("another", PROMPT[:100])
    in_vram, restored = ask_next(rig, PROMPT + answer + NEXT)
    assert 0 < in_vram <= 96
    assert in_vram + restored == len(PROMPT) + ANSWER - 1
    rig.pins.release_all()
    rig.check_clean()


@recurrent
@ahead
@pytest.mark.parametrize("lost", ["everything", "states"])
def test_a_context_whose_end_has_left_vram(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool, lost: str
) -> None:
    """VRAM has no KV, or no states, after the first 64 tokens of the context. Attention blocks may
    reach further, but vLLM then uses the shorter hit. The rest is restored from CPU memory."""
    rig = make(make_rig, groups, ahead=ahead, retention=None)
    rig.ask("before", PROMPT[:70])  # vLLM keeps a state at the end of each prompt
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    rig.run()
    rig.wait_for_worker()
    rig.run()
    rig.pins.release_all()
    gone = [
        at for at, group in enumerate(groups) if lost == "everything" or group.kind is KvKind.STATE
    ]
    forget_behind(rig, PROMPT + answer, 64, gone)
    in_vram, restored = ask_next(rig, PROMPT + answer + NEXT)
    assert 0 < in_vram <= 64
    assert in_vram + restored == len(PROMPT) + ANSWER - 1
    rig.pins.release_all()
    rig.check_clean()


@recurrent
def test_without_the_state_at_its_end_no_tail_is_restored(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...]
) -> None:
    rig = make(make_rig, groups)
    rig.add("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    states = tuple(
        fingerprint
        for fingerprint, group in zip(
            rig.turn("t1").pages.fingerprints, rig.half.facts.groups, strict=True
        )
        if group.reach.kind is KvKind.STATE
    )
    forget_vram(rig)
    rig.ask("another", PROMPT[:100])
    for key in readable(rig):
        if key.startswith(states):
            rig.index.forget(key)
    in_vram, restored = ask_next(rig, PROMPT + rig.outputs["t1"] + NEXT)
    assert in_vram > 0
    assert restored == 0
    rig.pins.release_all()
    rig.check_clean()
