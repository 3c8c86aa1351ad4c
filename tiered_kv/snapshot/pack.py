"""Copies of snapshots as folders and as zip files, which are either complete or not created."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes
from tiered_kv.storage.disk.files import RealFiles

from .draft import Making, refuse_taken, sweep
from .manifest import dump
from .reader import Snapshot, open_snapshot
from .snapshot_files import (
    MANIFEST,
    PAGES,
    disk_errors,
    make_folder,
    sync_file,
    write_manifest,
    write_new,
)

_BEGINNING = (1980, 1, 1, 0, 0, 0)
"""Timestamp of all members of a zip file. It is constant, so that equal snapshots give equal files.
The manifest has the time of creation."""


def pack(folder: Path, zip_path: Path) -> None:
    """Create a zip file of a snapshot. Its members are not compressed, because pages are encoded.

    Args:
        folder: the snapshot.
        zip_path: path of the file, which must not exist.

    Raises:
        SnapshotError: ``folder`` is not a snapshot, or the file exists or cannot be written.
    """
    _copy(folder, zip_path, _write_zip, folder=False)


def unpack(path: Path, folder: Path) -> None:
    """Create a folder from a snapshot's zip file, or copy a snapshot's folder.

    Args:
        path: the snapshot.
        folder: path of the folder, which must not exist.

    Raises:
        SnapshotError: ``path`` is not a snapshot, or the folder exists or cannot be written.
    """
    _copy(path, folder, _write_folder, folder=True)


def _copy(
    source: Path, target: Path, write: Callable[[Making, Snapshot], None], *, folder: bool
) -> None:
    with open_snapshot(source) as snapshot, disk_errors(f"{target} cannot be written"):
        refuse_taken(target)
        RealFiles().make_folders(target.parent)
        sweep(target.parent)
        making = Making(target.parent, folder=folder)
        try:
            write(making, snapshot)
            making.publish(target)
        finally:
            making.release()


def _write_zip(making: Making, snapshot: Snapshot) -> None:
    with os.fdopen(making.fd, "wb", closefd=False) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_info(MANIFEST), dump(snapshot.manifest))
        for digest, stored in _stored_pages(snapshot):
            archive.writestr(_info(f"{PAGES}/{digest}"), stored.tobytes())
    os.fsync(making.fd)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _BEGINNING)
    info.external_attr = (stat.S_IFREG | 0o600) << 16
    info.create_system = 3  # Unix, otherwise the mode is ignored
    return info


def _write_folder(making: Making, snapshot: Snapshot) -> None:
    pages = making.path / PAGES
    make_folder(pages)
    for digest, stored in _stored_pages(snapshot):
        write_new(pages / digest, [stored.data])
    for digest in snapshot.files:
        sync_file(pages / digest)
    write_manifest(making.path, dump(snapshot.manifest))


def _stored_pages(snapshot: Snapshot) -> Iterator[tuple[str, Bytes]]:
    """Yield the digest of each page, and the contents of its file."""
    for digest, nbytes in snapshot.files.items():
        stored = np.empty(nbytes, np.uint8)
        snapshot.read_file(digest, stored)
        yield digest, stored
