"""The stores under a root, as anybody sees them who takes none of their locks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiered_kv.storage.disk.folders import segment_files, store_folders
from tiered_kv.storage.store.locks import LOCK_NAME, is_locked, read_holder


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


@dataclass(frozen=True, slots=True)
class Listing:
    """The stores under a root, the one used last at the end.

    Attributes:
        odd: why something that has the name of a store or a segment is left out, by path.
    """

    stores: list[StoreInfo]
    odd: dict[Path, str]


def list_stores(root: Path) -> Listing:
    """Every store under a root."""
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
                    holder=read_holder(lock),
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
