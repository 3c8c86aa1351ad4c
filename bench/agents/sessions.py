"""Recorded sessions of agents, as turns with their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from .left_out import LeftOut
from .recorded_rows import RecordingError, Row, check_times, known, names, read_rows, real, text

READERS = {"session_id": text, "timestamp": real, "input": text, "output": text}
FIELDS = READERS.keys()
CHARACTERS_PER_TOKEN = 4
"""Assumed length of a token in recorded answers, to estimate their decoding time, which is part of
the time between two requests."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded turn.

    Attributes:
        at: time of the request, µs.
    """

    session: str
    at: int
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Contents of a recording.

    Attributes:
        sessions: turns of each session, in order; no session is empty.
        nulls: counts of sessions and turns that are left out because a value is null.
    """

    sessions: list[list[Recorded]]
    nulls: LeftOut


def recording(folder: Path, stem: str) -> Path:
    """Return the path of ``stem.jsonl.gz`` in the folder, or of ``stem.jsonl`` if there is no
    gzipped file.
    """
    packed = folder / f"{stem}.jsonl.gz"
    return packed if packed.exists() else folder / f"{stem}.jsonl"


def read_sessions(path: Path) -> list[list[Recorded]]:
    """Return only the sessions of ``read_recording``.

    Raises:
        RecordingError: as for ``read_recording``.
    """
    return read_recording(path).sessions


def read_recording(path: Path) -> Recording:
    """Read the sessions of a file, plain or gzipped, sorted by start.

    A session is cut before its first turn with a null text. Sessions in which a turn has no time
    are left out, and so are turns without a session.

    Raises:
        RecordingError: the file does not exist, has lines that are not turns with texts, has no
            session without a null in its first turn, or its times are not in microseconds.
    """
    by_session: dict[str | None, list[Row]] = defaultdict(list)
    for row in read_rows(path, _turn):
        by_session[row["session_id"]].append(row)
    if not by_session:
        raise RecordingError(f"{path} is empty")
    found = [_known(name, turns) for name, turns in by_session.items()]
    lost = [
        len(turns) - len(session)
        for turns, session in zip(by_session.values(), found, strict=True)
        if len(session) < len(turns)
    ]
    sessions = sorted(filter(None, found), key=lambda turns: turns[0].at)
    if not sessions:
        raise RecordingError(
            f"no session in {path} is usable: every session has a null id, or its first turn has a "
            "null timestamp or text"
        )
    apart = (
        ((later.at - turn.at) / 1e6, len(turn.answer) / CHARACTERS_PER_TOKEN)
        for session in sessions
        for turn, later in pairwise(session)
    )
    check_times(path, "microseconds", apart)
    return Recording(sessions, LeftOut(len(lost), sum(lost)))


def _turn(row: Row) -> dict[str, Any]:
    """Return a turn's validated fields. A field is None if its value is null.

    Raises:
        ValueError: a field is missing, or has the wrong type.
    """
    if not row.keys() >= FIELDS:
        raise ValueError(
            f"it lacks {', '.join(sorted(FIELDS - row.keys()))}, and has {names(row)}: it is not a "
            "turn of LMCache's agent traces"
        )
    return {name: known(row, name, read) for name, read in READERS.items()}


def _known(name: str | None, turns: Sequence[Row]) -> list[Recorded]:
    """Return the turns of a session, by time, before the first turn with a null text. Returns no
    turns if the session's name or any time is null.
    """
    if name is None or any(turn["timestamp"] is None for turn in turns):
        return []
    ordered = sorted(turns, key=lambda turn: float(turn["timestamp"]))
    return [
        Recorded(name, int(turn["timestamp"]), turn["input"], turn["output"])
        for turn in takewhile(lambda turn: None not in (turn["input"], turn["output"]), ordered)
    ]
