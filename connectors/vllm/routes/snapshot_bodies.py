"""Bodies of requests about snapshots, read without trusting them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from tiered_kv.policies.jobs.hints import INFERRED_PREFIX, MAX_JOB_ID_CHARS
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.snapshot_files import check_name

from .refusals import Refusal

MAX_BODY_BYTES = 64 << 10
"""Longest body that is read."""
MOST_FORKS = 64
"""Jobs that one is forked into at once, at most."""
DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 3600.0
"""Wait for the end of an operation unless the body says otherwise, and the longest, seconds."""

_NEEDED = object()


def is_name(text: str) -> bool:
    """True if a snapshot may have this name."""
    try:
        check_name(text)
    except SnapshotError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body.

    Attributes:
        read: reads its value, given its name and what is there; raises a refusal.
        default: value of a field that is not there; none if it is needed.
    """

    read: Callable[[str, object], Any]
    default: Any = _NEEDED


def read_flag(name: str, value: object) -> bool:
    """Read a field that is true or false."""
    if not isinstance(value, bool):
        raise Refusal(400, f"{name} is true or false.")
    return value


def read_name(name: str, value: object) -> str:
    """Read the name of a snapshot."""
    if not isinstance(value, str) or not is_name(value):
        raise Refusal(
            400,
            f"{name} is the name of a snapshot: a letter or digit, then up to 99 letters, digits, "
            "dots, dashes and underscores, without .zip at the end.",
        )
    return value


def read_job_id(name: str, value: object) -> str:
    """Read the id of a job that is there. It may have any characters."""
    if not _may_be_job_id(value):
        raise Refusal(
            400, f"{name} is the id of a job: a text of 1 to {MAX_JOB_ID_CHARS} characters."
        )
    return str(value)


def read_new_job_id(name: str, value: object) -> str:
    """Read the id of a job that is to be: one that a client's turns can name."""
    job = read_job_id(name, value)
    if job.startswith(INFERRED_PREFIX):
        raise Refusal(400, f"{name} begins with {INFERRED_PREFIX.strip()}, as no job's id may.")
    return job


def read_new_job_id_or_none(name: str, value: object) -> str | None:
    """Read the id of a job that is to be; null names none."""
    return None if value is None else read_new_job_id(name, value)


def read_new_job_ids(name: str, value: object) -> list[str]:
    """Read the ids of jobs that are to be."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_FORKS:
        raise Refusal(400, f"{name} is a list of 1 to {MOST_FORKS} ids of jobs.")
    jobs = [read_new_job_id(f"Each of {name}", one) for one in value]
    if len(set(jobs)) < len(jobs):
        raise Refusal(400, f"{name} has an id twice: give each job its own.")
    return jobs


def read_timeout(name: str, value: object) -> float:
    """Read how long to wait, seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_TIMEOUT_S:  # type: ignore[operator]
        raise Refusal(400, f"{name} is a number of seconds from 0 to {MOST_TIMEOUT_S:.0f}.")
    return float(value)  # type: ignore[arg-type]


TIMEOUT = "timeout_s"
_OF_ALL = {
    "exact": Field(read_flag, False),
    TIMEOUT: Field(read_timeout, DEFAULT_TIMEOUT_S),
}
SNAPSHOT = {
    "job": Field(read_job_id),
    "name": Field(read_name),
    "wait_turn": Field(read_flag, False),
    "stop": Field(read_flag, False),
    **_OF_ALL,
}
RESTORE = {"name": Field(read_name), "job": Field(read_new_job_id_or_none, None), **_OF_ALL}
FORK = {"job": Field(read_job_id), "as": Field(read_new_job_ids), **_OF_ALL}


async def read_body(request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read the body of a request: a JSON object with these fields.

    Web pages cannot send its content type to a server of another origin unless that allows it.

    Raises:
        Refusal: it is none.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "The body is JSON: send Content-Type: application/json.")
    return read_fields(await _bytes(request), fields)


def read_fields(body: bytes, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read a JSON object with these fields.

    Raises:
        Refusal: it is none.
    """
    said = _parsed(body)
    if not said.keys() <= fields.keys():
        raise Refusal(
            400, f"The body has a field that is not known here: known are {', '.join(fields)}."
        )
    lacks = [name for name in fields if fields[name].default is _NEEDED and name not in said]
    if lacks:
        raise Refusal(400, f"The body lacks {' and '.join(lacks)}.")
    return {
        name: one.read(name, said[name]) if name in said else one.default
        for name, one in fields.items()
    }


async def _bytes(request: Request) -> bytes:
    """The whole body. Of one that is too long no more is read than tells that."""
    pieces, length = [], 0
    try:
        async with aclosing(request.stream()) as stream:
            async for piece in stream:
                length += len(piece)
                if length > MAX_BODY_BYTES:
                    raise Refusal(413, f"The body has more than {MAX_BODY_BYTES >> 10} KiB.")
                pieces.append(piece)
    except ClientDisconnect:
        raise Refusal(400, "The body was not sent to its end.") from None
    return b"".join(pieces)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is not JSON, or has a name twice.") from None
    if not isinstance(said, dict):
        raise Refusal(400, "The body is not an object of JSON.")
    return said


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _may_be_job_id(value: object) -> bool:
    """True for what a job may be called. Half a character cannot be sent to an engine."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_JOB_ID_CHARS:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)
