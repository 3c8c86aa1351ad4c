"""A job is taken out of an engine, comes into another, and goes on there as if nothing had been."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.snapshots.asking import (
    ask,
    fork,
    outcome,
    restore,
    result,
    settle,
    step,
    take,
    why,
)
from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.rig import EngineRig

PROMPT = text(300, seed=1)
JOB = {"job_id": "agent"}
ANSWER = expected(PROMPT, 8)
TURN_2 = PROMPT + ANSWER + text(30, seed=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of the snapshots of all engines of a test."""
    return tmp_path / "snapshots"


@pytest.fixture
def engine(make_engine: MakeEngine, root: Path) -> Any:
    """Makes engines that take snapshots into one folder."""

    def make(**extra: Any) -> EngineRig:
        settings = {"cpu_gib": 0.001, "snapshot_path": str(root), **extra}
        return make_engine(extra=settings)

    return make


def answered(rig: EngineRig) -> None:
    assert rig.ask("turn 1", PROMPT, max_tokens=8, params=JOB) == ANSWER


def clean(rig: EngineRig) -> None:
    """Check that nothing is held but by pins."""
    rig.pins.release_all()
    rig.check_clean()


def until_answering(rig: EngineRig, request: str, tokens: int) -> None:
    """Step until a request has answered so many tokens."""
    while len(rig.outputs[request]) < tokens:
        step(rig)


def test_a_job_goes_on_in_another_engine(engine: Any) -> None:
    here, there = engine(), engine()
    answered(here)

    taken = result(here, take(here, "agent", "night"))
    brought = result(there, restore(there, "night"))

    assert taken["tokens"] == 308
    assert taken["kv_tokens"] == brought["kv_tokens"] == 307
    assert brought["cache_salt"] is None
    assert there.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert there.count("prompt_tokens_cpu") == 307  # the tail too
    here.run()
    clean(here)
    clean(there)


def test_it_is_found_without_its_name(engine: Any) -> None:
    here, there = engine(), engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    result(there, restore(there, "night", "renamed"))

    there.add("turn 2", TURN_2)

    assert there.turn("turn 2").job.key.name == "renamed"
    there.run()
    assert there.count("prompt_tokens_cpu") == 307
    clean(there)


def test_a_running_turn_is_taken_and_goes_on_in_both(engine: Any) -> None:
    here, there = engine(), engine()
    here.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(here, "turn 1", 5)

    taken = result(here, take(here, "agent", "midway"))
    here.run()
    result(there, restore(there, "midway"))

    assert here.outputs["turn 1"] == expected(PROMPT, 40)
    manifest = open_snapshot(Path(there.half.given.config.snapshot_path) / "midway").manifest
    so_far = list(manifest.token_ids)
    assert so_far == (PROMPT + expected(PROMPT, 40))[: len(so_far)]
    assert 304 <= taken["kv_tokens"] == len(so_far) - 1
    assert there.ask("on", so_far, max_tokens=8, params=JOB) == expected(so_far, 8)
    assert there.count("prompt_tokens_cpu") == taken["kv_tokens"]  # one token was computed
    clean(here)
    clean(there)


def test_an_exact_one_has_names_of_its_own(engine: Any) -> None:
    here, there = engine(), engine()
    here.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(here, "turn 1", 5)

    result(here, take(here, "agent", "midway", exact=True))
    here.run()
    assert len(here.index) == 22  # those of the turn's 339 tokens, and none of the snapshot's
    there.ask("other", PROMPT, max_tokens=1)  # has the same text in VRAM
    brought = result(there, restore(there, "midway", exact=True))
    so_far = list(open_snapshot(here.half.given.config.snapshot_path / "midway").manifest.token_ids)
    before = there.count("prompt_tokens_cpu")
    salt = brought["cache_salt"]

    assert there.ask("on", so_far, max_tokens=8, params=JOB, salt=salt) == expected(so_far, 8)

    assert there.count("prompt_tokens_cpu") - before == len(so_far) - 1  # nothing of VRAM
    assert salt != result(there, restore(there, "midway", "again", exact=True))["cache_salt"]
    clean(there)


def test_a_near_one_is_no_exact_one(engine: Any) -> None:
    rig = engine()
    answered(rig)
    result(rig, take(rig, "agent", "night"))

    assert "--exact" in why(rig, restore(rig, "night", exact=True))
    assert "another computation" in why(rig, take(rig, "agent", "exact", exact=True))


def test_it_may_wait_for_the_end_of_the_turn(engine: Any) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=8, params=JOB)
    step(rig)

    taken = result(rig, take(rig, "agent", "end", wait_turn=True))

    assert rig.outputs["turn 1"] == ANSWER
    assert taken["kv_tokens"] == 307


def test_it_may_end_the_turn(engine: Any) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=80, params=JOB)
    until_answering(rig, "turn 1", 3)

    taken = result(rig, take(rig, "agent", "cut", stop=True))

    said = rig.outputs["turn 1"]
    assert said == expected(PROMPT, len(said))
    assert len(said) < 10
    assert taken["tokens"] == 300 + len(said)


def test_forks_share_all_but_their_tails(engine: Any) -> None:
    rig = engine()
    answered(rig)
    pages = len(rig.index)

    forked = result(rig, fork(rig, "agent", "a", "b", "c"))

    assert forked["jobs"] == ["a", "b", "c"]
    assert ask(rig, "job", id="b")["jobs"][0]["parents"] == ["agent"]
    assert forked["extra_pages"] == 0
    assert len(rig.index) == pages
    for i, child in enumerate("abc"):
        prompt = PROMPT + ANSWER + text(20, seed=10 + i)
        assert rig.ask(child, prompt, params={"job_id": child}) == expected(prompt, 4)
    assert rig.count("prompt_tokens_recomputed") == 300 + 3 * 21
    assert "already" in why(rig, fork(rig, "agent", "a"))
    clean(rig)


