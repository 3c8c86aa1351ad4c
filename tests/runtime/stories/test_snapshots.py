"""A snapshot of a job is taken in one engine and restored in another, where the job continues
unchanged."""

from __future__ import annotations

import itertools
import shutil
import threading
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
from tiered_kv.connectors.runtime.snapshots.context_pages import ContextNames
from tiered_kv.connectors.runtime.snapshots.operations import LONGEST_WAIT_S, MOST_AT_ONCE
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.rank_writer import PageWriter
from tiered_kv.snapshot.reader import Snapshot, open_snapshot
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.rig import EngineRig
from tiered_kv.transfer.base import Direction

PROMPT = text(300, seed=1)
JOB = {"job_id": "agent"}
ANSWER = expected(PROMPT, 8)
TURN_2 = PROMPT + ANSWER + text(30, seed=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Snapshot folder of all engines in a test."""
    return tmp_path / "snapshots"


@pytest.fixture
def engine(make_engine: MakeEngine, root: Path) -> Any:
    """Return a function that creates engines with a common snapshot folder."""

    def make(**extra: Any) -> EngineRig:
        settings = {"cpu_gib": 0.001, "snapshot_path": str(root), **extra}
        return make_engine(extra=settings)

    return make


def answered(rig: EngineRig) -> None:
    assert rig.ask("turn 1", PROMPT, max_tokens=8, params=JOB) == ANSWER


def clean(rig: EngineRig) -> None:
    """Release all pins, and check that nothing else is held."""
    rig.pins.release_all()
    rig.check_clean()


def until_answering(rig: EngineRig, request: str, tokens: int) -> None:
    """Step until a request has generated ``tokens`` tokens."""
    while len(rig.outputs[request]) < tokens:
        step(rig)


def test_a_job_continues_in_another_engine(engine: Any) -> None:
    here, there = engine(), engine()
    answered(here)

    taken = result(here, take(here, "agent", "night"))
    brought = result(there, restore(there, "night"))

    assert taken["tokens"] == 308
    assert taken["kv_tokens"] == brought["kv_tokens"] == 307
    assert brought["cache_salt"] is None
    assert there.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert there.count("prompt_tokens_cpu") == 307  # including the tail
    here.run()
    clean(here)
    clean(there)


def test_a_restored_job_is_recognized_without_its_name(engine: Any) -> None:
    here, there = engine(), engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    result(there, restore(there, "night", "renamed"))

    there.add("turn 2", TURN_2)

    assert there.turn("turn 2").job.key.name == "renamed"
    there.run()
    assert there.count("prompt_tokens_cpu") == 307
    clean(there)


def test_a_folder_created_by_a_server_is_private(engine: Any, root: Path) -> None:
    here = engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    assert root.stat().st_mode & 0o077 == 0
    clean(here)


def test_a_running_turn_is_captured_and_continues_in_both_engines(engine: Any) -> None:
    here, there = engine(), engine()
    here.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(here, "turn 1", 5)

    taken = result(here, take(here, "agent", "midway"))
    here.run()
    result(there, restore(there, "midway"))

    assert here.outputs["turn 1"] == expected(PROMPT, 40)
    manifest = open_snapshot(Path(there.half.deps.config.snapshot_path) / "midway").manifest
    so_far = list(manifest.token_ids)
    assert so_far == (PROMPT + expected(PROMPT, 40))[: len(so_far)]
    assert 304 <= taken["kv_tokens"] == len(so_far) - 1
    assert there.ask("on", so_far, max_tokens=8, params=JOB) == expected(so_far, 8)
    assert there.count("prompt_tokens_cpu") == taken["kv_tokens"]  # one token was computed
    clean(here)
    clean(there)


def test_an_exact_snapshot_has_its_own_page_keys(engine: Any) -> None:
    here, there = engine(), engine()
    here.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(here, "turn 1", 5)

    result(here, take(here, "agent", "midway", exact=True))
    here.run()
    assert len(here.index) == 22  # the pages of the turn's 339 tokens, and none of the snapshot's
    there.ask("other", PROMPT, max_tokens=1)  # has the same text in VRAM
    brought = result(there, restore(there, "midway", exact=True))
    so_far = list(open_snapshot(here.half.deps.config.snapshot_path / "midway").manifest.token_ids)
    before = there.count("prompt_tokens_cpu")
    salt = brought["cache_salt"]

    assert there.ask("on", so_far, max_tokens=8, params=JOB, salt=salt) == expected(so_far, 8)

    assert there.count("prompt_tokens_cpu") - before == len(so_far) - 1  # nothing comes from VRAM
    assert salt != result(there, restore(there, "midway", "again", exact=True))["cache_salt"]
    clean(there)


def test_an_approximate_snapshot_is_not_restored_as_exact(engine: Any) -> None:
    rig = engine()
    answered(rig)
    result(rig, take(rig, "agent", "night"))

    assert "--exact" in why(rig, restore(rig, "night", exact=True))
    assert "another computation" in why(rig, take(rig, "agent", "exact", exact=True))


def test_a_snapshot_may_wait_for_the_end_of_the_turn(engine: Any) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=8, params=JOB)
    step(rig)

    taken = result(rig, take(rig, "agent", "end", wait_turn=True))

    assert rig.outputs["turn 1"] == ANSWER
    assert taken["kv_tokens"] == 307


def test_a_snapshot_may_end_the_turn(engine: Any) -> None:
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


def test_a_damaged_snapshot_is_refused_and_leaves_nothing(engine: Any, root: Path) -> None:
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


def test_a_context_that_does_not_fit_is_refused(engine: Any, make_engine: MakeEngine) -> None:
    here = engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    page = here.half.facts.slot_bytes
    there = engine(cpu_gib=(8 * page + 1) / (1 << 30))

    assert "TIERED_KV_CPU_GIB" in why(there, restore(there, "night"))

    assert len(there.index) == 0
    clean(there)


def test_a_restore_does_not_evict_its_own_existing_pages(engine: Any) -> None:
    here = engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    page = here.half.facts.slot_bytes
    there = engine(cpu_gib=(22 * page + 1) / (1 << 30))
    there.ask("begin", PROMPT[:161], max_tokens=1)  # ten of its pages, used longest ago
    there.ask("rival", text(190, seed=9), max_tokens=1)

    result(there, restore(there, "night"))

    computed = there.count("prompt_tokens_recomputed")
    there.pins.release_all()
    there.half.pool.forget(range(1, there.free_at_start))
    assert there.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert there.count("prompt_tokens_recomputed") - computed == len(TURN_2) - 307


def test_an_exact_snapshot_without_space_leaves_nothing(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(12 * page + 1) / (1 << 30))
    rig.add("turn 1", PROMPT, max_tokens=40, params=JOB)
    until_answering(rig, "turn 1", 5)

    assert "TIERED_KV_CPU_GIB" in why(rig, take(rig, "agent", "midway", exact=True))

    settle(rig)
    rig.run()
    assert rig.outputs["turn 1"] == expected(PROMPT, 40)
    again = why(rig, take(rig, "agent", "late", exact=True))  # the job is waiting now
    assert "a running turn" in again
    clean(rig)


def test_pages_only_in_vram_are_captured_from_there(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30))
    answered(rig)  # the context is pinned
    rig.ask("rival", text(400, seed=9))

    assert result(rig, fork(rig, "agent", "child"))["extra_pages"] > 0
    assert result(rig, take(rig, "agent", "late"))["kv_tokens"] >= 304  # without its tail
    clean(rig)


def test_a_job_whose_kv_was_evicted_reports_it(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30))
    answered(rig)
    rig.pins.release_all()
    rig.fill()

    assert "evicted" in why(rig, take(rig, "agent", "late"))


def test_a_reset_ends_running_operations(engine: Any) -> None:
    rig = engine()
    answered(rig)
    begun = take(rig, "agent", "night")

    rig.reset_cache()

    assert "reset" in why(rig, begun)
    assert take(rig, "agent", "night")["operation"] is None  # the job's context was forgotten
    rig.run()
    clean(rig)


def test_unknown_and_taken_names_are_refused(engine: Any) -> None:
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


def test_an_engine_without_a_folder_names_the_setting(make_engine: MakeEngine) -> None:
    rig = make_engine()
    answered(rig)
    for said in (take(rig, "agent", "x"), restore(rig, "x"), fork(rig, "agent", "b")):
        assert said["status"] == 501
        assert "TIERED_KV_SNAPSHOT_PATH" in said["refused"]


@pytest.mark.parametrize("at", range(1, 9))
def test_an_abort_during_a_capture_leaves_it_complete(engine: Any, at: int) -> None:
    """In each run, the turn is aborted at a different step of its capture. The snapshot can still
    be restored."""
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


# -- operations that end early -----------------------------------------------------------

ENDS = {
    "reset": "The cache was reset during the operation: try again.",
    "too long": "It took too long",
    "error": "see the engine's log",
}
GATES = {
    "creating the folder": (SnapshotDraft, "begin"),
    "computing the context's page keys": (ContextNames, "name"),
    "writing pages": (PageWriter, "add"),
    "writing the manifest": (SnapshotDraft, "seal"),
    "opening the snapshot": (ContextNames, "name"),
    "reading pages": (Snapshot, "read_page"),
}
"""The method call that an operation waits for, by its description in the operation's status."""


COPIED = "copying pages to CPU memory"


class Gate:
    """Blocks one call of a method, and may then make it fail."""

    def __init__(self, patch: pytest.MonkeyPatch, where: type, name: str, number: int) -> None:
        self.reached, self.goes_on, self.fails = threading.Event(), threading.Event(), False
        call, numbers = getattr(where, name), itertools.count(1)

        def gated(*args: Any) -> Any:
            if next(numbers) == number:
                self.reached.set()
                assert self.goes_on.wait(60)
                if self.fails:
                    raise RuntimeError("injected")
            return call(*args)

        patch.setattr(where, name, gated)


def until_waiting(rig: EngineRig, begun: dict[str, Any], doing: str, gate: Gate) -> None:
    """Step until an operation waits at the gate and reports ``doing`` as what it does."""
    for _ in range(600):
        reached = gate.reached.wait(0.05)
        said = ask(rig, "operation", engine=0, id=begun["operation"])
        assert said["state"] == "running", said
        if reached and said["doing"] == doing:
            return
        rig.step()
    raise AssertionError(f"it never waited for this: {doing}")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("how", "doing", "number"),
    [
        ("running", "creating the folder", 1),
        ("running", "computing the context's page keys", 1),
        ("running", "writing pages", 1),
        ("running", "writing the manifest", 1),
        ("exact", "computing the context's page keys", 1),
        ("exact", "writing pages", 1),
        ("exact", "writing the manifest", 1),
        ("exact fork", "computing the context's page keys", 1),
        ("waiting", "computing the context's page keys", 1),
        ("waiting", "computing the context's page keys", 2),
        ("waiting", "writing pages", 1),
        ("waiting", "writing the manifest", 1),
        ("waiting fork", "computing the context's page keys", 2),
        ("restore", "opening the snapshot", 1),
        ("restore", "reading pages", 1),
    ],
)
def test_an_operation_that_ends_early_holds_nothing(
    engine: Any, monkeypatch: pytest.MonkeyPatch, how: str, doing: str, number: int, end: str
) -> None:
    rig = engine()
    where, name = GATES[doing]
    if "waiting" in how:
        answered(rig)
        rig.wait_for_worker()
        rig.run()
    elif how == "restore":
        other = engine()
        answered(other)
        result(other, take(other, "agent", "night"))
    else:
        rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
        until_answering(rig, "turn 1", 5)
    gate = Gate(monkeypatch, where, name, number)
    if how == "restore":
        begun = restore(rig, "night")
    elif "fork" in how:
        begun = fork(rig, "agent", "child", exact="exact" in how)
    else:
        begun = take(rig, "agent", "night", exact="exact" in how)
    until_waiting(rig, begun, doing, gate)

    gate.fails = end == "error"
    if end == "reset":
        rig.reset_cache()
    elif end == "too long":
        rig.now += LONGEST_WAIT_S + 1
        rig.step()
    gate.goes_on.set()
    for _ in range(3):
        step(rig)
    said = outcome(rig, begun)
    rig.run()

    assert said["state"] == "failed"
    assert ENDS[end] in said["why"] or doing in ("writing pages", "reading pages")
    clean(rig)
    if "exact" in how and end != "reset":
        assert len(rig.index) <= 25, "pages are kept that no job can ask for"
    assert "turn 1" not in rig.outputs or rig.outputs["turn 1"][:8] == ANSWER


