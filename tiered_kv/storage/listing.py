"""The stores under a root, as anybody sees them who takes none of their locks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.storage.capacity import SEGMENT_SUFFIX, store_folders
from tiered_kv.storage.locks import LOCK_NAME, is_locked


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store under a root.

    Attributes:
        locked: whether a process has it open.
        holder: what that process (or the last one) says of itself; empty if unknown.
        last_use: seconds since 1970.
        segments: paths of its segments, oldest first.
        nbytes: of the segments on disk.
    """

    path: Path
    fingerprint: bytes
    replica: int
    rank: int
    locked: bool
    holder: dict[str, object]
    last_use: float
    segments: tuple[Path, ...]
    nbytes: int


def list_stores(root: Path) -> list[StoreInfo]:
    """Every store under a root, the one used last at the end."""
    stores = []
    for folder in store_folders(root):
        fingerprint, place = folder.parent.name, folder.name
        try:
            replica, rank = (int(number) for number in place.split("-"))
            paths = sorted(path for path in folder.iterdir() if path.suffix == SEGMENT_SUFFIX)
            lock = folder / LOCK_NAME
            stores.append(
                StoreInfo(
                    path=folder,
                    fingerprint=bytes.fromhex(fingerprint),
                    replica=replica,
                    rank=rank,
                    locked=is_locked(lock),
                    holder=_holder(lock),
                    last_use=lock.stat().st_mtime,
                    segments=tuple(paths),
                    nbytes=sum(path.stat().st_size for path in paths),
                )
            )
        except (OSError, ValueError):
            continue  # no store, or one that vanished meanwhile
    return sorted(stores, key=lambda store: store.last_use)


def _holder(lock: Path) -> dict[str, object]:
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
