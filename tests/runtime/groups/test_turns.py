"""A job's context is restored completely, for any KV types of the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

from .kinds import ANSWER, JOB, MODELS, PROMPT, cpu_tokens, forget_vram, readable

ahead = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
retention = pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
models = pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)


def make(make_rig: MakeRig, groups: Sequence[GroupSpec], **options: object) -> Rig:
    options = {"blocks": 200, "extra": {"cpu_gib": 0.01}, **options}
    return make_rig(groups=tuple(groups), **options)


def last_tokens(rig: Rig) -> int:
    """Return the number of tokens of the first turn's context that have KV after its last step."""
    with_last = rig.options.ahead and rig.half.facts.has_states
    return len(PROMPT) + ANSWER - (not with_last)


@models
@ahead
@retention
def test_a_finished_answer_is_restored_up_to_its_last_token(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool, retention: int | None
) -> None:
    """Windows and states of an answer, which vLLM alone would not cache, are restored too. With
    async scheduling, a turn that ends with a stop token has another step in flight, which advances
    the state in place."""
    rig = make(make_rig, groups, ahead=ahead, retention=retention)
    stop = expected(PROMPT, ANSWER)[-1]
    answer = rig.ask("t1", PROMPT, max_tokens=60, stop_ids=[stop], params=JOB)
    assert answer == expected(PROMPT, ANSWER)
    forget_vram(rig)
    prompt = PROMPT + answer + text(30, seed=2)
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    assert cpu_tokens(rig) == last_tokens(rig)
    rig.pins.release_all()
    rig.check_clean()


@models
@ahead
def test_a_turn_that_ends_by_its_length_is_restored_too(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool
) -> None:
    """The KV of the turn's last token is never computed, with or without async scheduling."""
    rig = make(make_rig, groups, ahead=ahead)
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    prompt = PROMPT + answer + text(30, seed=2)
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    assert cpu_tokens(rig) == len(PROMPT) + ANSWER - 1


@models
def test_several_turns_in_a_row_are_restored(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...]
) -> None:
    rig = make(make_rig, groups)
    context, known = list(PROMPT), 0
    for turn in range(5):
        before = cpu_tokens(rig)
        answer = rig.ask(f"t{turn}", context, max_tokens=9 + turn, params=JOB)
        assert answer == expected(context, 9 + turn)
        assert cpu_tokens(rig) - before == known
        context += answer
        known = len(context) - 1
        context += text(7 + 13 * turn, seed=turn)
        forget_vram(rig)


@models
def test_a_prompt_without_the_answer_hits_up_to_the_last_prompts_end(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...]
) -> None:
    """Some chat templates remove the model's reasoning from earlier answers. The next prompt then
    shares only the earlier prompt with the context, and that part is restored."""
    rig = make(make_rig, groups)
    rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    prompt = PROMPT + text(60, seed=3)
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    unit = rig.half.facts.hit_tokens
    boundary = (len(PROMPT) - 1) // unit * unit
    assert cpu_tokens(rig) >= (boundary if rig.half.facts.has_states else len(PROMPT))


@models
@ahead
def test_an_answer_cut_by_a_stop_string_hits_up_to_the_prompts_end(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool
) -> None:
    """vLLM's API server detects a stop string and aborts the request, which has already generated
    further tokens. The next prompt contains only the start of the answer, and at least the earlier
    prompt is restored."""
    rig = make(make_rig, groups, ahead=ahead)
    rig.add("t1", PROMPT, max_tokens=60, params=JOB, stop=["stop"])
    while len(rig.outputs["t1"]) < ANSWER:
        rig.step()
    rig.abort("t1")
    rig.run()
    forget_vram(rig)
    prompt = PROMPT + rig.outputs["t1"][:3] + text(60, seed=3)
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    unit = rig.half.facts.hit_tokens
    assert cpu_tokens(rig) >= (len(PROMPT) - 1) // unit * unit
    rig.pins.release_all()
    rig.check_clean()


@models
@ahead
def test_a_pinned_context_stays_in_vram_while_rivals_fill_it(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], ahead: bool
) -> None:
    """A pinned context is found in VRAM after many other requests. The window and the state at the
    prompt's end leave the block table while the model answers, so they are held from the end of the
    prompt."""
    rig = make(make_rig, groups, ahead=ahead, blocks=140, extra={"cpu_gib": 0})
    answer = rig.ask("t1", PROMPT, max_tokens=60, params=JOB)
    assert len(rig.pins) == 1
    unit = rig.half.facts.hit_tokens
    for i in range(12):
        rig.ask(f"rival-{i}", text(200, seed=100 + i))
    assert len(rig.pins) == 1, "no rival needed it"
    prompt = PROMPT + answer + text(30, seed=2)
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    found = rig.count("prompt_tokens_vram")
    assert found >= (len(PROMPT) - 1) // unit * unit
    rig.pins.release_all()
    rig.check_clean()


@models
def test_blocks_at_a_prompts_end_are_released_before_any_preemption(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...]
) -> None:
    rig = make(make_rig, groups, blocks=60, extra={"cpu_gib": 0})
    for i in range(6):
        rig.add(f"r{i}", text(90, seed=i), max_tokens=80)
    rig.run()
    for i in range(6):
        assert rig.outputs[f"r{i}"] == expected(text(90, seed=i), 80)
    rig.pins.release_all()
    rig.check_clean()


@pytest.mark.parametrize("kind", [KvKind.WINDOW, KvKind.STATE])
def test_without_the_pages_of_one_kv_type_nothing_is_restored(
    make_rig: MakeRig, kind: KvKind
) -> None:
    rig = make(make_rig, MODELS["full, window and state"])
    rig.add("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    group = next(at for at, one in enumerate(rig.half.facts.groups) if one.reach.kind is kind)
    fingerprint = rig.turn("t1").pages.fingerprints[group]
    forget_vram(rig)
    for key in [key for key in readable(rig) if key.startswith(fingerprint)]:
        rig.index.forget(key)
    prompt = PROMPT + rig.outputs["t1"]
    assert rig.ask("t2", prompt, params=JOB) == expected(prompt, 4)
    assert cpu_tokens(rig) == 0
