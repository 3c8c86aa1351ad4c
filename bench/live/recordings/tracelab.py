"""TraceLab's replay CSV: a row for each round of a session, with lengths in tokens.

``prefix_len`` tokens of a round's prompt are shared with the session's previous round, and
``input_len`` come after them. ``tool_wait_after_ms`` is the gap after the round. A prefix may be
longer than the session's context so far, such as the system prompt of a first round: what no round
of the session has sent before is sent as new tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Round:
    session: str
    number: int
    prefix: int
    added: int
    output: int
    gap_s: float


def is_tracelab(path: Path) -> bool:
    """True if a file's first line has the columns of TraceLab's CSV."""
    try:
        with open_lines(path) as file:
            header = next(lines_of(file), b"").decode()
    except (OSError, ValueError):
        return False  # the reader of the recording reports it
    return set(COLUMNS) <= {name.strip() for name in header.split(",")}


def tracelab_rounds(path: Path) -> Workload:
    """Jobs of a recording, one a session, in the order of their first rows.

    Raises:
        RecordingError: it cannot be read, or a session has a round twice.
    """
    sessions: dict[str, list[_Round]] = defaultdict(list)
    for one in read_table(path, _round):
        sessions[one.session].append(one)
    if not sessions:
        raise RecordingError(f"{path} has no rounds")
    jobs = []
    for name, rounds in sessions.items():
        if len({one.number for one in rounds}) < len(rounds):
            raise RecordingError(f"{path}: session {name} has a round_idx twice")
        jobs.append(_job(name, sorted(rounds, key=lambda one: one.number)))
    return Workload(path.name, tuple(jobs), Hints.RIGHT)


def _round(row: Row) -> _Round:
    if lacking := [name for name in COLUMNS if row.get(name) in (None, "")]:
        raise ValueError(f"it has no {', '.join(lacking)}, but {names(row)}")
    identity = row["session_id"]
    return _Round(
        session=f"{identity:g}" if isinstance(identity, float) else identity,
        number=whole(row, "round_idx"),
        prefix=whole(row, "prefix_len"),
        added=whole(row, "input_len"),
        output=max(1, whole(row, "output_len")),
        gap_s=real(row, "tool_wait_after_ms") / 1e3,
    )


def _job(name: str, rounds: list[_Round]) -> SimJob:
    turns = []
    context = 0
    for at, one in enumerate(rounds):
        prompt = max(1, one.prefix + one.added)
        shared = min(one.prefix, context, prompt - 1)
        last = at + 1 == len(rounds)
        turns.append(SimTurn(shared, prompt - shared, one.output, 0.0 if last else one.gap_s))
        context = prompt + one.output
    return SimJob(name, 0.0, tuple(turns))
