"""Recorded sessions of coding agents as jobs of a simulation.

The file has one session a line (see ``bench.forecast.gaps``): of every request its tokens, those
shared with the request before, and the gap before it; of every sub-agent its own requests and
how long it took. A sub-agent begins when the request before it ends, and its parent goes on when
it is done, as much later as it did in the record.

A session is cut at a gap of over ten minutes: its user was away, and what follows is another job.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


@cache
def coding_agents(path: Path) -> Workload:
    """All jobs of a recording, in its order.

    Raises:
        OSError, ValueError: it cannot be read, or is no such recording.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            sessions = [json.loads(line) for line in lines]
        jobs = tuple(job for one in sessions if not one["dup"] for job in _jobs(one))
    except (KeyError, TypeError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path.name} has no sessions of coding agents: {error!r}") from error
    return Workload("coding-agents", jobs, Hints.RIGHT, BLOCK)


def _jobs(session: Mapping[str, Any]) -> Iterator[SimJob]:
    rows: Sequence[Request] = session["reqs"]
    agents: dict[int, list[Request]] = {}  # of the main request that started them
    main: list[Request] = []
    for row in rows:
        if row.get("k") == "sub":
            agents.setdefault(len(main) - 1, []).append(row)
        else:
            main.append(row)
    part = 0
    begin = 0
    for at in range(1, len(main) + 1):
        away = at == len(main) or main[at]["gap"] is None or main[at]["gap"] > AWAY_S
        if not away:
            continue
        if at - begin >= FEWEST_TURNS:
            end = min(at, begin + MOST_TURNS)
            yield _job(f"{session['id']}/{part}", main[begin:end], agents, begin)
            part += 1
        begin = at


def _job(
    name: str, requests: Sequence[Request], agents: Mapping[int, Sequence[Request]], first: int
) -> SimJob:
    turns = []
    context = 0
    for at, request in enumerate(requests):
        shared = min(request["lcp"], context, request["in"] - 1) if at else 0
        last = at + 1 == len(requests)
        gap_s = 0.0 if last else float(requests[at + 1]["gap"])
        began = () if last else tuple(_agent(name, one) for one in agents.get(first + at, ()))
        if began:
            gap_s = max(0.0, gap_s - max(one["dur_ms"] for one in agents[first + at]) / 1e3)
        tool = "" if request["stop"] == NO_TOOL_STOP else "tool"
        output = max(1, request["out"])
        turns.append(SimTurn(shared, request["in"] - shared, output, gap_s, tool, began))
        context = request["in"] + output
    return SimJob(name, 0.0, tuple(turns))


def _agent(parent: str, row: Request) -> SimJob:
    rows = [one for one in row["reqs"] if one["in"] > 0]
    until = next((i for i, one in enumerate(rows) if i and one["gap"] is None), len(rows))
    return _job(f"{parent}/{row['id']}", rows[: min(until, MOST_TURNS)], {}, 0)
