"""Routes for snapshots of jobs: ``/tiered_kv/snapshots``, ``/restores`` and ``/forks``.

What a client sends becomes no path here. Engines look a snapshot up by its name, under their own
folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request

from tiered_kv.config import ENV_PREFIX
from tiered_kv.connectors.runtime.snapshots.capture import fresh_salt

from .engine_operations import Ask, EngineOperations, Patience
from .queries import read_nothing
from .refusals import Refusal
from .snapshot_bodies import FORK, RESTORE, SNAPSHOT, TIMEOUT, Field, is_name, read_body

FOLDER = f"{ENV_PREFIX}SNAPSHOT_PATH"
"""Variable that names the folder of snapshots."""
OFF = f"This server has no {FOLDER}: set it to a folder for snapshots, and start it again."

Answer = Callable[[Request], Awaitable[dict[str, Any]]]


class SnapshotRoutes:
    """The routes' answers. One event loop.

    Args:
        ask: the way to the engines.
        env: environment of the server.
    """

    def __init__(self, ask: Ask, env: Mapping[str, str]) -> None:
        self._operations = EngineOperations(ask)
        self._env = env

    def answers(self) -> tuple[tuple[str, str, Answer], ...]:
        """The routes: method, path and answer of each."""
        return (
            ("GET", "/tiered_kv/snapshots", self._list),
            ("POST", "/tiered_kv/snapshots", self._snapshot),
            ("POST", "/tiered_kv/restores", self._restore),
            ("POST", "/tiered_kv/forks", self._fork),
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
                500, f"The folder of {FOLDER} cannot be read ({error.strerror}): see its rights."
            ) from error
        return {"folder": str(folder), "snapshots": names}

    async def _snapshot(self, request: Request) -> dict[str, Any]:
        question, patience = await _read(request, "snapshot", SNAPSHOT)
        return await self._operations.of_one(question, patience)

    async def _fork(self, request: Request) -> dict[str, Any]:
        question, patience = await _read(request, "fork", FORK)
        return await self._operations.of_one(question, patience)

    async def _restore(self, request: Request) -> dict[str, Any]:
        """Answers with the result of the first engine; of further ones in ``others``."""
        question, patience = await _read(request, "restore", RESTORE)
        question["salt"] = fresh_salt() if question.pop("exact") else None  # one for all engines
        first, *others = await self._operations.of_all(question, patience)
        return {**first, "others": others}


async def _read(
    request: Request, ask: str, fields: Mapping[str, Field]
) -> tuple[dict[str, Any], Patience]:
    """The question that a request puts to the engines, and the patience of its client."""
    read_nothing(request.query_params)
    said = await read_body(request, fields)
    patience = Patience.of(said.pop(TIMEOUT), request.is_disconnected)
    return {"ask": ask, **said}, patience


def _names(folder: Path) -> list[str]:
    """Names of the snapshots in a folder; none if it is still to be made."""
    found = set[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = _name(entry)
                if name is not None and is_name(name):
                    found.add(name)
    except FileNotFoundError:
        return []
    return sorted(found)


def _name(entry: os.DirEntry[str]) -> str | None:
    if entry.is_dir(follow_symlinks=False):
        whole = Path(entry.path, "manifest.json").is_file()
        return entry.name if whole else None
    is_zip = entry.name.endswith(".zip") and entry.is_file(follow_symlinks=False)
    return entry.name.removesuffix(".zip") if is_zip else None
