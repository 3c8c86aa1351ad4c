"""Routes for snapshots of jobs: ``/tiered_kv/snapshots``, ``/restores`` and ``/forks``.

No path is built from client input here. Engines look up a snapshot by its name, in their own
folder. Request bodies are untrusted.

An engine starts an operation for one query, and is then polled for its state until the operation
has finished. Each poll is a separate query, so that other queries are answered in between. An
operation continues whether or not a client waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from tiered_kv.config import ENV_PREFIX
from tiered_kv.connectors.runtime.snapshots.capture import fresh_salt
from tiered_kv.json_fields import flag, items, mapping, parse, real, text
from tiered_kv.policies.jobs.identity import INFERRED_PREFIX, MAX_JOB_ID_CHARS
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.snapshot_files import check_name
from tiered_kv.status import DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S

from .access import NO_JOB, Refusal, read_nothing

MAX_BODY_BYTES = 64 << 10
"""Maximum size of a body, bytes."""
MOST_FORKS = 64
"""Maximum number of jobs that one request creates by forking."""

_NEEDED = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body.

    Attributes:
        check: converts the JSON value to the field's value, or raises ``ValueError``.
        expected: the allowed values, as text for a refusal.
        default: value if the body lacks the field; without a default the field is required.
    """

    check: Callable[[object], Any]
    expected: str
    default: Any = _NEEDED


def _name_of_snapshot(value: object) -> str:
    name = text(value)
    check_name(name)
    return name


def _job_id(value: object) -> str:
    """Return the id of an existing job, which may contain any characters. Raises ValueError if it
    is empty, too long or not a string."""
    return text(value, 1, MAX_JOB_ID_CHARS)


def _new_job_id(value: object) -> str:
    """Return the id of a job to be created. Raises ValueError for an id that a client's turns
    cannot name."""
    job = _job_id(value)
    if job.startswith(INFERRED_PREFIX):
        raise ValueError
    return job


def _new_job_id_or_none(value: object) -> str | None:
    return None if value is None else _new_job_id(value)


def _new_job_ids(value: object) -> list[str]:
    jobs = list(map(_new_job_id, items(value, 1, MOST_FORKS)))
    if len(set(jobs)) < len(jobs):
        raise ValueError
    return jobs


def _timeout_s(value: object) -> float:
    return real(value, 0.0, MOST_TIMEOUT_S)


_FLAG = "true or false"
_NAME = (
    "the name of a snapshot: a letter or digit, then up to 99 letters, digits, dots, dashes and "
    "underscores, without .zip at the end"
)
_JOB = f"a job id: a string of 1 to {MAX_JOB_ID_CHARS} characters"
_NEW_JOB = f"{_JOB}, which must not start with {INFERRED_PREFIX.strip()}"
_NEW_JOBS = f"a list of 1 to {MOST_FORKS} different ids, each {_NEW_JOB}"
_SECONDS = f"a number of seconds from 0 to {MOST_TIMEOUT_S:.0f}"

TIMEOUT = "timeout_s"
_OF_ALL = {
    "exact": Field(flag, _FLAG, False),
    TIMEOUT: Field(_timeout_s, _SECONDS, DEFAULT_TIMEOUT_S),
}
SNAPSHOT = {
    "job": Field(_job_id, _JOB),
    "name": Field(_name_of_snapshot, _NAME),
    "wait_turn": Field(flag, _FLAG, False),
    "stop": Field(flag, _FLAG, False),
    **_OF_ALL,
}
RESTORE = {
    "name": Field(_name_of_snapshot, _NAME),
    "job": Field(_new_job_id_or_none, f"null or {_NEW_JOB}", None),
    **_OF_ALL,
}
FORK = {"job": Field(_job_id, _JOB), "as": Field(_new_job_ids, _NEW_JOBS), **_OF_ALL}