@pytest.mark.parametrize("how", ["waiting", "exact", "exact fork"])
def test_a_capture_that_ends_while_pages_are_copied_holds_nothing(engine: Any, how: str) -> None:
    rig = engine()
    faulty = rig.inject(FaultyTransfer)
    rig.add("turn 1", PROMPT, max_tokens=60, params=JOB)
    until_answering(rig, "turn 1", 5)
    if how == "waiting":  # its last blocks are only in VRAM
        faulty.hold(Direction.SAVE)
        while "turn 1" not in rig.finished:
            rig.step()
        begun = take(rig, "agent", "night")
    else:
        faulty.hold(Direction.SAVE)
        begin = fork if "fork" in how else take
        begun = begin(rig, "agent", "night", exact=True)
    for _ in range(20):
        rig.half.snapshots.drain()
        rig.step()
    assert ask(rig, "operation", engine=0, id=begun["operation"])["doing"] == COPIED

    rig.now += LONGEST_WAIT_S + 1

    assert "It took too long" in why(rig, begun)
    faulty.let_go()
    rig.run()
    assert rig.outputs["turn 1"] == expected(PROMPT, 60)
    clean(rig)
    assert len(rig.index) <= 23


# -- pages in CPU memory, or being copied there ----------------------------------------------


def test_a_capture_does_not_evict_its_own_pages(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30), codec="raw")
    rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
    until_answering(rig, "turn 1", 3)
    rig.now += 60
    for at in range(2):  # other pages fill CPU memory, and were used later
        rig.add(f"other {at}", text(100, seed=5 + at), max_tokens=1)
        while f"other {at}" not in rig.finished:
            step(rig)
    assert rig.index.free_slots < 2

    taken = result(rig, take(rig, "agent", "night"))

    other = engine()
    assert result(other, restore(other, "night"))["kv_tokens"] == taken["kv_tokens"]
    rig.run()
    clean(rig)


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_waits_for_pages_that_are_being_saved(engine: Any, fails: bool) -> None:
    rig = engine()
    faulty = rig.inject(FaultyTransfer)
    if fails:
        faulty.fail_next(Direction.SAVE)
    faulty.hold(Direction.SAVE)
    rig.add("turn 1", PROMPT, max_tokens=60, params=JOB)
    while len(rig.outputs["turn 1"]) < 5:
        rig.step()
    saving = faulty.held
    assert saving

    begun = take(rig, "agent", "night")
    for _ in range(5):
        rig.half.snapshots.drain()
        rig.step()
    assert ask(rig, "operation", engine=0, id=begun["operation"])["doing"] == COPIED
    faulty.let_go()
    taken = result(rig, begun)

    assert faulty.struck == fails
    other = engine()
    assert result(other, restore(other, "night"))["kv_tokens"] == taken["kv_tokens"] > 300
    so_far = PROMPT + expected(PROMPT, taken["tokens"] - 300)
    assert other.ask("on", so_far, params=JOB) == expected(so_far, 4)
    rig.run()
    clean(rig)