def test_a_running_turn_is_forked(engine: Any) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(rig, "turn 1", 5)

    forked = result(rig, fork(rig, "agent", "a", "b", exact=True))
    rig.run()

    assert rig.outputs["turn 1"] == expected(PROMPT, 40)
    so_far = PROMPT + expected(PROMPT, forked["tokens"] - 300)
    for child in "ab":
        found = rig.ask(
            child, so_far, max_tokens=8, params={"job_id": child}, salt=forked["cache_salt"]
        )
        assert found == expected(so_far, 8)
    clean(rig)


def test_snapshots_of_forks_share_pages_on_disk(engine: Any, root: Path) -> None:
    rig = engine()
    answered(rig)
    result(rig, fork(rig, "agent", "a"))
    first = result(rig, take(rig, "agent", "one"))

    second = result(rig, take(rig, "a", "two"))

    assert first["shared_bytes"] == 0
    assert second["shared_bytes"] == second["stored_bytes"] == first["stored_bytes"]
    shutil.rmtree(root / "one")
    other = engine()
    assert result(other, restore(other, "two"))["kv_tokens"] == 307
    with open_snapshot(root / "two") as snapshot:
        assert snapshot.manifest.parents == ("agent",)


def test_what_is_damaged_is_refused_and_nothing_is_seen(engine: Any, root: Path) -> None:
    here, there = engine(), engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    page = max((root / "night" / "pages").iterdir())
    data = bytearray(page.read_bytes())
    data[-1] ^= 1
    page.write_bytes(data)

    assert "1 page" in why(there, restore(there, "night"))

    assert len(there.index) == 0
    assert there.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert there.count("prompt_tokens_cpu") == 0
    clean(there)


def test_a_context_that_has_no_room_is_refused(engine: Any, make_engine: MakeEngine) -> None:
    here = engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    page = here.half.facts.slot_bytes
    there = engine(cpu_gib=(8 * page + 1) / (1 << 30))

    assert "TIERED_KV_CPU_GIB" in why(there, restore(there, "night"))

    assert len(there.index) == 0
    clean(there)


def test_pages_that_are_there_make_no_room_for_the_others(engine: Any) -> None:
    here = engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    page = here.half.facts.slot_bytes
    there = engine(cpu_gib=(22 * page + 1) / (1 << 30))
    there.ask("begin", PROMPT[:161], max_tokens=1)  # ten of its pages, used the longest ago
    there.ask("rival", text(190, seed=9), max_tokens=1)

    result(there, restore(there, "night"))

    computed = there.count("prompt_tokens_recomputed")
    there.pins.release_all()
    there.half.pool.forget(range(1, there.free_at_start))
    assert there.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert there.count("prompt_tokens_recomputed") - computed == len(TURN_2) - 307


def test_an_exact_one_without_room_leaves_nothing(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(12 * page + 1) / (1 << 30))
    rig.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(rig, "turn 1", 5)

    assert "TIERED_KV_CPU_GIB" in why(rig, take(rig, "agent", "midway", exact=True))

    settle(rig)
    rig.run()
    assert rig.outputs["turn 1"] == expected(PROMPT, 40)
    again = why(rig, take(rig, "agent", "late", exact=True))  # it waits now
    assert "a turn that runs" in again
    clean(rig)


def test_what_only_vram_holds_is_taken_from_there(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30))
    answered(rig)  # pinned
    rig.ask("rival", text(400, seed=9))

    assert result(rig, take(rig, "agent", "late"))["kv_tokens"] >= 304  # without its tail
    clean(rig)


def test_one_whose_kv_is_gone_says_so(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30))
    answered(rig)
    rig.pins.release_all()
    rig.fill()

    assert "evicted" in why(rig, take(rig, "agent", "late"))


def test_a_reset_ends_what_is_under_way(engine: Any) -> None:
    rig = engine()
    answered(rig)
    begun = take(rig, "agent", "night")

    rig.reset_cache()

    assert "reset" in why(rig, begun)
    assert take(rig, "agent", "night")["operation"] is None  # nothing is known of it any more
    rig.run()
    clean(rig)


def test_names_that_nobody_knows_or_that_are_taken(engine: Any) -> None:
    rig = engine()
    answered(rig)
    assert take(rig, "stranger", "x")["operation"] is None
    assert fork(rig, "stranger", "x")["operation"] is None
    result(rig, take(rig, "agent", "night"))

    for name in ("night", "../night", ".hidden", ""):
        assert outcome(rig, take(rig, "agent", name))["state"] == "failed"
    assert "no" in why(rig, restore(rig, "morning")).lower()
    rig.run()
    clean(rig)


def test_an_engine_without_a_folder_says_what_to_set(make_engine: MakeEngine) -> None:
    rig = make_engine()
    answered(rig)
    for said in (take(rig, "agent", "x"), restore(rig, "x"), fork(rig, "agent", "b")):
        assert said["status"] == 501
        assert "TIERED_KV_SNAPSHOT_PATH" in said["refused"]


@pytest.mark.parametrize("at", range(1, 9))
def test_whoever_hangs_up_meanwhile_leaves_it_whole(engine: Any, at: int) -> None:
    """The turn ends at any step of its capture."""
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(rig, "turn 1", 2)
    begun = take(rig, "agent", "midway")
    for _ in range(at):
        rig.step()
    rig.abort("turn 1")

    result(rig, begun)

    other = engine()
    brought = result(other, restore(other, "midway"))
    so_far = PROMPT + expected(PROMPT, brought["tokens"] - 300)
    assert other.ask("on", so_far, params=JOB) == expected(so_far, 4)
    rig.run()
    clean(rig)
