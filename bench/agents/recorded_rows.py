"""Rows of user-supplied recordings. Values are validated as they are read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, TypeVar

from tiered_kv import json_fields
from tiered_kv.json_fields import lines_of, open_lines, read_json

Row = Mapping[str, Any]
Read = TypeVar("Read")

DECODE_TOKENS_PER_S = 60.0
"""Assumed decoding speed of recorded answers, for recordings that have only request times."""
LEAST_GAP_S = 0.05
FEWEST_PAIRS = 3
"""Minimum number of request pairs for a check of their times."""
MOST_SAID = 200
"""Maximum length of the field names quoted in a message, characters."""
MOST = 2**53
"""Largest accepted number. Doubles represent all whole numbers up to it."""


class RecordingError(ValueError):
    """A recording that cannot be used. The message gives the reason in one sentence."""


def read_rows(path: Path, read: Callable[[Row], Read]) -> list[Read]:
    """Read the rows of a file: one JSON object per line, or a single object over several lines.
    Blank lines are skipped.

    Args:
        read: converts a row, or raises ``ValueError``.

    Raises:
        RecordingError: the file or one of its lines cannot be read. The message has the line
            number.
    """
    with _sentences(path) as at, open_lines(path) as file:
        return [read(row) for row in _rows(file, at)]


def read_table(path: Path, read: Callable[[Row], Read]) -> list[Read]:
    """Read the rows of a CSV file with a header. Numeric values become numbers.

    Args:
        read: converts a row, or raises ``ValueError``.

    Raises:
        RecordingError: the file or one of its rows cannot be read. The message has the line number.
    """
    with _sentences(path) as at, open_lines(path) as file:

        def lines() -> Iterator[str]:
            for line in lines_of(file):
                at.line += 1
                yield line.decode()

        table = csv.DictReader(lines(), restval="", strict=True)
        return [read({name: _value(value) for name, value in row.items()}) for row in table]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def first_row(path: Path) -> Row:
    """Return the first row of a file.

    Raises:
        RecordingError: the file cannot be read, or has no rows.
    """
    with _sentences(path) as at, open_lines(path) as file:
        row = next(_rows(file, at), None)
    if row is None:
        raise RecordingError(f"{path} is empty")
    return row


@dataclass(slots=True)
class _At:
    """Number of the line that is being read, for error messages."""

    line: int = 0


@contextmanager
def _sentences(path: Path) -> Iterator[_At]:
    """Convert errors to ``RecordingError``s whose messages name the file and the line."""
    at = _At()
    try:
        yield at
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordingError(
            f"{path}, line {at.line}: it is neither text in UTF-8 nor gzipped"
        ) from error
    except json.JSONDecodeError as error:
        why = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise RecordingError(f"{path}, line {at.line}: it is not JSON ({why})") from error
    except (ValueError, csv.Error) as error:
        raise RecordingError(f"{path}, line {at.line}: {error}") from error


def _rows(file: IO[bytes], at: _At) -> Iterator[Row]:
    lines = lines_of(file)
    for line in lines:
        at.line += 1
        if not line.strip():
            continue
        try:
            found = read_json(line)
        except json.JSONDecodeError:
            rest = b"".join(lines) if at.line == 1 else b""
            if not rest.strip():
                raise
            found = read_json(line + rest)
        yield as_row(found)


def as_row(found: object) -> Row:
    """Return the value if it is a JSON object.

    Raises:
        ValueError: the value is not a JSON object.
    """
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def rows_in(row: Row, name: str) -> list[Row]:
    """Return the list of objects in a field. A null in the list stands for an empty object. A
    missing or null field is an empty list.

    Raises:
        ValueError: the field is not a list of objects and nulls.
    """
    found = _checked(row, name, json_fields.items) if row.get(name) is not None else []
    return [{} if one is None else as_row(one) for one in found]


def real(row: Row, name: str) -> float:
    """Return the number in a field.

    Raises:
        ValueError: the field is missing or null, or is not a number from 0 to ``MOST``.
    """
    return _checked(row, name, lambda found: json_fields.real(found, most=MOST))


def whole(row: Row, name: str) -> int:
    """Return the whole number in a field.

    Raises:
        ValueError: the field is missing or null, or is not a whole number from 0 to ``MOST``.
    """
    found = real(row, name)
    if found != int(found):
        raise ValueError(f"{name}: {found:g} is not a whole number")
    return int(found)


def text(row: Row, name: str) -> str:
    """Return the text in a field.

    Raises:
        ValueError: the field is missing or null, or is not a text.
    """
    return _checked(row, name, lambda found: json_fields.string(found, most=MOST))


def identity(row: Row, name: str) -> int | str:
    """Return the identifier in a field, which is a whole number or a text.

    Raises:
        ValueError: the field is missing or null, or has another type.
    """
    return _checked(row, name, _identity)


def hashes(row: Row) -> tuple[int | str, ...]:
    """Return the hashes of a prompt's blocks, from the field ``hash_ids``.

    Raises:
        ValueError: the field is missing or null, or is not a list of whole numbers and texts.
    """
    return _checked(row, "hash_ids", lambda found: tuple(map(_identity, json_fields.items(found))))


def _identity(found: object) -> int | str:
    if isinstance(found, bool) or not isinstance(found, (int, str)):
        raise ValueError(f"{found!r:.40} is neither a whole number nor a text")
    return found


def known(row: Row, name: str, read: Callable[[Row, str], Read]) -> Read | None:
    """Return the value of a field, parsed by ``read``; None if the field is null or missing.

    Args:
        read: parses the field with this name, or raises ``ValueError``.
    """
    return None if row.get(name) is None else read(row, name)


def _checked(row: Row, name: str, check: Callable[[object], Read]) -> Read:
    if row.get(name) is None:
        raise ValueError(f"it lacks {name}, and has {names(row)}")
    try:
        return check(row[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def names(row: Row) -> str:
    """Return the names of a row's fields in printable characters, shortened if too long."""
    found = ", ".join(row).encode("ascii", "backslashreplace").decode()
    return (found if len(found) <= MOST_SAID else f"{found[:MOST_SAID]}...") or "no field"


def common_blocks(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of leading hashes that two prompts have in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def gap_between(apart_s: float | None, output_tokens: float) -> float:
    """Estimate the seconds from an answer to the next request, from the times of both requests.
    Returns at least 0.05 s, or 0 after the last request.

    Args:
        apart_s: seconds from request to request; None after the last request.
        output_tokens: answer length. The answer is assumed to take 1 s per 60 tokens.
    """
    if apart_s is None:
        return 0.0
    return max(LEAST_GAP_S, apart_s - output_tokens / DECODE_TOKENS_PER_S)


def check_times(path: Path, unit: str, pairs: Iterable[tuple[float, float]]) -> None:
    """Reject a recording in which every gap is negative, because its times are most likely in
    another unit.

    Args:
        unit: unit that the times in the file should have.
        pairs: for each request with a successor in its job, the seconds until the successor and the
            number of tokens in the answer.

    Raises:
        RecordingError: there are at least three pairs, and in every pair the successor was sent
            before the first request's answer can have ended.
    """
    found = list(pairs)
    some_s = max((apart_s for apart_s, _ in found), default=0.0)
    no_gap = all(apart_s < tokens / DECODE_TOKENS_PER_S for apart_s, tokens in found)
    if len(found) >= FEWEST_PAIRS and some_s > 0 and no_gap:
        raise RecordingError(
            f"{path} has no gaps between turns: each of {len(found)} requests is followed by the "
            f"next within {some_s:.3g} s, before its answer can have ended. Convert the times to "
            f"{unit}."
        )
