"""Recorded sessions of coding agents as jobs of a simulation.

The file has one session a line (see ``bench.gaps``): of every request its tokens, those
shared with the request before, and the gap before it; of every sub-agent its own requests and
how long it took. A sub-agent begins when the request before it ends, and its parent goes on when
it is done, as much later as it did in the record.

A session is cut at a gap of over ten minutes: its user was away, and what follows is another job.
It is also cut where a gap, or the tokens shared with the previous request, are null. A request
without its tokens is left out, and so is what follows it in a sub-agent. A sub-agent of unknown
duration is left out: its time is part of its parent's gap. What is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import (
    RecordingError,
    Row,
    known,
    names,
    read_rows,
    real,
    rows_in,
    whole,
)

from .workload import Hints, SimJob, SimTurn, Workload

AWAY_S = 600.0
MOST_TURNS = 60
"""Turns of a job; the others are left out, so that no single session decides a run."""
FEWEST_TURNS = 3
BLOCK = 128
"""Tokens of a block: contexts have up to 100,000 tokens, and every block costs the simulator time.
docs/simulation.md says how far results differ from those with blocks of 64."""
NO_TOOL_STOP = "end_turn"

Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request of a session, and the sub-agents that began behind it."""

    request: Request
    agents: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Found:
    """Jobs of a session, and how many of its turns are left out."""

    jobs: tuple[SimJob, ...]
    nulls: int
    too_short: int


@cache
def coding_agents(path: Path) -> Workload:
    """All jobs of a recording, in its order.

    Raises:
        bench.agents.recorded_rows.RecordingError: it cannot be read, is no such recording, or has
            no job.
    """
    sessions = read_rows(path, _session)
    return workload_of([one for one in sessions if not one.get("dup")], path.name)


def workload_of(sessions: Sequence[Row], name: str) -> Workload:
    """All jobs of these sessions, in their order.

    Args:
        name: of the recording.

    Raises:
        bench.agents.recorded_rows.RecordingError: a value is none, or there is no job.
    """
    found = []
    for at, one in enumerate(sessions):
        try:
            found.append(_jobs(one, at))
        except ValueError as error:
            raise RecordingError(f"{name}, session {at + 1}: {error}") from error
    jobs = tuple(job for one in found for job in one.jobs)
    nulls = _left_out(one.nulls for one in found)
    too_short = _left_out(one.too_short for one in found)
    if not jobs:
        raise RecordingError(
            f"{name} has no job of {FEWEST_TURNS} turns or more: {too_short.turns} turns of "
            f"{too_short.sessions} sessions are in shorter ones, and {nulls.turns} turns of "
            f"{nulls.sessions} sessions have nulls. Record longer sessions"
        )
    left_out = {"nulls": nulls, "too_short": too_short}
    return Workload("coding-agents", jobs, Hints.RIGHT, BLOCK, left_out=left_out)


def _session(row: Row) -> Row:
    if "reqs" not in row:
        raise ValueError(f"it has no reqs, but {names(row)}: it is no session of a coding agent")
    return row


def _left_out(turns: Iterable[int]) -> LeftOut:
    """The sum over sessions, of each of which so many turns are left out."""
    some = [count for count in turns if count]
    return LeftOut(len(some), sum(some))


def _jobs(session: Row, line: int) -> _Found:
    name = f"line {line}" if session.get("id") is None else str(session["id"])
    parts: list[list[_Turn]] = []
    nulls = 0
    cut = True
    for row in _rows(session):
        if row.get("k") == "sub":
            nulls += len(_asked(row)) - len(_known(row))
            if parts:
                parts[-1][-1].agents.append(row)
        elif _lacks_tokens(row):
            nulls += 1
            cut = True
        else:
            if cut or _is_apart(row) or row["gap"] > AWAY_S:
                parts.append([])
            parts[-1].append(_Turn(row))
            cut = False
    long = [part for part in parts if len(part) >= FEWEST_TURNS]
    jobs = tuple(_job(f"{name}/{at}", part[:MOST_TURNS]) for at, part in enumerate(long))
    return _Found(jobs, nulls, sum(map(len, parts)) - sum(map(len, long)))


def _rows(record: Row) -> list[Request]:
    """Requests of a session or sub-agent, with their numbers checked; of one that is null nothing
    is known."""
    return [{**row, **_numbers(row)} for row in rows_in(record, "reqs")]


def _numbers(row: Row) -> dict[str, float | None]:
    counts = {name: known(row, name, whole) for name in ("in", "out", "lcp") if name in row}
    times = {name: known(row, name, real) for name in ("gap", "dur_ms") if name in row}
    return counts | times


def _lacks_tokens(row: Request) -> bool:
    return not row.get("in") or row.get("out") is None


def _is_apart(row: Request) -> bool:
    """True if it is not known how a request follows the one before."""
    return row.get("gap") is None or row.get("lcp") is None


def _job(name: str, turns: Sequence[_Turn]) -> SimJob:
    made = []
    context = 0
    for at, turn in enumerate(turns):
        request = turn.request
        shared = min(request["lcp"], context, request["in"] - 1) if at else 0
        last = at + 1 == len(turns)
        gap_s = 0.0 if last else float(turns[at + 1].request["gap"])
        agents = [] if last else [one for one in turn.agents if _known(one)]
        if agents:
            gap_s = max(0.0, gap_s - max(one["dur_ms"] for one in agents) / 1e3)
        began = tuple(
            _job(f"{name}/{one.get('id')}", [_Turn(row) for row in _known(one)[:MOST_TURNS]])
            for one in agents
        )
        tool = "" if request.get("stop") == NO_TOOL_STOP else "tool"
        output = max(1, request["out"])
        made.append(SimTurn(shared, request["in"] - shared, output, gap_s, tool, began))
        context = request["in"] + output
    return SimJob(name, 0.0, tuple(made))


def _asked(agent: Request) -> list[Request]:
    """The requests of a sub-agent; those of no tokens at all are none."""
    return [row for row in _rows(agent) if row.get("in") != 0]


def _known(agent: Request) -> list[Request]:
    """Requests of a sub-agent that can be played; none if its duration is unknown."""
    rows = _asked(agent)
    if agent.get("dur_ms") is None:
        return []
    unknown = (i for i, row in enumerate(rows) if _lacks_tokens(row) or (i and _is_apart(row)))
    return rows[: next(unknown, len(rows))]
