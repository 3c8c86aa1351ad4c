"""Replayed runs as files, with what tells whether they may be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.run_files import RunFileError, RunFiles, read_object, run_paths

from .names import CALIBRATION
from .results import Run


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
    """The runs of a harness, in a folder; see ``RunFiles`` for its arguments and errors."""

    def __init__(self, folder: Path, plan: Mapping[str, object], *, resume: bool) -> None:
        self._files = RunFiles(folder, plan, resume=resume)

    def get(self, load: str, number: int, server: str) -> Kept | str | None:
        """A run; the message of a server that did not start; None if it is not there.

        Raises:
            RunFileError: the file cannot be read.
        """
        found = self._files.get(load, number, server)
        return None if found is None else _kept(*found)

    def put(self, load: str, number: int, server: str, found: Kept | str) -> None:
        said: dict[str, Any] = {"not_started": found, "server": server}
        if isinstance(found, Kept):
            said = {**asdict(found), "run": found.run.as_json()}
        self._files.put(load, number, server, said)


def read_runs(folder: Path) -> list[Kept]:
    """All runs that a harness kept under ``folder``, in order of load, round and server; those
    that only calibrated left out.

    Raises:
        RunFileError: there is none, or one cannot be read.
    """
    read = [_kept(path, read_object(path)) for path in run_paths(folder)]
    runs = [kept for kept in read if isinstance(kept, Kept)]
    found = [kept for kept in runs if kept.run.load != CALIBRATION]
    if not found:
        raise RunFileError(f"{folder} holds no runs: measure some with ab --out {folder}")
    return found


def _kept(path: Path, said: Mapping[str, Any]) -> Kept | str:
    try:
        if "not_started" in said:
            return str(said["not_started"])
        return Kept(**{**said, "run": Run.from_json(said["run"])})
    except (KeyError, TypeError) as error:
        raise RunFileError(f"{path} holds no run: {error!r}") from error