async def read_body(request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read the body of a request: a JSON object with these fields.

    Raises:
        Refusal: the body is invalid.
    """
    return read_fields(await read_bytes(request, MAX_BODY_BYTES), fields)


def read_fields(body: bytes, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read a JSON object with these fields.

    Raises:
        Refusal: the object is invalid.
    """
    given = read_object(body)
    if not given.keys() <= fields.keys():
        raise Refusal(
            400, f"The body has an unknown field: the known fields are {', '.join(fields)}."
        )
    lacks = [name for name in fields if fields[name].default is _NEEDED and name not in given]
    if lacks:
        raise Refusal(400, f"The body lacks required fields: {', '.join(lacks)}.")
    return {
        name: _checked(name, one, given[name]) if name in given else one.default
        for name, one in fields.items()
    }


def read_object(body: bytes) -> Mapping[str, Any]:
    """Parse a JSON object.

    Raises:
        Refusal: the body is not a JSON object, or repeats a field.
    """
    try:
        return mapping(parse(body))
    except ValueError:
        raise Refusal(400, "The body is not a JSON object, or repeats a field.") from None


def _checked(name: str, field: Field, value: object) -> Any:
    try:
        return field.check(value)
    except (ValueError, SnapshotError):
        raise Refusal(400, f"{name} must be {field.expected}.") from None


async def read_bytes(request: Request, most: int) -> bytes:
    """Read the whole body of a request. Stops reading as soon as the body has more than ``most``
    bytes.

    The content type must be JSON. Web pages cannot send that type to another origin without the
    other origin's permission.

    Raises:
        Refusal: the body is too long or incomplete, or has another type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "The body must be JSON: send Content-Type: application/json.")
    pieces, length = [], 0
    try:
        async with aclosing(request.stream()) as stream:
            async for piece in stream:
                length += len(piece)
                if length > most:
                    raise Refusal(413, f"The body is larger than {most >> 10} KiB.")
                pieces.append(piece)
    except ClientDisconnect:
        raise Refusal(400, "The body is incomplete.") from None
    return b"".join(pieces)


Ask = Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Sends a query to all engines, and returns the reply of each engine, by rank."""
Gone = Callable[[], Awaitable[bool]]
"""Returns True once the client no longer waits."""

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.005, 0.1, 1.1
"""Interval between two polls of an operation, seconds: the first interval, the maximum, and the
growth factor."""
MOST_WAITED_FOR = 16
"""Maximum number of operations awaited concurrently. Further requests are refused, because each
poll is a query that an engine answers between two steps."""

SEVERAL = (
    "Several jobs have this id, with different cache salts or in different engines: give each "
    "job its own id."
)
CROWD = "Too many operations on jobs are in progress: try again later."
_BUSY = (429, 504)
"""HTTP statuses of refusals because the engine has no time for a poll. The operation continues."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The time for which a client waits for an operation.

    Attributes:
        timeout_s: longest wait, seconds.
        until: end of the wait, on the event loop's clock.
        gone: returns True once the client no longer waits.
    """

    timeout_s: float
    until: float
    gone: Gone

    @classmethod
    def of(cls, timeout_s: float, gone: Gone) -> Patience:
        """Create the patience of a client that starts to wait now."""
        return cls(timeout_s, _now() + timeout_s, gone)

    @property
    def left_s(self) -> float:
        """Time left, seconds."""
        return max(0.0, self.until - _now())

    async def is_over(self) -> bool:
        """True once no time is left, or the client no longer waits."""
        return self.left_s == 0 or await self.gone()


FOLDER = f"{ENV_PREFIX}SNAPSHOT_PATH"
"""Variable that names the snapshot folder."""
OFF = f"This server has no {FOLDER}: set it to a folder for snapshots, and restart the server."

Answer = Callable[[Request], Awaitable[dict[str, Any]]]


class SnapshotRoutes:
    """Handlers of the routes, which wait for the engines' operations. Used on one event loop.

    Args:
        ask: queries the engines.
        env: environment of the server.
    """

    def __init__(self, ask: Ask, env: Mapping[str, str]) -> None:
        self._ask = ask
        self._env = env
        self._waited_for = 0

    def answers(self) -> tuple[tuple[str, str, Answer], ...]:
        """The routes: method, path and handler of each."""
        return (
            ("GET", "/tiered_kv/snapshots", self._list),
            ("POST", "/tiered_kv/snapshots", partial(self._on_job, "snapshot", SNAPSHOT)),
            ("POST", "/tiered_kv/restores", self._restore),
            ("POST", "/tiered_kv/forks", partial(self._on_job, "fork", FORK)),
        )

    async def _list(self, request: Request) -> dict[str, Any]:
        read_nothing(request.query_params)
        given = self._env.get(FOLDER)
        if not given:
            raise Refusal(501, OFF)
        folder = Path(given).absolute()
        try:
            names = await asyncio.to_thread(_names, folder)
        except OSError as error:
            raise Refusal(
                500,
                f"The folder of {FOLDER} cannot be read ({error.strerror}): check its permissions.",
            ) from error
        return {"folder": str(folder), "snapshots": names}

    async def _on_job(
        self, ask: str, fields: Mapping[str, Field], request: Request
    ) -> dict[str, Any]:
        """Return the result of the only engine that has the job. Raises Refusal if several jobs
        have the id."""
        question, patience = await _read(request, ask, fields)
        jobs = await self._ask({"ask": "job", "id": question["job"]})
        if sum(len(said["jobs"]) for said in jobs) > 1:
            raise Refusal(409, SEVERAL)
        results = await self.results(question, patience)
        if len(results) > 1:  # a turn of the job has just arrived at another engine
            raise Refusal(409, SEVERAL)
        return results[0]

    async def _restore(self, request: Request) -> dict[str, Any]:
        """Return the result of the first engine, with the results of the other engines in
        ``others``."""
        question, patience = await _read(request, "restore", RESTORE)
        question["salt"] = fresh_salt() if question.pop("exact") else None  # equal for all engines
        first, *others = await self.results(question, patience, of_all=True)
        return {**first, "others": others}

    async def results(
        self, question: dict[str, Any], patience: Patience, *, of_all: bool = False
    ) -> list[dict[str, Any]]:
        """Start the requested operation on the engines, and wait for it.

        Returns:
            The result of each engine with its index, by rank.

        Raises:
            Refusal: the operation failed on an engine, is unfinished, or was started by no engine;
                with ``of_all`` also if any engine refuses. Other engines may have completed the
                operation.
        """
        if self._waited_for >= MOST_WAITED_FOR:
            raise Refusal(429, CROWD)
        self._waited_for += 1
        try:
            answers = await self._ask(question)
            begun = [said for said in answers if said.get("operation") is not None]
            refused = [_refusal(said) for said in answers if "refused" in said]
            outcomes = [await self._outcome(said, patience) for said in begun]
        finally:
            self._waited_for -= 1
        failed = [one for one in outcomes if isinstance(one, Refusal)]
        if not begun or of_all:
            failed += refused
        if failed:
            raise failed[0]
        if not begun:
            raise Refusal(404, NO_JOB)
        return [one for one in outcomes if not isinstance(one, Refusal)]

    async def _outcome(self, begun: dict[str, Any], patience: Patience) -> dict[str, Any] | Refusal:
        """Return the result of an operation, or the reason why it failed.

        Raises:
            Refusal: the operation is unfinished.
        """
        engine, pause = begun["engine"], FIRST_PAUSE_S
        while True:
            said = await self._state(engine, begun["operation"])
            match said["state"]:
                case "done":
                    return {"engine": engine, **said["result"]}
                case "failed":
                    return Refusal(409, str(said["why"]))
            if await patience.is_over():
                doing = said.get("doing")
                raise Refusal(
                    504,
                    f"The operation has not finished within {patience.timeout_s:g} s, and "
                    f"continues on the server{f' ({doing})' if doing else ''}: set a larger "
                    "timeout_s to wait longer.",
                )
            await asyncio.sleep(min(pause, patience.left_s))
            pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_S)

    async def _state(self, engine: int, operation: int) -> dict[str, Any]:
        try:
            answers = await self._ask({"ask": "operation", "engine": engine, "id": operation})
        except Refusal as refusal:
            if refusal.status in _BUSY:
                return {"state": "running"}
            raise
        for said in answers:
            if said["engine"] == engine and said["state"] is not None:
                return said
        return {"state": "failed", "why": "The engine that ran the operation no longer exists."}


def _refusal(said: dict[str, Any]) -> Refusal:
    return Refusal(501 if said.get("status") == 501 else 409, str(said["refused"]))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _read(
    request: Request, ask: str, fields: Mapping[str, Field]
) -> tuple[dict[str, Any], Patience]:
    """Return the query to send to the engines for a request, and how long its client waits."""
    read_nothing(request.query_params)
    said = await read_body(request, fields)
    patience = Patience.of(said.pop(TIMEOUT), request.is_disconnected)
    return {"ask": ask, **said}, patience


def _names(folder: Path) -> list[str]:
    """Return the names of the snapshots in a folder; empty if the folder does not exist."""
    found = set[str]()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(SnapshotError):  # not a valid snapshot name
                if (name := _name(entry)) is not None:
                    check_name(name)
                    found.add(name)
    return sorted(found)


def _name(entry: os.DirEntry[str]) -> str | None:
    if entry.is_dir(follow_symlinks=False):
        whole = Path(entry.path, "manifest.json").is_file()
        return entry.name if whole else None
    is_zip = entry.name.endswith(".zip") and entry.is_file(follow_symlinks=False)
    return entry.name.removesuffix(".zip") if is_zip else None
