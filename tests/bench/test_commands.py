"""The command benchmark runs what it says and counts what was right."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from bench import commands
from bench.command_list import COMMANDS, Command
from bench.commands import (
    Run,
    environment,
    original_says,
    ours_says,
    run,
    run_all,
    shares,
    verdicts,
)
from bench.toy import make_toys
from tiered_kv.policies.tools.calls import tool_call
from tiered_kv.policies.tools.tool_use import tool_use


def ran(line: str, seconds: float, kind: str = "kind") -> Run:
    return Run(kind, line, tool_use([tool_call("bash", {"command": line})]), seconds)


def test_there_are_200_commands_and_as_many_of_each_kind() -> None:
    counts = [len(listed) for listed in COMMANDS.values()]
    assert sum(counts) == 200
    assert max(counts) - min(counts) <= 1
    lines = Counter(
        (command.line, command.before) for kind in COMMANDS.values() for command in kind
    )
    assert set(lines.values()) == {1}


def test_most_commands_have_others_of_their_tool() -> None:
    tools = Counter(ran(c.line, 0).tool for listed in COMMANDS.values() for c in listed)
    alone = [tool for tool, count in tools.items() if count <= commands.OBSERVATIONS]
    assert sum(tools[tool] for tool in alone) <= 10, alone


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def test_a_command_s_time_is_until_its_shell_ends(tmp_path: Path, env: dict[str, str]) -> None:
    assert 0.3 <= run("sleep 0.3; cat > written", tmp_path, env) < 3
    assert (tmp_path / "written").read_bytes() == b"", "it has no input"
    assert run("exit 3", tmp_path, env) < 3, "failing is fine"


def test_what_is_left_in_the_background_is_stopped(tmp_path: Path, env: dict[str, str]) -> None:
    assert run("sleep 60 & echo $! > pid", tmp_path, env) < 10
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.01)
    raise AssertionError("it still runs")


def test_a_command_that_does_not_end_is_stopped(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LIMIT_S", 0.2)
    assert run("sleep 60", tmp_path, env) == 0.2


def test_a_login_shell_finds_this_python(tmp_path: Path, env: dict[str, str]) -> None:
    run("bash -lc 'command -v python' > which", tmp_path, env)
    assert Path((tmp_path / "which").read_text().strip()).samefile(
        shutil.which("python", path=env["PATH"]) or os.devnull
    )


def test_commands_of_programs_that_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "NEEDED", ("bash", "no-such-program"))
    listed = {"kind": (Command("no-such-program -x"), Command("cat made", before="echo > made"))}
    ticks: list[str] = []
    assert [one.line for one in run_all(listed, tmp_path, ticks.append)] == ["cat made"]
    assert len(ticks) == 2


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_toys_are_there(tmp_path: Path, env: dict[str, str]) -> None:
    make_toys(tmp_path)
    assert len(list((tmp_path / "src").rglob("*.py"))) == 1000
    assert run("git -C repo rev-list --count HEAD > count", tmp_path, env) < 10
    assert (tmp_path / "count").read_text() == "1500\n"
    assert (tmp_path / "native" / "Makefile").exists()


def test_the_original_looks_at_the_first_word_only() -> None:
    assert original_says("cd repo && pytest", 1.0, [30.0] * 5)
    assert not original_says("make clean", 5.0, [0.01] * 5)
    assert original_says("tar xf a", 1.0, [0.1] * 5)
    assert not original_says("tar xf a", 5.0, [60.0] * 5)
    assert original_says("tar xf a", 5.0, [])


def test_ours_knows_a_sleep_and_learns_the_rest() -> None:
    assert not ours_says(ran("sleep 2", 0).use, 1.0, [])
    assert ours_says(ran("sleep 2", 0).use, 5.0, [ran("sleep 60", 60)] * 5)
    make = ran("make", 0).use
    assert not ours_says(make, 1.0, [])
    assert ours_says(make, 1.0, [ran("make -s", 0.1)] * 5)


def test_right_is_the_share_of_right_verdicts() -> None:
    runs = [ran(f"sleep {n}", n + 0.01) for n in (0.5, 2, 3, 4, 6, 7, 8)]
    found = verdicts(runs, draws=3)
    assert len(found) == len(runs) * 3 * 2
    figures = shares(found)
    assert figures["right"] == 1.0
    assert figures["always_yes"] == pytest.approx((1 + 4) / 14)
    assert figures["right_original"] < 1


def test_a_command_is_not_forecast_from_itself() -> None:
    """Not even from the same line run in another state."""
    odd = ran("frobnicate -x", 100.0)
    again = ran("frobnicate -x", 100.0)
    others = [ran(f"frobnicate {n}", 0.1) for n in range(5)]
    found = verdicts([odd, again, *others], draws=2)
    assert all(verdict.ours for verdict in found[:8])
