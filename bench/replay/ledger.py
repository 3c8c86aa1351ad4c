"""Runs as files: each is kept as it ends, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .names import CALIBRATION
from .results import Run


class LedgerError(Exception):
    """The runs kept in a folder are of another workload, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A run and what tells whether it may be compared.

    Attributes:
        reserved_cpus: the cores that the CPU worker kept for itself, as its log says it.
        other_cores: cores' worth of time that other programs used meanwhile; None if unknown.
    """

    run: Run
    reserved_cpus: str | None = None
    other_cores: float | None = None


class Ledger:
    """Runs kept as JSON files in a folder, one a run, whole or not there.

    Args:
        plan: what every run in the folder must have in common.
        resume: go on from the runs that are there; otherwise they are put aside as
            ``runs-before``, and what was put aside before is deleted.

    Raises:
        LedgerError: with ``resume``, the runs are of another plan.
    """

    def __init__(self, folder: Path, plan: Mapping[str, object], *, resume: bool) -> None:
        self._folder = folder / "runs"
        plan_path = self._folder / "plan.json"
        if self._folder.exists() and not resume:
            shutil.rmtree(folder / "runs-before", ignore_errors=True)
            self._folder.rename(folder / "runs-before")
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(plan))
        if plan_path.exists():
            there = _read(plan_path)
            other = sorted(key for key in {*wanted, *there} if wanted.get(key) != there.get(key))
            if other:
                raise LedgerError(
                    f"{folder} holds runs of another plan ({', '.join(other)} differ): "
                    "take another --out, or start again without --resume"
                )
        _write(plan_path, wanted)

    def get(self, load: str, number: int, server: str) -> Kept | str | None:
        """A run; the message of a server that did not start; None if it is not there.

        Raises:
            LedgerError: the file cannot be read.
        """
        path = self._path(load, number, server)
        return _kept(path) if path.exists() else None

    def put(self, load: str, number: int, server: str, found: Kept | str) -> None:
        said: dict[str, Any] = {"not_started": found, "server": server}
        if isinstance(found, Kept):
            said = {**asdict(found), "run": found.run.as_json()}
        _write(self._path(load, number, server), said)

    def _path(self, load: str, number: int, server: str) -> Path:
        return self._folder / f"{load}-{number}-{server}.json"


def read_runs(folder: Path) -> list[Kept]:
    """All runs that a harness kept under ``folder``, in order of load, round and server; those
    that only calibrated left out.

    Raises:
        LedgerError: there is none, or one cannot be read.
    """
    paths = sorted((folder / "runs").glob("*-*-*.json"))
    read = [kept for kept in map(_kept, paths) if isinstance(kept, Kept)]
    found = [kept for kept in read if kept.run.load != CALIBRATION]
    if not found:
        raise LedgerError(f"{folder} holds no runs: measure some with ab --out {folder}")
    return found


def _kept(path: Path) -> Kept | str:
    said = _read(path)
    try:
        if "not_started" in said:
            return str(said["not_started"])
        return Kept(**{**said, "run": Run.from_json(said["run"])})
    except (KeyError, TypeError) as error:
        raise LedgerError(f"{path} holds no run: {error!r}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LedgerError(f"cannot read {path}: {error}") from error
    if not isinstance(said, dict):
        raise LedgerError(f"{path} holds no object")
    return said


def _write(path: Path, said: Mapping[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.replace(path)
