"""CPU memory that outlives its engine: pages that the next engine finds, and pages that it must not
find.

To simulate a killed engine, a test copies the memory file while the engine runs, because a killed
process leaves the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hugetlbfs import huge_folder
from tiered_kv.errors import ConfigError
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction

BLOCK = 16


@contextmanager
def rig(folder: Path, *, keep: bool = False, **extra: object) -> Iterator[SecondRig]:
    settings = {"cpu_gib": 0.001, "cpu_path": str(folder), "cpu_keep": keep, "codec": "raw"}
    with SecondRig(RigOptions(extra={**settings, **extra})) as made:
        made.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
        yield made


def settle(made: SecondRig) -> None:
    """Wait until the worker has hashed all saved pages and the notebook has written all its
    entries."""
    made.run()
    assert made.worker_half.lasting.wait_idle(30.0)
    assert made.half.deps.notebook.drain(30.0)


def as_killed(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def from_memory(made: SecondRig) -> int:
    return int(made.count("prompt_tokens_cpu"))


def test_the_next_engine_finds_the_contexts_of_one_that_was_killed(tmp_path: Path) -> None:
    prompts = {f"r{i}": text(200 + i, seed=i) for i in range(4)}
    with rig(tmp_path / "memory") as first:
        for name, prompt in prompts.items():
            first.ask(name, prompt)
        settle(first)
        killed = as_killed(tmp_path / "memory", tmp_path / "killed")
    with rig(killed) as second:
        for name, prompt in prompts.items():
            assert second.ask(name, prompt) == expected(prompt, 4)
        whole = sum(len(prompt) - 1 for prompt in prompts.values())  # one token has to be computed
        assert from_memory(second) == whole
        second.check_clean()


def test_a_clean_stop_keeps_the_file_only_if_configured(tmp_path: Path) -> None:
    prompt = text(300, seed=1)
    for keep, found in ((True, 0), (False, 299), (False, 0)):
        with rig(tmp_path, keep=keep) as one:
            assert one.ask("a", prompt) == expected(prompt, 4)
            assert from_memory(one) == found
            settle(one)


def test_pages_on_hugetlbfs_are_found_though_jobs_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = text(300, seed=1)
    with huge_folder() as folder:
        for found in (0, 288):  # the last tokens, which fill no block, are stored with the job
            with rig(folder, keep=True) as one:
                assert one.ask("a", prompt, params={"job_id": "a"}) == expected(prompt, 4)
                assert from_memory(one) == found
                assert one.worker_half.lasting.wait_idle(30.0)
    assert len([said for said in caplog.messages if "cannot hold jobs" in said]) == 2
    assert not any("cannot be saved" in said for said in caplog.messages)


def test_another_engine_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path), pytest.raises(ConfigError, match="is in use by process"), rig(tmp_path):
        pass


def test_pages_from_before_a_reset_are_not_found(tmp_path: Path) -> None:
    prompt = text(300, seed=1)
    with rig(tmp_path, keep=True) as one:
        one.ask("before", prompt)
        settle(one)
        one.reset_cache()
        one.ask("after", prompt)
        settle(one)
    with rig(tmp_path) as next_one:
        assert next_one.ask("again", prompt) == expected(prompt, 4)
        assert from_memory(next_one) == 0


def test_pages_whose_bytes_changed_are_computed(tmp_path: Path) -> None:
    prompt = text(300, seed=1)
    with rig(tmp_path, keep=True) as one:
        one.ask("a", prompt)
        settle(one)
        slots = one.worker_half.pool.slots
        slots[slots.any(axis=1), 0] ^= 1
    with rig(tmp_path) as next_one:
        assert next_one.ask("a", prompt) == expected(prompt, 4)
        assert from_memory(next_one) == 0


def test_a_save_that_failed_is_not_found(tmp_path: Path) -> None:
    prompt = text(300, seed=1)
    with rig(tmp_path, keep=True) as one:
        faulty = one.inject(FaultyTransfer)
        faulty.fail_next(Direction.SAVE, {3})
        one.ask("a", prompt)
        settle(one)
    with rig(tmp_path) as next_one:
        assert next_one.ask("a", prompt) == expected(prompt, 4)
        assert from_memory(next_one) == 3 * BLOCK


def test_the_end_of_a_turn_that_fills_no_block_is_found_too(tmp_path: Path) -> None:
    prompt = text(200, seed=1)
    with rig(tmp_path / "memory") as first:
        answer = first.ask("a", prompt)
        settle(first)
        killed = as_killed(tmp_path / "memory", tmp_path / "killed")
    context = prompt + answer
    returning = context + text(40, seed=2)
    with rig(killed) as second:
        assert second.ask("b", returning) == expected(returning, 4)
        assert from_memory(second) > len(context) // BLOCK * BLOCK


@pytest.mark.parametrize("named", [True, False])
def test_a_job_continues_in_the_next_engine(tmp_path: Path, named: bool) -> None:
    def job(name: str) -> dict[str, str] | None:
        return {"job_id": name} if named else None

    prompt = text(200, seed=1)
    with rig(tmp_path / "memory") as first:
        for turn in range(3):
            prompt = (
                prompt + first.ask(f"t{turn}", prompt, params=job("nightly")) + text(30, seed=turn)
            )
        settle(first)
        killed = as_killed(tmp_path / "memory", tmp_path / "killed")
    with rig(killed) as second:
        second.ask("t3", prompt, params=job("nightly"))
        second.ask("other", text(100, seed=99), params=job("another"))
        turns = sorted(job.turns for job in second.half.gaps.manager.jobs.after(0, most=9))
        assert turns == [1, 4]


def test_a_start_that_is_refused_keeps_the_pages(tmp_path: Path) -> None:
    ssd: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.3}
    prompt = text(300, seed=1)
    with rig(tmp_path / "memory") as first:
        first.ask("a", prompt)
        settle(first)
        killed = as_killed(tmp_path / "memory", tmp_path / "killed")
    with (
        rig(tmp_path / "another", **ssd),
        pytest.raises(ConfigError, match="in use by process"),  # the SSD folder is in use
        rig(killed, **ssd),
    ):
        pass
    with rig(killed) as second:
        assert second.ask("a", prompt) == expected(prompt, 4)
        assert from_memory(second) == 299
    assert not [*killed.glob("0-0*")], "a clean stop deletes the file"