def test_a_capture_whose_copies_keep_failing_reports_it(engine: Any) -> None:
    rig = engine()
    faulty = rig.inject(FaultyTransfer)
    rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
    until_answering(rig, "turn 1", 5)
    for _ in range(9):
        faulty.fail_next(Direction.SAVE)

    assert "Copying pages to CPU memory failed" in why(rig, take(rig, "agent", "night", exact=True))

    assert 1 <= faulty.struck < 9
    rig.run()
    assert rig.outputs["turn 1"] == expected(PROMPT, 100)
    clean(rig)


def test_a_waiting_job_whose_copies_keep_failing_reports_it(engine: Any) -> None:
    rig = engine()
    faulty = rig.inject(FaultyTransfer)
    for _ in range(60):
        faulty.fail_next(Direction.SAVE)
    answered(rig)  # its KV is only in VRAM
    assert not len(rig.index)
    struck = faulty.struck

    assert "Copying pages to CPU memory failed" in why(rig, take(rig, "agent", "night"))

    assert faulty.struck == struck + 1
    rig.run()
    clean(rig)


def test_a_capture_needs_slots_for_just_its_pages(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(20 * page + 1) / (1 << 30), codec="raw")
    rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
    until_answering(rig, "turn 1", 6)  # 19 full pages and a partial one
    for _ in range(9):
        step(rig)

    forked = result(rig, fork(rig, "agent", "child", exact=True))

    assert forked["extra_pages"] == -(-forked["kv_tokens"] // 16) == rig.index.num_slots
    rig.run()
    clean(rig)


def test_a_capture_next_to_held_pages_reports_that_there_is_no_space(engine: Any) -> None:
    page = engine().half.facts.slot_bytes
    rig = engine(cpu_gib=(30 * page + 1) / (1 << 30), codec="raw")
    rig.ask("other", text(200, seed=3), max_tokens=4, params={"job_id": "other"})
    rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
    until_answering(rig, "turn 1", 5)
    with HeldPages(rig.index) as held:  # as another operation would hold them
        held.hold(list(rig.index.least_valuable(14)))

        assert "TIERED_KV_CPU_GIB" in why(rig, take(rig, "agent", "midway", exact=True))

    rig.run()
    assert rig.outputs["turn 1"] == expected(PROMPT, 100)
    clean(rig)


@pytest.mark.parametrize("fails", [False, True])
def test_a_restore_waits_for_pages_that_are_being_saved(engine: Any, fails: bool) -> None:
    here, there = engine(), engine()
    answered(here)
    taken = result(here, take(here, "agent", "night"))
    faulty = there.inject(FaultyTransfer)
    if fails:
        faulty.fail_next(Direction.SAVE)
    faulty.hold(Direction.SAVE)
    there.add("other", PROMPT, max_tokens=40)
    while not faulty.held:
        there.step()

    begun = restore(there, "night")
    for _ in range(20):
        there.half.snapshots.drain()
        there.worker_half.snapshots.drain()
        there.step()
    assert ask(there, "operation", engine=0, id=begun["operation"])["state"] == "running"
    faulty.let_go()
    result(there, begun)

    there.run()
    forget_vram(there)
    before = there.count("prompt_tokens_cpu")
    there.ask("turn 2", TURN_2, params=JOB)
    assert there.count("prompt_tokens_cpu") - before == taken["kv_tokens"]
    clean(there)


def forget_vram(rig: EngineRig) -> None:
    """Remove everything from VRAM's prefix cache."""
    rig.pins.release_all()
    rig.half.pool.forget([one.block_id for one in rig.half.pool.blocks if not one.is_null])


def until_named_twice(rig: EngineRig, begun: dict[str, Any], gate: Gate) -> None:
    """Step until a capture of a waiting job holds its pages, and computes their keys a second
    time."""
    until_waiting(rig, begun, "computing the context's page keys", gate)
    assert rig.index.in_use > 10


def lose_a_page(rig: EngineRig) -> None:
    """Let another request restore the same text, and make the restore of one page fail, so that the
    index forgets that page."""
    forget_vram(rig)
    rig.inject(FaultyTransfer).fail_next(Direction.LOAD, {2})
    rig.add("other", PROMPT, max_tokens=4)
    while "other" not in rig.finished:
        rig.step()
        rig.worker_half.backend.drain()
    assert rig.count("restore_failures") == 1
    assert rig.outputs["other"] == expected(PROMPT, 4)


def test_a_held_page_that_is_forgotten_is_still_written(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine()
    answered(rig)
    gate = Gate(monkeypatch, ContextNames, "name", 2)
    begun = take(rig, "agent", "night")
    until_named_twice(rig, begun, gate)
    lose_a_page(rig)
    gate.goes_on.set()

    result(rig, begun)

    other = engine()
    assert result(other, restore(other, "night"))["kv_tokens"] == 307
    assert other.ask("turn 2", TURN_2, params=JOB) == expected(TURN_2, 4)
    assert other.count("prompt_tokens_cpu") == 307
    rig.run()
    clean(rig)


def test_a_fork_whose_page_is_evicted_fails(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = engine()
    answered(rig)
    gate = Gate(monkeypatch, ContextNames, "name", 2)
    begun = fork(rig, "agent", "child")
    until_named_twice(rig, begun, gate)
    forget_vram(rig)
    key = next(iter(rig.index.least_valuable(10**6)), None)
    assert key is None, "all of them are held"
    lose_a_page(rig)
    said = list(rig.finished)
    gate.goes_on.set()

    ended = outcome(rig, begun)

    assert "other" in said
    if ended["state"] == "failed":  # unless the page was saved again meanwhile
        assert "try again" in ended["why"]
        assert ask(rig, "job", id="child")["jobs"] == []
    rig.run()
    clean(rig)


# -- jobs that continue meanwhile ----------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True])
def test_a_job_that_continues_during_its_restore_is_not_changed(
    engine: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    here, there = engine(), engine()
    answered(here)
    result(here, take(here, "agent", "night"))
    gate = Gate(monkeypatch, Snapshot, "read_page", 1)
    begun = restore(there, "night")
    until_waiting(there, begun, "reading pages", gate)
    prompt = text(200, seed=9)
    there.add("r0", prompt, max_tokens=4 if ends else 60, params=JOB)  # the job's client continues
    there.step()
    while ends and "r0" not in there.finished:
        there.step()
    gate.goes_on.set()

    said = why(there, begun)

    assert "--job" in said
    job = ask(there, "job", id="agent")["jobs"][0]
    assert (job["gap"] is None) is (not ends)
    assert there.gaps.manager.jobs.named("agent", 1)[0].turns == 1
    there.run()
    assert there.outputs["r0"] == expected(prompt, 4 if ends else 60)
    clean(there)


def test_a_job_is_found_among_many_of_its_name(engine: Any) -> None:
    here, there = engine(), engine()
    here.ask("turn 1", PROMPT, max_tokens=8, params=JOB, salt="c")
    result(here, take(here, "agent", "night"))
    for salt in "abc":
        there.add(f"of {salt}", PROMPT, max_tokens=40, params=JOB, salt=salt)
    there.step()

    assert "is running" in why(there, restore(there, "night"))

    there.run()
    clean(there)


def test_a_capture_waits_for_the_first_token_of_the_running_turn(engine: Any) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=8, params=JOB)
    begun = take(rig, "agent", "night")
    rig.half.snapshots.drain()
    rig.half.snapshots.advance()
    assert "first token" in ask(rig, "operation", engine=0, id=begun["operation"])["doing"]
    rig.abort("turn 1")
    rig.add("turn 2", TURN_2, max_tokens=40, params=JOB)

    taken = result(rig, begun)

    assert taken["kv_tokens"] >= len(TURN_2)
    rig.run()
    clean(rig)


# -- errors ---------------------------------------------------------------------------------


def test_a_capture_releases_its_blocks_when_the_engine_needs_all(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine()
    rig.add("turn 1", PROMPT, max_tokens=100, params=JOB)
    until_answering(rig, "turn 1", 5)
    gate = Gate(monkeypatch, ContextNames, "name", 1)
    begun = take(rig, "agent", "night", exact=True)
    until_waiting(rig, begun, "computing the context's page keys", gate)
    rig.abort("turn 1")
    rig.wait_for_worker()
    rig.step()
    assert rig.free_blocks < rig.free_at_start

    rig.half.release_all()  # as the engine does after a hook has failed

    assert rig.free_blocks == rig.free_at_start
    gate.goes_on.set()
    assert "blocks have just been released" in why(rig, begun)
    rig.run()
    clean(rig)


def test_a_hung_disk_gets_no_further_operations(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine()
    answered(rig)
    gate = Gate(monkeypatch, SnapshotDraft, "begin", 1)
    begun = [take(rig, "agent", f"night-{i}") for i in range(MOST_AT_ONCE)]
    assert "try again" in take(rig, "agent", "late")["refused"]
    rig.now += LONGEST_WAIT_S + 1
    rig.step()
    assert {ask(rig, "operation", engine=0, id=one["operation"])["state"] for one in begun} == {
        "failed"
    }
    gate.goes_on.set()
    rig.half.snapshots.drain()
    assert not [one for one in rig.half.deps.config.snapshot_path.iterdir() if one.is_dir()]
    assert result(rig, take(rig, "agent", "morning"))["kv_tokens"] == 307
    clean(rig)
