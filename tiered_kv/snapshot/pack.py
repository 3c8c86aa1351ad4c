"""Snapshots from folders to zip files and back: whole or not at all."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

import numpy as np

from tiered_kv.storage.disk.files import RealFiles

from .draft import Making, sweep
from .manifest import SnapshotError, dump
from .reader import Snapshot, open_snapshot
from .snapshot_files import (
    MANIFEST,
    PAGES,
    disk_errors,
    make_folder,
    sync_file,
    write_durable,
    write_new,
)

_BEGINNING = (1980, 1, 1, 0, 0, 0)
"""Time of all members: the manifest tells it, and one snapshot gives one file."""


def pack(folder: Path, zip_path: Path) -> None:
    """Make a zip file of a snapshot. Its members are stored: pages are coded as it is.

    Args:
        folder: the snapshot.
        zip_path: place of the file, which must be free.

    Raises:
        SnapshotError: that is no snapshot, something is there, or it cannot be written.
    """
    with (
        open_snapshot(folder) as snapshot,
        disk_errors(f"{zip_path} cannot be written"),
    ):
        parent = _free(zip_path)
        making = Making(parent, folder=False)
        try:
            _write_zip(making.fd, snapshot)
            os.fsync(making.fd)
            making.publish(zip_path)
        finally:
            making.release()
        RealFiles().sync_folder(parent)


def unpack(zip_path: Path, folder: Path) -> None:
    """Make a folder of a snapshot's zip file.

    Args:
        zip_path: the snapshot.
        folder: place of the folder, which must be free.

    Raises:
        SnapshotError: that is no snapshot, something is there, or it cannot be written.
    """
    with (
        open_snapshot(zip_path) as snapshot,
        disk_errors(f"{folder} cannot be written"),
    ):
        parent = _free(folder)
        making = Making(parent, folder=True)
        try:
            _write_folder(making.path, snapshot)
            making.publish(folder)
        finally:
            making.release()
        RealFiles().sync_folder(parent)


def _free(path: Path) -> Path:
    """Folder in which something can be made of that name."""
    if os.path.lexists(path):
        raise SnapshotError(f"there is {path} already: give another name, or remove that one")
    RealFiles().make_folders(path.parent)
    sweep(path.parent)
    return path.parent


def _write_zip(fd: int, snapshot: Snapshot) -> None:
    with os.fdopen(fd, "wb", closefd=False) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_info(MANIFEST), dump(snapshot.manifest))
        for digest, nbytes in snapshot.files.items():
            stored = np.empty(nbytes, np.uint8)
            snapshot.read_file(digest, stored)
            archive.writestr(_info(f"{PAGES}/{digest}"), stored.tobytes())


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _BEGINNING)
    info.external_attr = (stat.S_IFREG | 0o600) << 16
    info.create_system = 3  # as Unix has it, or the mode does not count
    return info


def _write_folder(folder: Path, snapshot: Snapshot) -> None:
    pages = folder / PAGES
    make_folder(pages)
    for digest, nbytes in snapshot.files.items():
        stored = np.empty(nbytes, np.uint8)
        snapshot.read_file(digest, stored)
        write_new(pages / digest, [stored.data])
    for digest in snapshot.files:
        sync_file(pages / digest)
    RealFiles().sync_folder(pages)
    write_durable(folder / MANIFEST, dump(snapshot.manifest))
    RealFiles().sync_folder(folder)
