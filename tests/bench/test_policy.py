"""The policy benchmark: how recordings are read, and how the figures are computed."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.gaps import Gap, Session, read_sources
from tiered_kv.bench.paths import ROOT, TRACES
from tiered_kv.bench.policy import (
    BENEFITS_S,
    OURS,
    Fold,
    Trial,
    difference,
    figures,
    fold_of,
    in_folds,
    measure,
    replay,
    utility,
)
from tiered_kv.bench.sim.servers.foresight import Clairvoyant
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, JobKey, Tier, ToolUse, TurnEnd
from tiered_kv.policies.registry import POLICIES
from tiered_kv.policies.tier_choice import Occupancy


def session(name: str, *gaps: float) -> Session:
    turns = (TurnEnd(JobKey("", name), n, False, False, 1000) for n in range(1, len(gaps) + 1))
    return Session(name, [Gap(turn, gap) for turn, gap in zip(turns, gaps, strict=True)])


# -- reading recordings -----------------------------------------------------------------


def request(t: float, gap: float | None, *, stop: str = "tool_use", **more: Any) -> dict[str, Any]:
    made = {"t": t, "in": 1000, "out": 50, "lcp": 900, "stop": stop, "api": 2.0, "gap": gap}
    return made | more


def write_sessions(path: Path, *rows: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_coding_agent_sessions(tmp_path: Path) -> None:
    sub = {"k": "sub", "id": "agent_1", "reqs": [request(0, 0.0), request(3, 1.0)]}
    requests = [
        request(0, 0.0),
        request(10, 8.0, stop="end_turn"),
        sub,
        request(100, 88.0, api=None),
        request(200, 100.0),
        request(300, None),
    ]
    write_sessions(
        tmp_path / "agents.jsonl.gz",
        {"id": "one", "dup": False, "reqs": requests},
        {"id": "two", "dup": True, "reqs": requests},
    )
    main, aside = read_sources(tmp_path)["agents"]
    assert [gap.gap_s for gap in main.gaps] == [8.0, 88.0], "the others lack an end"
    assert [gap.turn.tool for gap in main.gaps] == [None, NO_TOOL]
    turn = main.gaps[0].turn
    assert (turn.turn, turn.context_tokens, turn.new_tokens, turn.ended_at) == (1, 1050, 100, 2.0)
    assert (aside.split_by, [gap.gap_s for gap in aside.gaps]) == ("one", [1.0])
    assert aside.gaps[0].turn.job != turn.job


def test_request_logs(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "timestamp": 9_000_000, "input": "x" * 80, "output": "bye"},
        {
            "session_id": "s",
            "timestamp": 1_000_000,
            "input": "x" * 40,
            "output": "so\n\n```bash\nsleep 4\n```\n",
        },
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [found] = read_sources(tmp_path)["log"]
    [gap] = found.gaps
    assert gap.gap_s == 8.0
    assert gap.turn.tool is not None
    assert gap.turn.tool.command == "sleep 4"
    assert gap.turn.new_tokens == 10


def test_tool_rounds_and_tool_calls(tmp_path: Path) -> None:
    tools = [
        {"tool_name": "Bash", "tool_wall_latency_ms": 860},
        {"tool_name": "WebSearch", "tool_wall_latency_ms": 19291},
    ]
    tokens = {"input_tokens_total": 100, "newly_append_tokens": 9, "output_tokens": 5}
    rounds = [
        {"session_id": "s", "tools": tools} | tokens,
        {"session_id": "s", "tools": []} | tokens,
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rounds)))
    with (tmp_path / "calls.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "step", "action", "execution_time_s"])
        writer.writerow(["one", 0, "ls -F", 0.25])
    found = read_sources(tmp_path)
    assert [gap.gap_s for gap in found["rounds"][0].gaps] == [19.291]
    [call] = found["calls"][0].gaps
    assert (call.gap_s, call.turn.tool and call.turn.tool.command) == (0.25, "ls -F")


def test_a_file_without_gaps_is_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# Traces\n")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8bnot gzip")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "half.jsonl").write_text('{"id": 1\n')
    one_turn = {"session_id": "s", "tools": [], "input_tokens_total": 1}
    one_turn |= {"newly_append_tokens": 1, "output_tokens": 1}
    (tmp_path / "short.jsonl").write_text(json.dumps(one_turn))
    assert read_sources(tmp_path) == {}
    assert capsys.readouterr().err.count("contains no gaps between turns") == 5


def test_clients_that_do_not_name_their_tools() -> None:
    named = replace(session("s", 1.0, 2.0).gaps[0].turn, tool=ToolUse(("bash", "ls")))
    nobody = replace(named, tool=NO_TOOL)
    told = Session("s", [Gap(named, 1.0), Gap(nobody, 90.0)])
    assert told.names_tools
    silent = told.without_tools()
    assert [gap.turn.tool for gap in silent.gaps] == [None, NO_TOOL], "that is in the answer"
    assert not silent.names_tools
    assert silent.without_tools() == silent


# -- cross-validation folds -------------------------------------------------------------


@given(st.permutations([f"{n}" for n in range(12)]), st.integers(2, 6))
def test_every_session_is_tested_once_on_a_fold_without_it_or_its_sub_agents(
    names: list[str], folds: int
) -> None:
    """For any order of sessions, each session is tested in exactly one fold, together with its
    sub-agents. The fold learns from all other sessions."""
    sessions = [session(name, 1.0) for name in names]
    sessions += [replace(session(f"{name}/agent", 2.0), split_by=name) for name in names[:3]]
    made = list(in_folds(sessions, lambda one: fold_of(one, folds)))
    tested = [one for fold in made for one in fold.tested]
    assert sorted(tested, key=sessions.index) == sessions
    for fold in made:
        assert len({fold_of(one, folds) for one in fold.tested}) == 1
        assert not {one.split_by for one in fold.learned} & {one.split_by for one in fold.tested}
        assert len(fold.learned) + len(fold.tested) == len(sessions)
        assert fold.tested == sorted(fold.tested, key=sessions.index)


# -- utilities --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "gap_s", "worth"),
    [
        (Decision(Tier.PIN, 4.0), 3.0, 7.0),
        (Decision(Tier.PIN, 4.0), 4.0, 6.0),
        (Decision(Tier.PIN, 4.0), 100.0, -4.0),
        (Decision(Tier.PIN, 15.0), 12.0, -2.0),
        (Decision(Tier.CPU), 0.0, 0.0),
    ],
)
def test_what_a_decision_was_worth(decision: Decision, gap_s: float, worth: float) -> None:
    assert utility(decision, gap_s, 10.0) == worth


def test_the_clairvoyant_takes_all_there_is() -> None:
    gaps = [0.2, 3.0, 8.0, 30.0]
    for benefit_s, made in replay(Clairvoyant, [Fold([], [session("s", *gaps)])]).items():
        assert [one.utility for one in made] == [max(0.0, benefit_s - gap) for gap in gaps]
        assert figures(made)["accuracy"] == 1
        assert figures(made)["share"] == (1 if benefit_s > min(gaps) else None)


class Watched(Clairvoyant):
    """A policy that pins everything, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        if costs.benefit_s == BENEFITS_S[0]:
            self.seen.append(f"{turn.job and turn.job.name}{turn.turn}?")
        return Decision(Tier.PIN, 1.0)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.seen.append(f"{turn.job and turn.job.name}{turn.turn}={gap_s:g}")


