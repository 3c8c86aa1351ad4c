"""Discovery of the stores under a root, without taking any of their locks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.file_lock import is_locked, read_owner
from tiered_kv.storage.store.folders import segment_files, store_folders
from tiered_kv.storage.store.locks import LOCK_NAME


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store under a root.

    Attributes:
        locked: True if a process has it open.
        holder: description of that process, or of the last one; empty if unknown.
        last_use: time of last use, seconds since 1970.
        segments: paths of its segments, oldest first.
        nbytes: size of its segments on disk, bytes.
    """

    path: Path
    fingerprint: bytes
    replica: int
    rank: int
    locked: bool
    holder: Mapping[str, object]
    last_use: float
    segments: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The stores under a root, the most recently used one last.

    Attributes:
        odd: reasons for skipping paths that are named like a store or a segment, by path.
    """

    stores: list[StoreInfo]
    odd: dict[Path, str]


def list_stores(root: Path) -> Listing:
    """List every store under a root."""
    folders = store_folders(root)
    stores, odd = [], dict(folders.odd)
    for folder in folders.paths:
        found, lock = segment_files(folder), folder / LOCK_NAME
        odd |= found.odd
        if folder in found.odd:
            continue
        replica, rank = (int(number) for number in folder.name.split("-"))
        try:
            stores.append(
                StoreInfo(
                    path=folder,
                    fingerprint=bytes.fromhex(folder.parent.name),
                    replica=replica,
                    rank=rank,
                    locked=is_locked(lock),
                    holder=read_owner(lock),
                    last_use=lock.lstat().st_mtime,
                    segments=tuple(found.sizes),
                    nbytes=found.nbytes,
                )
            )
        except FileNotFoundError:
            continue  # it vanished meanwhile
        except OSError as error:
            odd[lock] = error.strerror or str(error)
    return Listing(sorted(stores, key=lambda store: store.last_use), odd)
