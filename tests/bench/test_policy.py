"""The policy benchmark reads what it is given and counts what it says."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.bench.common.paths import ROOT
from tiered_kv.bench.forecast.clairvoyant import Clairvoyant
from tiered_kv.bench.forecast.gaps import Gap, Session, read_sources
from tiered_kv.bench.policy import BENEFITS_S, OURS, Outcome, difference, measure, replay, utility
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, JobKey, Tier, TurnEnd
from tiered_kv.policies.occupancy import Occupancy
from tiered_kv.policies.registry import POLICIES

TRACES = ROOT.parent / "shared" / "traces"
LEARNED, TESTED = "d", "c"  # ids by the second byte of their SHA-256


def session(name: str, *gaps: float) -> Session:
    turns = (TurnEnd(JobKey("", name), n, False, False, 1000) for n in range(1, len(gaps) + 1))
    return Session(name, [Gap(turn, gap) for turn, gap in zip(turns, gaps, strict=True)])


# -- reading ----------------------------------------------------------------------------


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


def test_what_holds_no_sessions_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# Traces\n")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8bnot gzip")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "half.jsonl").write_text('{"id": 1\n')
    assert read_sources(tmp_path) == {}
    assert capsys.readouterr().err.count("holds no sessions") == 4


def test_the_split_is_by_the_second_byte_of_the_hash() -> None:
    assert session(LEARNED, 1.0).is_learned_from
    assert not session(TESTED, 1.0).is_learned_from


# -- counting ---------------------------------------------------------------------------


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
    found = replay(Clairvoyant(), [session(TESTED, *gaps)])
    for benefit_s, made in found.items():
        assert made.utilities == pytest.approx([max(0.0, benefit_s - gap) for gap in gaps])
        assert made.row["accuracy"] == 1


class Watched(Clairvoyant):
    """Pins everything, and notes what it was told and asked."""

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
    policy = Watched()
    found = replay(policy, [session(TESTED, 5.0, 6.0), session(LEARNED, 7.0)])
    assert policy.seen == ["d1=7", "c1?", "c1=5", "c2?", "c2=6"]
    assert found[5.0].utilities.tolist() == [-1.0, -1.0]
    assert found[5.0].row["accuracy"] == 0.5
    assert found[5.0].row["cover50"] is None


def test_coverage_is_measured_where_there_is_a_forecast() -> None:
    row = replay(Occupancy(), [session(LEARNED, *[2.0] * 60), session(TESTED, *[2.0] * 60)])[
        5.0
    ].row
    assert row["cover90"] == 1
    assert row["us"] != 0


def test_a_source_without_sessions_to_test_on_is_refused() -> None:
    with pytest.raises(ValueError, match="no sessions to test on"):
        replay(Clairvoyant(), [session(LEARNED, 1.0)])


def outcome(utilities: list[float], sessions: list[int]) -> Outcome:
    return Outcome(np.array(utilities), np.array(sessions, np.intp), {})


def test_a_difference_that_all_sessions_share_is_certain_and_one_of_a_single_session_is_not() -> (
    None
):
    sessions = [n // 2 for n in range(40)]
    zero = outcome([0.0] * 40, sessions)
    shared = difference(outcome([1.0] * 40, sessions), zero)
    assert shared == {"difference": 1.0, "low": 1.0, "high": 1.0}
    lucky = difference(outcome([20.0, 20.0] + [0.0] * 38, sessions), zero)
    assert lucky["difference"] == 1.0
    assert float(str(lucky["low"])) <= 0 < float(str(lucky["high"]))


def test_every_policy_on_every_source_at_every_price() -> None:
    sources = {name: [session(LEARNED, 1.0), session(TESTED, 2.0, 50.0)] for name in ("x", "y")}
    ticks: list[str] = []
    result = measure(sources, ticks.append)
    policies = {*POLICIES, "clairvoyant"}
    assert len(ticks) == 2 * len(policies)
    assert {(r["policy"], r["source"], r["b"]) for r in result["rows"]} == {
        (policy, source, b) for policy in policies for source in sources for b in BENEFITS_S
    }
    keys = ["policy", "source", "b", "utility", "share", "accuracy", "cover50", "cover90", "us"]
    assert all(list(row) == keys for row in result["rows"])
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
    sessions = [{"id": name, "dup": False, "reqs": requests} for name in (LEARNED, TESTED)]
    write_sessions(tmp_path / "agents.jsonl.gz", *sessions)
    done = run("--traces", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"rows", "against"}
    table = run("--traces", str(tmp_path))
    assert "occupancy" in table.stdout
    (tmp_path / "agents.jsonl.gz").unlink()
    for folder in (tmp_path, tmp_path / "missing"):
        refused = run("--traces", str(folder))
        assert refused.returncode == 2
        assert str(folder) in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded sessions here")
def test_what_is_promised_of_recorded_sessions() -> None:
    result = measure(read_sources(TRACES), lambda done: None)
    ours = {
        row["b"]: row
        for row in result["rows"]
        if row["policy"] == OURS and row["source"] == "claude_code_sessions"
    }
    for b, least in ((10.0, 0.15), (20.0, 0.56), (40.0, 0.81)):
        assert float(str(ours[b]["share"])) >= least
    for quantile, key in ((0.5, "cover50"), (0.9, "cover90")):
        assert float(str(ours[10.0][key])) == pytest.approx(quantile, abs=0.05)
    for row in result["against"]:
        if row["source"] == "claude_code_sessions":
            assert float(str(row["high"])) >= 0, f"worse than {row}"
