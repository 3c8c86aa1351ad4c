"""TraceLab's replay CSV: one row per round of a session, with lengths in tokens.

``prefix_len`` tokens of a round's prompt are shared with the session's previous round, and
``input_len`` tokens follow. ``tool_wait_after_ms`` is the gap after the round. A prefix can be
longer than the session's context so far: in a first round, for example, it is the system prompt.
Tokens of a prefix that no earlier round of the session has sent count as new tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tiered_kv.bench.agents.recorded_rows import (
    RecordingError,
    Row,
    names,
    read_table,
    real,
    whole,
)
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.json_fields import lines_of, open_lines

COLUMNS = (
    "session_id",
    "round_idx",
    "prefix_len",
    "input_len",
    "output_len",
    "tool_wait_after_ms",
)


def is_tracelab(path: Path) -> bool:
    """Return True if a file's first line has the columns of TraceLab's CSV."""
    try:
        with open_lines(path) as file:
            header = next(lines_of(file), b"").decode()
    except (OSError, ValueError):
        return False  # the recording's reader reports the error
    return set(COLUMNS) <= {name.strip() for name in header.split(",")}


def tracelab_rounds(path: Path) -> Workload:
    """Read the jobs of a recording, one per session, in the order of their first rows.

    Raises:
        RecordingError: the file cannot be read or has no rounds, or a session has two rows for one
            round.
    """
    sessions: dict[str, dict[int, SimTurn]] = defaultdict(dict)
    for row in read_table(path, _checked):
        identity, number = row["session_id"], whole(row, "round_idx")
        name = f"{identity:g}" if isinstance(identity, float) else identity
        if number in sessions[name]:
            raise RecordingError(f"{path}: session {name} has two rows with the same round_idx")
        sessions[name][number] = _round(row)
    if not sessions:
        raise RecordingError(f"{path} has no rounds")
    jobs = tuple(_job(name, rounds) for name, rounds in sessions.items())
    return Workload(path.name, jobs, Hints.RIGHT)


def _checked(row: Row) -> Row:
    if lacking := [name for name in COLUMNS if row.get(name) in (None, "")]:
        raise ValueError(f"it lacks {', '.join(lacking)}, and has {names(row)}")
    whole(row, "round_idx")
    _round(row)
    return row


def _round(row: Row) -> SimTurn:
    """Return a recorded round as a turn. Its prefix may be longer than the context before it."""
    added, output = whole(row, "input_len"), max(1, whole(row, "output_len"))
    return SimTurn(whole(row, "prefix_len"), added, output, real(row, "tool_wait_after_ms") / 1e3)


def _job(name: str, rounds: Mapping[int, SimTurn]) -> SimJob:
    turns = list[SimTurn]()
    context = 0
    for number in sorted(rounds):
        prompt = max(1, rounds[number].prompt)
        shared = min(rounds[number].shared, context, prompt - 1)
        turns.append(replace(rounds[number], shared=shared, added=prompt - shared))
        context = prompt + turns[-1].output
    turns[-1] = replace(turns[-1], gap_s=0.0)
    return SimJob(name, 0.0, tuple(turns))
