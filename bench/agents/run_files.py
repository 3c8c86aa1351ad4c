"""Runs as files in a folder. Each file is written atomically when its run ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiered_kv.json_fields import read

from .results import Kept

PLAN = "plan.json"


class RunFileError(RuntimeError):
    """The runs in a folder belong to another workload, or cannot be read."""


class Ledger:
    """Runs as JSON files in ``folder/runs``, one file per run.

    Args:
        plan: parameters that all runs in the folder share.
        resume: continue with the existing runs. Otherwise the existing runs are moved to
            ``runs-before``, and the old contents of ``runs-before`` are deleted.

    Raises:
        RunFileError: with ``resume``, the existing runs have another plan, or their plan cannot be
            read.
    """

    def __init__(self, folder: Path, plan: Mapping[str, object], *, resume: bool) -> None:
        self._folder = folder / "runs"
        plan_path = self._folder / PLAN
        if self._folder.exists() and not resume:
            shutil.rmtree(folder / "runs-before", ignore_errors=True)
            self._folder.rename(folder / "runs-before")
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(plan))
        if plan_path.exists():
            other = differing(wanted, read_object(plan_path))
            if other:
                raise RunFileError(
                    f"{folder} contains runs with other settings ({', '.join(other)}): "
                    "set another --out, or start again without --resume"
                )
        _write(plan_path, wanted)

    def get(self, load: str, number: int, server: str) -> Kept | str | None:
        """Return a stored run, or the stored message of a server that did not start; None if
        neither exists.

        Raises:
            RunFileError: the file cannot be read.
        """
        path = self._path(load, number, server)
        return _read(path) if path.exists() else None

    def put(self, load: str, number: int, server: str, found: Kept | str) -> None:
        """Store a run, or the message of a server that did not start."""
        said: dict[str, Any] = {"not_started": found, "server": server}
        if isinstance(found, Kept):
            said = asdict(found)
        _write(self._path(load, number, server), said)

    def get_or_measure(
        self, load: str, number: int, server: str, measure: Callable[[], Kept | str]
    ) -> Kept | str:
        """Return what ``get`` returns. If it returns None, call ``measure``, store its result and
        return it.

        Raises:
            RunFileError: the file cannot be read.
        """
        found = self.get(load, number, server)
        if found is None:
            found = measure()
            self.put(load, number, server, found)
        return found

    def _path(self, load: str, number: int, server: str) -> Path:
        return self._folder / f"{load.replace(' ', '-')}-{number}-{server}.json"


def read_runs(folder: Path) -> list[Kept]:
    """Return all runs stored under ``folder``, sorted by load, round and server.

    Raises:
        RunFileError: there are no runs, or one cannot be read.
    """
    read = [_read(path) for path in sorted((folder / "runs").glob("*-*-*.json"))]
    found = [kept for kept in read if isinstance(kept, Kept)]
    if not found:
        raise RunFileError(f"{folder} contains no runs: measure some with --out {folder}")
    return found


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the plan of the runs under ``folder``.

    Raises:
        RunFileError: the plan cannot be read.
    """
    return read_object(folder / "runs" / PLAN)


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the keys under which two plans differ, sorted."""
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Raises:
        RunFileError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFileError(f"cannot read {path}: {error}") from error
    if not isinstance(said, dict):
        raise RunFileError(f"{path} does not contain a JSON object")
    return said


def _read(path: Path) -> Kept | str:
    said = read_object(path)
    try:
        return str(said["not_started"]) if "not_started" in said else read(Kept, said)
    except ValueError as error:
        raise RunFileError(f"{path} does not contain a run: {error}") from error


def _write(path: Path, said: Mapping[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.replace(path)
