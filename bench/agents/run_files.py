"""Runs as files of a folder: each is kept as it ends, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAN = "plan.json"


class RunFileError(Exception):
    """The runs kept in a folder are of another workload, or cannot be read."""


class RunFiles:
    """Runs kept as JSON files, one a run, whole or not there.

    Args:
        plan: what every run in the folder must have in common.
        resume: go on from the runs that are there; otherwise they are put aside as
            ``runs-before``, and what was put aside before is deleted.

    Raises:
        RunFileError: with ``resume``, the runs are of another plan.
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
                    f"{folder} holds runs of another plan ({', '.join(other)} differ): "
                    "take another --out, or start again without --resume"
                )
        _write(plan_path, wanted)

    def get(self, load: str, number: int, server: str) -> tuple[Path, dict[str, Any]] | None:
        """A run and its path; None if it is not there.

        Raises:
            RunFileError: the file cannot be read.
        """
        path = self._path(load, number, server)
        return (path, read_object(path)) if path.exists() else None

    def put(self, load: str, number: int, server: str, said: Mapping[str, object]) -> None:
        _write(self._path(load, number, server), said)

    def _path(self, load: str, number: int, server: str) -> Path:
        return self._folder / f"{load}-{number}-{server}.json"


def run_paths(folder: Path) -> list[Path]:
    """Paths of the runs kept under ``folder``, in order of load, round and server."""
    return sorted((folder / "runs").glob("*-*-*.json"))


def read_plan(folder: Path) -> dict[str, Any]:
    """Plan of the runs under ``folder``: what they have in common.

    Raises:
        RunFileError: it cannot be read.
    """
    return read_object(folder / "runs" / PLAN)


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Keys under which two plans differ."""
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        RunFileError: the file cannot be read, or holds something else.
    """
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFileError(f"cannot read {path}: {error}") from error
    if not isinstance(said, dict):
        raise RunFileError(f"{path} holds no object")
    return said


def _write(path: Path, said: Mapping[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.replace(path)
