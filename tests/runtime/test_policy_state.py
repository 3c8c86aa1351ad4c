"""The learned state of a policy outlives the engine, and an invalid file is ignored."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tiered_kv.connectors.runtime.policy_state import SAVE_EVERY_S, PolicyState
from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy

ROOT = Path(__file__).resolve().parents[2]


class Counting(StatelessPolicy):
    """A policy that learns the number of gaps."""

    def __init__(self) -> None:
        self.gaps = 0

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.CPU)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.gaps += 1

    def dump(self) -> dict[str, object]:
        return {"gaps": self.gaps}

    def load(self, learned: Mapping[str, object]) -> None:
        gaps = learned.get("gaps")
        if not isinstance(gaps, int):
            raise ValueError("gaps is a number")
        self.gaps = gaps


def learned(gaps: int) -> Counting:
    policy = Counting()
    policy.gaps = gaps
    return policy


def loaded(folder: Path, name: str = "counting") -> int | None:
    """Return the state that an engine finds at startup, or None."""
    policy = Counting()
    return policy.gaps if PolicyState(policy, folder, name).load() else None


def test_learned_state_is_loaded_after_a_restart(tmp_path: Path) -> None:
    policy = learned(7)
    keeper = PolicyState(policy, tmp_path / "store", "counting")
    assert not keeper.load()
    keeper.close()
    policy.gaps = 8
    keeper.close()  # closing again does nothing
    (path,) = (tmp_path / "store").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert loaded(tmp_path / "store") == 7


def test_each_policy_has_a_file_of_its_own(tmp_path: Path) -> None:
    PolicyState(learned(7), tmp_path, "counting").close()
    assert loaded(tmp_path, "another") is None
    assert loaded(tmp_path) == 7


@pytest.mark.parametrize(("after_s", "saved"), [(SAVE_EVERY_S - 1, None), (SAVE_EVERY_S, 3)])
def test_learned_state_is_saved_periodically(
    after_s: float, saved: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learned(3)
    keeper = PolicyState(policy, tmp_path, "counting")
    keeper.save_if_due(now=1000.0)
    keeper.save_if_due(now=1000.0 + after_s)
    monkeypatch.setattr(policy, "dump", dict)  # so that closing saves nothing
    keeper.close()
    assert loaded(tmp_path) == saved


def test_without_a_folder_a_policy_is_not_kept(tmp_path: Path) -> None:
    keeper = PolicyState(learned(3), None, "counting")
    assert not keeper.load()
    for n in range(2):
        keeper.save_if_due(now=n * 2 * SAVE_EVERY_S)
    keeper.close()
    assert loaded(tmp_path) is None


GOOD: dict[str, object] = {"version": 1, "policy": "counting", "learned": {"gaps": 7}}
WRONG: list[dict[str, object]] = [
    {"version": 2},
    {"policy": "another"},
    {"learned": [7]},
    {"learned": {"gaps": "7"}},
    {"learned": {}},
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        *(json.dumps({**GOOD, **wrong}).encode() for wrong in WRONG),
    ],
)
def test_an_unusable_file_is_reported_once_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy-counting.json"
    path.write_bytes(content)
    policy = learned(1)
    keeper = PolicyState(policy, tmp_path, "counting")
    with caplog.at_level(logging.WARNING):
        assert not keeper.load()
    assert len(caplog.records) == 1
    assert policy.gaps == 1
    keeper.close()
    assert loaded(tmp_path) == 1


def test_an_unwritable_folder_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    keeper = PolicyState(learned(1), tmp_path / "file", "counting")
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            keeper.save_if_due(now=n * 2 * SAVE_EVERY_S)
        keeper.close()
    assert sum("cannot be saved" in record.message for record in caplog.records) == 1


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    PolicyState(learned(7), tmp_path, "counting").close()
    policy = Counting()
    policy.gaps = object()  # type: ignore[assignment]
    PolicyState(policy, tmp_path, "counting").close()
    assert [path.name for path in tmp_path.iterdir()] == ["policy-counting.json"]
    assert loaded(tmp_path) == 7


def test_two_engines_with_one_process_number_save_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines of two containers both have process id 1. If both save at the same time, neither
    fails, and one complete file is left."""
    one, other = (PolicyState(learned(n), tmp_path, "counting") for n in (1, 2))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    waiting = [other]

    def sync(fd: int) -> None:
        if waiting:
            waiting.pop().close()

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "fdatasync", sync)
    one.close()
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["policy-counting.json"]
    assert loaded(tmp_path) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runtime.test_policy_state import PolicyState, learned

os.fdatasync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
PolicyState(learned(2), Path(sys.argv[1]), "counting").close()
"""


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    PolicyState(learned(1), tmp_path, "counting").close()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
    old, recent = (path for path in tmp_path.iterdir() if path.suffix != ".json")
    os.utime(old, (0, 0))
    others = [tmp_path / name for name in ("policy-counting.json.old", "policy-else.json.0" * 2)]
    for path in others:
        path.touch()
        os.utime(path, (0, 0))
    PolicyState(learned(3), tmp_path, "counting").close()
    assert set(tmp_path.iterdir()) == {tmp_path / "policy-counting.json", recent, *others}
    assert loaded(tmp_path) == 3


def test_infinite_numbers_are_restored(tmp_path: Path) -> None:
    """A policy may store infinite numbers: for example, the shortest gap is infinite before the
    first one. They are loaded unchanged."""
    policy = learned(3)
    policy.dump = lambda: {"gaps": math.inf}  # type: ignore[method-assign]
    PolicyState(policy, tmp_path, "counting").close()
    loaded = list[object]()
    again = learned(0)
    again.load = loaded.append  # type: ignore[assignment,method-assign]
    PolicyState(again, tmp_path, "counting").load()
    assert loaded == [{"gaps": math.inf}]
