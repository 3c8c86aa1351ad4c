"""Refusal of snapshots, in an engine without a folder for them."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.base import JobKey
from tiered_kv.snapshot.manifest import SnapshotError


class NoFolderError(SnapshotError):
    """Want of a folder: nothing can be taken from this engine, or brought into it."""


class NoSnapshots:
    """Stand-in for ``Snapshots``.

    Args:
        observes: True if the engine is only observed.
    """

    under_way = False

    def __init__(self, *, observes: bool) -> None:
        self._observes = observes

    def _refuse(self) -> NoFolderError:
        if self._observes:
            return NoFolderError(
                "This engine is only observed, and keeps no KV: leave TIERED_KV_MODE out."
            )
        return NoFolderError(
            "This server has no folder for snapshots: set TIERED_KV_SNAPSHOT_PATH for it."
        )

    def take(self, *_: object, **__: object) -> int | None:
        """Refuse."""
        raise self._refuse()

    def restore(self, *_: object, **__: object) -> int:
        """Refuse."""
        raise self._refuse()

    def fork(self, *_: object, **__: object) -> int | None:
        """Refuse."""
        raise self._refuse()

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Return none."""
        return ()

    def outcome(self, number: int) -> dict[str, Any]:
        """Refuse."""
        raise self._refuse()

    def advance(self) -> None:
        """Do nothing."""

    def on_reports(self) -> None:
        """Do nothing."""

    def release_vram(self) -> None:
        """Do nothing."""

    def on_ended(self, turn: Turn) -> None:
        """Do nothing."""

    def on_reset(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
