"""Recorded sessions of coding agents as jobs of a simulation.

The file has one session per line (see ``bench.gaps``). A request has its token counts, the number
of tokens shared with the previous request, and the gap before it. A sub-agent has its requests and
its duration. A sub-agent starts when the request before it ends. Its parent continues after the
sub-agent has finished, with the same delay as in the recording.

A session is split at gaps of over ten minutes, because the user was away; the rest becomes another
job. It is also split where a gap, or the number of tokens shared with the previous request, is
null, and at a request without tokens, which is left out. A sub-agent's requests from the first null
on are left out. A sub-agent of unknown duration is left out, and its time is part of its parent's
gap. A job with fewer than three turns is left out. All of these are counted. A job's turns after
``MOST_TURNS``, sub-agents after a job's last turn, and sessions marked as duplicates are left out
without being counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

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
"""Maximum turns per job. Further turns are left out, so that no single session dominates a run."""
FEWEST_TURNS = 3
BLOCK = 128
"""Tokens per block. Contexts have up to 100,000 tokens, and the simulator takes time for every
block."""
NO_TOOL_STOP = "end_turn"
NUMBERS: Mapping[str, Callable[[Row, str], float]] = {
    **dict.fromkeys(("in", "out", "lcp"), whole),
    **dict.fromkeys(("gap", "dur_ms"), real),
}
"""Parsers of a request's numbers, by field name."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request of a session, and the sub-agents that started after it."""

    request: Row
    agents: list[_Agent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Agent:
    """A sub-agent, and its requests that can be played."""

    name: object
    took_s: float
    turns: list[_Turn]


@cache
def coding_agents(path: Path) -> Workload:
    """Read all jobs of a recording, in the order of the file.

    Raises:
        bench.agents.recorded_rows.RecordingError: the file cannot be read, has another format, or
            has no job.
    """
    sessions = read_rows(path, _session)
    return workload_of([one for one in sessions if not one.get("dup")], path.name)


def workload_of(sessions: Sequence[Row], name: str) -> Workload:
    """Return all jobs of these sessions, in order.

    Args:
        name: name of the recording.

    Raises:
        bench.agents.recorded_rows.RecordingError: a value is invalid, or there is no job.
    """
    jobs, nulls, too_short = list[SimJob](), LeftOut(), LeftOut()
    for at, session in enumerate(sessions):
        try:
            parts, lost = _parts(session)
        except ValueError as error:
            raise RecordingError(f"{name}, session {at + 1}: {error}") from error
        identity = f"line {at}" if session.get("id") is None else str(session["id"])
        long = [part for part in parts if len(part) >= FEWEST_TURNS]
        jobs += (_job(f"{identity}/{number}", part) for number, part in enumerate(long))
        short = sum(map(len, parts)) - sum(map(len, long))
        nulls += LeftOut(int(lost > 0), lost)
        too_short += LeftOut(int(short > 0), short)
    if not jobs:
        raise RecordingError(
            f"{name} has no job of {FEWEST_TURNS} turns or more: {too_short.turns} turns of "
            f"{too_short.sessions} sessions are in shorter jobs, and {nulls.turns} turns of "
            f"{nulls.sessions} sessions have nulls. Record longer sessions"
        )
    left_out = {"nulls": nulls, "too_short": too_short}
    return Workload("coding-agents", tuple(jobs), Hints.RIGHT, BLOCK, left_out=left_out)


def _session(row: Row) -> Row:
    if "reqs" not in row:
        raise ValueError(f"it lacks reqs, and has {names(row)}: it is not a coding agent's session")
    return row


def _parts(session: Row) -> tuple[list[list[_Turn]], int]:
    """Return the turns of each job of a session, and the number of requests with nulls."""
    parts: list[list[_Turn]] = []
    nulls, cut = 0, True
    for row in _rows(session):
        if row.get("k") == "sub":
            asked = [one for one in _rows(row) if one.get("in") != 0]  # 0 tokens are not a request
            known = [] if row.get("dur_ms") is None else list(_known_ones(asked))
            nulls += len(asked) - len(known)
            if parts and known:
                turns = [_Turn(one) for one in known]
                parts[-1][-1].agents.append(_Agent(row.get("id"), row["dur_ms"] / 1e3, turns))
        elif _lacks_tokens(row):
            nulls += 1
            cut = True
        else:
            if cut or _is_apart(row) or row["gap"] > AWAY_S:
                parts.append([])
            parts[-1].append(_Turn(row))
            cut = False
    return parts, nulls


def _rows(record: Row) -> list[Row]:
    """Return the requests of a session or sub-agent, with validated numbers. A null request becomes
    an empty row.
    """
    return [
        {**row, **{name: known(row, name, read) for name, read in NUMBERS.items() if name in row}}
        for row in rows_in(record, "reqs")
    ]


def _known_ones(asked: Sequence[Row]) -> Iterator[Row]:
    """Yield a sub-agent's requests before the first incomplete request."""
    for at, row in enumerate(asked):
        if _lacks_tokens(row) or (at and _is_apart(row)):
            return
        yield row


def _lacks_tokens(row: Row) -> bool:
    return not row.get("in") or row.get("out") is None


def _is_apart(row: Row) -> bool:
    """Return True if the recording does not relate the request to the previous one."""
    return row.get("gap") is None or row.get("lcp") is None


def _job(name: str, turns: Sequence[_Turn]) -> SimJob:
    made, context = list[SimTurn](), 0
    turns = turns[:MOST_TURNS]
    for turn, following in zip(turns, (*turns[1:], None), strict=True):
        request = turn.request
        shared = min(request["lcp"], context, request["in"] - 1) if made else 0
        agents = turn.agents if following is not None else []
        gap_s = float(following.request["gap"]) if following is not None else 0.0
        if agents:
            gap_s = max(0.0, gap_s - max(one.took_s for one in agents))
        began = tuple(_job(f"{name}/{one.name}", one.turns) for one in agents)
        tool = "" if request.get("stop") == NO_TOOL_STOP else "tool"
        output = max(1, request["out"])
        made.append(SimTurn(shared, request["in"] - shared, output, gap_s, tool, began))
        context = request["in"] + output
    return SimJob(name, 0.0, tuple(made))