def test_gaps_are_learned_first_and_tested_as_a_server_meets_them() -> None:
    policies = [Watched(), Watched()]
    given = iter(policies)
    c, d = session("c", 5.0, 6.0), session("d", 7.0)
    found = replay(lambda: next(given), [Fold([d], [c]), Fold([c], [d])])
    first, second = policies
    assert first.seen == ["d1=7", "c1?", "c1=5", "c2?", "c2=6"]
    assert second.seen == ["c1=5", "c2=6", "d1?", "d1=7"]
    assert [one.utility for one in found[5.0]] == [-1.0, -1.0, -1.0], "over all folds"
    row = figures(found[5.0])
    assert row["accuracy"] == pytest.approx(1 / 3)
    assert row["cover50"] is None


def test_coverage_is_measured_where_there_is_a_forecast() -> None:
    fold = Fold([session("d", *[2.0] * 60)], [session("c", *[2.0] * 60)])
    row = figures(replay(Occupancy, [fold])[5.0])
    assert row["cover90"] == 1
    assert row["us"] != 0


def trials(*utilities: float) -> list[Trial]:
    """Return the trials of two gaps in each of twenty sessions, with these utilities. The last
    utility is repeated. The clairvoyant policy gains a second in each gap."""
    rest = [utilities[-1]] * (40 - len(utilities))
    return [
        Trial(f"{n // 2}", utility, 1.0, True, None, 0)
        for n, utility in enumerate([*utilities, *rest])
    ]


