"""Recorded sessions of agents, as turns with their texts."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

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


def recording(folder: Path, stem: str) -> Path:
    """``stem.jsonl.gz``, or ``stem.jsonl`` where there is no such file."""
    packed = folder / f"{stem}.jsonl.gz"
    return packed if packed.exists() else folder / f"{stem}.jsonl"


def read_sessions(path: Path) -> list[list[Recorded]]:
    """The sessions of a file, plain or gzipped, each in the order of its turns.

    Raises:
        RecordingError: no such file, or its lines are not turns with their texts.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == GZIPPED else data
        rows = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not rows or not all(row.keys() >= FIELDS for row in rows):
        raise RecordingError(f"{path} is no recording of {', '.join(sorted(FIELDS))}")
    sessions: dict[str, list[Recorded]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["timestamp"])):
        turn = Recorded(row["session_id"], row["timestamp"], row["input"], row["output"])
        sessions[turn.session].append(turn)
    return list(sessions.values())
