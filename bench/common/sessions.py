"""Recorded sessions of agents, as turns with their texts."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from .left_out import LeftOut

FIELDS = {"session_id", "input", "output", "timestamp"}
GZIPPED = b"\x1f\x8b"


class RecordingError(RuntimeError):
    """There is no such recording, or it is not one of sessions."""


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
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == GZIPPED else data
        rows = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not rows or not all(isinstance(row, dict) and row.keys() >= FIELDS for row in rows):
        raise RecordingError(f"{path} is no recording of {', '.join(sorted(FIELDS))}")
    by_session: dict[str | None, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_session[row["session_id"]].append(row)
    found = [_known(session) for session in by_session.values()]
    lost = [
        len(session) - len(turns)
        for session, turns in zip(by_session.values(), found, strict=True)
        if len(turns) < len(session)
    ]
    sessions = sorted((turns for turns in found if turns), key=lambda turns: turns[0].at)
    if not sessions:
        raise RecordingError(f"{path} has no session without nulls")
    return Recording(sessions, LeftOut(len(lost), sum(lost)))


def _known(session: Sequence[Mapping[str, Any]]) -> list[Recorded]:
    """The turns of a session up to its first null."""
    if any(row["session_id"] is None or row["timestamp"] is None for row in session):
        return []
    rows = sorted(session, key=lambda row: int(row["timestamp"]))
    known = takewhile(lambda row: None not in (row["input"], row["output"]), rows)
    return [
        Recorded(row["session_id"], int(row["timestamp"]), row["input"], row["output"])
        for row in known
    ]
