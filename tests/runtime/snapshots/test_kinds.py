"""A job continues in another engine from a snapshot, for any KV types of its model and any tiers of
its pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cold import Held, cold_settings, fill_cpu, prompt, start_packing
from tests.runtime.cold import held as held
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.conftest import MakeRig
from tests.runtime.groups.kinds import ANSWER, JOB, MODELS, PROMPT, cpu_tokens
from tests.runtime.snapshots.asking import ask, fork, restore, result, step, take, why
from tests.runtime.two_ranks import TwoRankRig, TwoRanks, facts_of_two
from tiered_kv.page_group import CONTEXT, KvKind
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine import halves
from tiered_kv.testing.engine import rig as engine_rig
from tiered_kv.testing.engine.rig import RigOptions
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

models = pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
ahead = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
JOBS = 10
"""Number of jobs whose pages exceed the slots, but fit if they are compressed."""
MakeOne = Callable[..., Rig]


@pytest.fixture
def make(make_rig: MakeRig, tmp_path: Path) -> MakeOne:
    """Return a function that creates engines with a common snapshot folder."""

    def made(groups: tuple[GroupSpec, ...] = (), **options: Any) -> Rig:
        extra = options.pop("extra", {"cpu_gib": 0.01})
        extra = {"snapshot_path": str(tmp_path / "snapshots"), "admission": "off", **extra}
        return make_rig(groups=groups, extra=extra, blocks=200, **options)

    return made


def clean(rig: EngineRig) -> None:
    rig.run()
    rig.pins.release_all()
    rig.check_clean()


@models
@ahead
def test_a_waiting_job_continues_elsewhere(
    make: MakeOne, groups: tuple[GroupSpec, ...], ahead: bool
) -> None:
    here, there = make(groups, ahead=ahead), make(groups, ahead=ahead)
    answer = here.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)

    taken = result(here, take(here, "job", "night"))
    result(there, restore(there, "night"))

    turn_2 = PROMPT + answer + text(30, seed=2)
    assert there.ask("t2", turn_2, params=JOB) == expected(turn_2, 4)
    assert cpu_tokens(there) == taken["kv_tokens"] >= len(PROMPT)
    clean(here)
    clean(there)


@models
@ahead
def test_a_running_turn_is_cut_or_refused(
    make: MakeOne, groups: tuple[GroupSpec, ...], ahead: bool
) -> None:
    here, there = make(groups, ahead=ahead), make(groups, ahead=ahead)
    here.add("t1", PROMPT, max_tokens=60, params=JOB)
    while len(here.outputs["t1"]) < 7:
        step(here)
    begun = take(here, "job", "midway", exact=True)

    if any(group.kind is KvKind.STATE for group in groups):
        assert "--wait-turn" in why(here, begun)
    else:
        taken = result(here, begun)
        brought = result(there, restore(there, "midway", exact=True))
        so_far = PROMPT + expected(PROMPT, taken["tokens"] - len(PROMPT))
        on = there.ask("on", so_far, max_tokens=9, params=JOB, salt=brought["cache_salt"])
        assert on == expected(so_far, 9)
        assert cpu_tokens(there) == len(so_far) - 1
        clean(there)
    here.run()
    assert here.outputs["t1"] == expected(PROMPT, 60)
    clean(here)


def test_pages_that_only_ssd_has_are_promoted_for_a_snapshot(make: MakeOne, tmp_path: Path) -> None:
    page = make().half.facts.slot_bytes
    ssd = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.02, "codec": "raw"}
    here = make(extra={"cpu_gib": (64 * page + 1) / (1 << 30), **ssd}, max_batched_tokens=64)
    long = text(320, seed=1)
    answer = here.ask("t1", long, params=JOB)
    here.pins.release_all()
    for i in range(8):
        here.add(f"rival-{i}", text(300, seed=100 + i))
        while f"rival-{i}" not in here.finished:
            here.step()
            here.wait_for_worker()
        here.run()
    here.fill(1)
    promoted = here.count("pages_promoted")

    taken = result(here, take(here, "job", "night"))

    assert here.count("pages_promoted") > promoted
    there = make()
    result(there, restore(there, "night"))
    turn_2 = long + answer + text(30, seed=2)
    assert there.ask("t2", turn_2, params=JOB) == expected(turn_2, 4)
    assert cpu_tokens(there) == taken["kv_tokens"] >= 320
    clean(here)
    clean(there)


@pytest.mark.usefixtures("small_bundles")
def test_compressed_pages_are_written_as_they_were(make: MakeOne) -> None:
    here, there = make(extra=cold_settings()), make()
    fill_cpu(here, JOBS)
    assert here.index.cold.pages

    for i in range(JOBS):
        result(here, take(here, f"job{i}", f"night-{i}"))
        result(there, restore(there, f"night-{i}"))
        turn = prompt(i) + expected(prompt(i), 4) + text(9, seed=i)
        assert there.ask(f"t-{i}", turn, params={"job_id": f"job{i}"}) == expected(turn, 4)

    assert cpu_tokens(there) == JOBS * (len(prompt(0)) + 3)


@pytest.mark.usefixtures("small_bundles")
def test_pages_that_are_being_compressed_are_waited_for(make: MakeOne, held: Held) -> None:
    here, there = make(extra=cold_settings()), make()
    start_packing(here, held)

    begun = take(here, "job0", "night")
    for _ in range(9):
        here.half.snapshots.drain()
        here.step()
    said = ask(here, "operation", engine=0, id=begun["operation"])
    assert said["doing"] == "copying pages to CPU memory"
    held.let_go()
    taken = result(here, begun)

    assert taken["kv_tokens"] == len(prompt(0)) + 3
    result(there, restore(there, "night"))
    turn = prompt(0) + expected(prompt(0), 4) + text(9, seed=1)
    assert there.ask("on", turn, params={"job_id": "job0"}) == expected(turn, 4)


def test_each_rank_has_its_own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "read_facts", facts_of_two)
    monkeypatch.setattr(engine_rig, "Halves", TwoRanks)
    extra = {
        "cpu_gib": 0.001,
        "admission": "off",
        "snapshot_path": str(tmp_path / "snapshots"),
    }
    with TwoRankRig(RigOptions(extra=extra)) as here, TwoRankRig(RigOptions(extra=extra)) as there:
        answer = here.ask("t1", PROMPT, params=JOB)
        taken = result(here, take(here, "job", "night"))
        result(there, restore(there, "night"))
        turn_2 = PROMPT + answer + text(30, seed=2)

        assert there.ask("t2", turn_2, params=JOB) == expected(turn_2, 4)  # compares both ranks

        assert cpu_tokens(there) == taken["kv_tokens"]
        with open_snapshot(tmp_path / "snapshots" / "night") as snapshot:
            assert {page.rank for page in snapshot.manifest.pages} == {0, 1}
            assert len({page.sha256 for page in snapshot.manifest.pages}) == taken["pages"]


def test_forks_of_a_model_with_states_wait_for_a_turn_end(make: MakeOne) -> None:
    groups = MODELS["full and state"]
    rig = make(groups)
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)

    result(rig, fork(rig, "job", "a", "b"))

    for child in "ab":
        turn_2 = PROMPT + answer + text(30, seed=ord(child))
        assert rig.ask(child, turn_2, params={"job_id": child}) == expected(turn_2, 4)
    clean(rig)


def test_a_turn_whose_block_has_left_the_window_is_not_captured(make: MakeOne) -> None:
    """A block of the running turn has left the window, so vLLM's block table has a placeholder in
    its place. A snapshot of the turn is refused."""
    rig = make()
    rig.add("t1", PROMPT, max_tokens=60, params=JOB)
    while len(rig.outputs["t1"]) < 5:
        step(rig)
    table: Any = rig.half.pool.tables[CONTEXT]["t1"]
    block, table[2] = table[2], rig.pool.null_block
    try:
        begun = take(rig, JOB["job_id"], "night", exact=True)
        assert "blocks have just been released" in why(rig, begun)
    finally:
        table[2] = block
    clean(rig)
