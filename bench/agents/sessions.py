"""Recorded sessions of agents, as turns with their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .left_out import LeftOut
from .recorded_rows import RecordingError, Row, check_times, known, read_rows, real, text

FIELDS = {"session_id", "input", "output", "timestamp"}
CHARACTERS_PER_TOKEN = 4
"""Assumed of recorded answers, whose time is part of what lies between two requests."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A turn as it was recorded; ``at`` in µs."""

    session: str
    at: int
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Contents of a file.

    Attributes:
        sessions: each in the order of its turns; none is empty.
        nulls: what is left out since a value is null.
    """

    sessions: list[list[Recorded]]
    nulls: LeftOut


def recording(folder: Path, stem: str) -> Path:
    """``stem.jsonl.gz``, or ``stem.jsonl`` where there is no such file."""
    packed = folder / f"{stem}.jsonl.gz"
    return packed if packed.exists() else folder / f"{stem}.jsonl"


def read_sessions(path: Path) -> list[list[Recorded]]:
    """The sessions of a file, as ``read_recording`` finds them.

    Raises:
        RecordingError: see there.
    """
    return read_recording(path).sessions


def read_recording(path: Path) -> Recording:
    """The sessions of a file, plain or gzipped.

    A session ends before its first turn that has a null. One with a turn of unknown time is left
    out, and so are turns of no session.

    Raises:
        RecordingError: no such file, its lines are not turns with their texts, or all have nulls.
    """
    rows = read_rows(path, _turn)
    if not rows:
        raise RecordingError(f"{path} is empty")
    by_session: dict[str | None, list[_Turn]] = defaultdict(list)
    for row in rows:
        by_session[row.session].append(row)
    found = [_known(session) for session in by_session.values()]
    lost = [
        len(session) - len(turns)
        for session, turns in zip(by_session.values(), found, strict=True)
        if len(turns) < len(session)
    ]
    sessions = sorted((turns for turns in found if turns), key=lambda turns: turns[0].at)
    if not sessions:
        raise RecordingError(f"{path} has no session without nulls")
    check_times(
        path,
        "microseconds",
        (
            ((later.at - turn.at) / 1e6, len(turn.answer) / CHARACTERS_PER_TOKEN)
            for session in sessions
            for turn, later in pairwise(session)
        ),
    )
    return Recording(sessions, LeftOut(len(lost), sum(lost)))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn as the file has it; None for null."""

    session: str | None
    at: float | None
    prompt: str | None
    answer: str | None


def _turn(row: Row) -> _Turn:
    if not row.keys() >= FIELDS:
        lacks = ", ".join(sorted(FIELDS - row.keys()))
        raise ValueError(f"it has no {lacks}: it is no turn of LMCache's agent traces")
    session, at = known(row, "session_id", text), known(row, "timestamp", real)
    return _Turn(session, at, known(row, "input", text), known(row, "output", text))


def _known(session: Sequence[_Turn]) -> list[Recorded]:
    """The turns of a session up to its first null."""
    found = list[Recorded]()
    if any(turn.session is None or turn.at is None for turn in session):
        return found
    for turn in sorted(session, key=lambda turn: turn.at or 0.0):
        if turn.prompt is None or turn.answer is None:
            break
        found.append(Recorded(turn.session or "", int(turn.at or 0), turn.prompt, turn.answer))
    return found