def test_what_all_sessions_share_is_certain_and_what_a_single_one_gains_is_not() -> None:
    assert difference(trials(1.0), trials(0.0)) == {"difference": 1.0, "low": 1.0, "high": 1.0}
    lucky = difference(trials(20.0, 20.0, 0.0), trials(0.0))
    assert lucky["difference"] == 1.0
    assert lucky["low"] <= 0 < lucky["high"]
    even, lucky = figures(trials(0.5)), figures(trials(10.0, 10.0, 0.0))
    assert (even["share"], even["low"], even["high"]) == (0.5, 0.5, 0.5)
    assert lucky["share"] == 0.5
    assert lucky["low"] <= 0 < lucky["high"]


def test_every_policy_on_every_source_at_every_price() -> None:
    sources = {name: [session("d", 1.0), session("c", 2.0, 50.0)] for name in ("x", "y")}
    ticks: list[str] = []
    result = measure(sources, lambda one: one.split_by, ticks.append)
    policies = {*POLICIES, "clairvoyant"}
    assert len(ticks) == 2 * len(policies)
    assert {(r["policy"], r["source"], r["b"]) for r in result["rows"]} == {
        (policy, source, b) for policy in policies for source in sources for b in BENEFITS_S
    }
    of, interval = ["policy", "source", "tools", "b"], ["share", "low", "high"]
    keys = [*of, "utility", *interval, "accuracy", "cover50", "cover90", "us"]
    assert all(list(row) == keys for row in result["rows"])
    assert not any(row["tools"] for row in result["rows"]), "no turn named a tool"
    shares = {(r["policy"], r["b"]): r["share"] for r in result["rows"]}
    assert shares["clairvoyant", 10.0] == 1
    assert shares["clairvoyant", 0.5] is None, "there was nothing to have"
    assert len(result["against"]) == 2 * (len(policies) - 2) * len(BENEFITS_S)
    assert OURS not in {row["policy"] for row in result["against"]}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.policy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_command_prints_one_object_and_explains_what_it_cannot_read(tmp_path: Path) -> None:
    requests = [request(n * 10, 8.0 if n else 0.0) for n in range(5)]
    sessions = [{"id": f"{n}", "dup": False, "reqs": requests} for n in range(6)]
    write_sessions(tmp_path / "agents.jsonl.gz", *sessions)
    done = run("--traces", str(tmp_path), "--folds", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"rows", "against", "measured"}
    table = run("--traces", str(tmp_path))
    assert "occupancy" in table.stdout
    (tmp_path / "agents.jsonl.gz").unlink()
    for folder in (tmp_path, tmp_path / "missing"):
        refused = run("--traces", str(folder))
        assert refused.returncode == 2
        assert str(folder) in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded sessions here")
def test_our_policy_reaches_the_documented_figures_on_recorded_sessions() -> None:
    only = "claude_code_sessions"
    sources = {only: read_sources(TRACES)[only]}
    result = measure(sources, lambda one: fold_of(one, 5), lambda done: None)
    ours = {row["b"]: row for row in result["rows"] if row["policy"] == OURS}
    for b, least in ((10.0, 0.23), (20.0, 0.58), (40.0, 0.80)):
        assert ours[b]["share"] >= least
    for quantile, key in ((0.5, "cover50"), (0.9, "cover90")):
        assert ours[10.0][key] == pytest.approx(quantile, abs=0.05)
    for row in result["against"]:
        assert row["high"] >= 0, f"worse than {row}"
