"""The stores under a root, as anybody sees them who takes none of their locks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
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
    """Every store under a root, the one used last at the end.

    Raises:
        OSError: one of them cannot be read: it is not passed over in silence.
    """
    stores = []
    for folder in store_folders(root):
        fingerprint, place = folder.parent.name, folder.name
        try:
            replica, rank = (int(number) for number in place.split("-"))
            sizes = dict(_segments(folder))
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
                    segments=tuple(sorted(sizes)),
                    nbytes=sum(sizes.values()),
                )
            )
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue  # no store, or one that vanished meanwhile
    return sorted(stores, key=lambda store: store.last_use)


def _segments(folder: Path) -> Iterator[tuple[Path, int]]:
    """With their bytes. A server may delete one while the others are looked at."""
    for path in folder.iterdir():
        if path.suffix == SEGMENT_SUFFIX:
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat().st_size


def _holder(lock: Path) -> dict[str, object]:
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
