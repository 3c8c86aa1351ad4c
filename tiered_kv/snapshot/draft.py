"""Draft of a snapshot: a folder that is not a snapshot until it is complete and durable.

The maker of a snapshot is the process that creates its folder or its zip file.

    begin    sweeps leftovers of killed makers; creates ROOT/.making-<16 hex>
    ranks    write pages and parts into it, each in its own process: ``rank_writer``
    seal     writes the manifest, makes all files durable, and only then renames to ROOT/NAME

Pages are added to the pool of the root after the renaming, so that every page in the pool is
durable.

The module also handles unfinished folders and files, and leftovers of killed makers.

``.making-<16 hex>`` is a folder with a file ``lock``, or a plain file. Its maker holds the lock, or
a lock on the file itself, with flock, and renames it when it is complete. The next maker removes
unlocked folders and files.

A new folder has no lock for a moment, and then either its maker or a sweeper takes the lock. A
maker that loses this race starts again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tiered_kv.file_lock import open_locked
from tiered_kv.json_fields import MOST_BYTES
from tiered_kv.plain_files import check_owner, open_plain, opened
from tiered_kv.storage.disk.files import RealFiles

from .manifest import Manifest, SnapshotError, SnapshotPage, dump
from .page_file import PagePool
from .part_file import Origin, Part, StoredPage, part_path, ranks_of
from .snapshot_files import (
    MANIFEST,
    PAGES,
    ZIP,
    check_name,
    disk_errors,
    make_folder,
    read_whole,
    write_manifest,
)

LOCK = "lock"

_PREFIX = ".making-"
_NAME = re.compile(r"\.making-[0-9a-f]{16}")
_TRIES = 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that do not support locks."""
_MADE = os.O_RDWR | os.O_CREAT


class Making:
    """An unfinished folder or file that this process is creating.

    Args:
        parent: folder in which the folder or file will be published.
        folder: True for a folder.

    Attributes:
        path: temporary path of the folder or file.
        fd: locked open file: the file itself, or the lock of the folder.

    Raises:
        OSError: the parent cannot be written.
    """

    def __init__(self, parent: Path, *, folder: bool) -> None:
        self._folder = folder
        for _ in range(_TRIES):
            self.path = parent / f"{_PREFIX}{secrets.token_hex(8)}"
            if folder:
                make_folder(self.path)
            with contextlib.suppress(FileNotFoundError):  # a sweeper was faster
                try:
                    fd = _locked(self.path, folder, os.O_CREAT)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    # No process can sweep there, because sweeping requires the lock.
                    fd = open_plain(self.path / LOCK if folder else self.path, _MADE)
                if fd is not None:
                    self.fd = fd
                    return
        raise OSError(
            errno.EBUSY, "another process keeps removing new files from the folder", str(parent)
        )

    def publish(self, path: Path) -> None:
        """Rename the folder or file to its final path, and make the rename durable.

        Raises:
            SnapshotError: the path exists.
            OSError: the disk failed. The folder or file then still has its temporary name, unless
                only the last step, the sync, failed.
        """
        refuse_taken(path)
        try:
            # A rename does not replace a folder that is not empty, and a link never replaces
            # anything.
            if self._folder or not _linked(self.path, path):
                os.rename(self.path, path)  # noqa: PTH104
        except OSError:
            refuse_taken(path)  # it may have been created since the first check
            raise
        if self._folder:
            with contextlib.suppress(OSError):
                (path / LOCK).unlink()
        RealFiles().sync_folder(path.parent)

    def release(self) -> None:
        """Remove the folder or file unless it is published, and release its lock. Idempotent.
        Never fails."""
        if self.fd < 0:
            return
        with contextlib.suppress(OSError):
            _remove(self.path)
        os.close(self.fd)
        self.fd = -1


def refuse_taken(path: Path) -> None:
    """Check that a path does not exist.

    Raises:
        SnapshotError: the path exists.
    """
    if os.path.lexists(path):
        raise SnapshotError(f"{path} already exists: choose another name, or remove it")


def sweep(parent: Path) -> None:
    """Remove leftovers of killed makers in a folder. Never fails."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _sweep_one(parent / name)


def _sweep_one(path: Path) -> None:
    if path.is_symlink():
        return
    folder = path.is_dir()
    fd = _locked(path, folder, os.O_CREAT if folder else 0)
    if fd is not None:
        try:
            _remove(path)
        finally:
            os.close(fd)


def _locked(path: Path, folder: bool, create: int) -> int | None:
    """Open and lock an unfinished folder or file. Returns None if another process has it locked."""
    return open_locked(path / LOCK if folder else path, os.O_RDWR | create, tries=1)


def _linked(path: Path, name: Path) -> bool:
    """Create a hard link to a file. Returns False where the file system does not support links."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a file, or a folder with its contents. The folder's lock is removed last."""
    try:
        names = os.listdir(path)  # noqa: PTH208
    except NotADirectoryError:
        path.unlink()
        return
    for name in sorted(names, key=lambda name: name == LOCK):
        one = path / name
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink(missing_ok=True)
    path.rmdir()


class SnapshotDraft:
    """A snapshot that is being created. As a context manager, it abandons the snapshot on exit
    unless it was sealed.

    Attributes:
        folder: temporary folder, into which each rank's ``PageWriter`` writes the rank's pages.
    """

    def __init__(self, root: Path, name: str, making: Making) -> None:
        self.folder = making.path
        self._making = making
        self._root, self._path = root, root / name
        self._pool = PagePool(root)

    @classmethod
    def begin(cls, root: Path, name: str) -> SnapshotDraft:
        """Start a snapshot.

        Args:
            root: folder of snapshots; created if missing.
            name: name of the snapshot.

        Raises:
            SnapshotError: the name is invalid or exists, or the folder cannot be written.
        """
        check_name(name)
        with disk_errors(f"no snapshot can be created in {root}, which must be a writable folder"):
            RealFiles().make_folders(root)
            check_owner(root)
            sweep(root)
            _sweep_locks(root)
            PagePool(root).sweep()
            _refuse_taken(root / name)
            making = Making(root, folder=True)
            draft = cls(root, name, making)
            try:
                make_folder(making.path / PAGES)
            except OSError:
                draft.abandon()
                raise
        return draft

    def seal(self, manifest: Manifest) -> Manifest:
        """Turn the draft into a snapshot, and add its new pages to the pool. The parts of all ranks
        must exist.

        Args:
            manifest: manifest without pages and sizes, which are filled in.

        Returns:
            The manifest as written.

        Raises:
            SnapshotError: parts are missing or disagree, the name has been taken meanwhile, or the
                disk failed. In these cases no snapshot exists, unless only the last step, the sync
                of the root, failed.
        """
        with disk_errors(f"the snapshot {self._path.name} cannot be created"):
            parts = self._parts(manifest.ranks)
            files = _files_of(parts)
            self._keep_only(files)
            shared = (one.nbytes for one in files.values() if one.origin is Origin.SHARED)
            whole = replace(
                manifest,
                pages=tuple(sorted((page for part in parts for page in part.pages), key=_order)),
                stored_bytes=sum(one.nbytes for one in files.values()),
                shared_bytes=sum(shared),
            )
            write_manifest(self.folder, dump(whole))
            _refuse_taken(self._path)
            self._making.publish(self._path)
        self._making.release()
        for digest, file in files.items():
            replace_it = file.origin is Origin.AGAIN
            self._pool.take(digest, self._path / PAGES / digest, replace=replace_it)
        return whole

    def abandon(self) -> None:
        """Remove the draft, unless it is sealed. Idempotent. Never fails."""
        self._making.release()

    def __enter__(self) -> SnapshotDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _parts(self, ranks: int) -> list[Part]:
        found = ranks_of(entry.name for entry in self.folder.iterdir())
        if found != set(range(ranks)):
            missing = sorted(set(range(ranks)) - found)
            raise SnapshotError(
                f"rank {missing[0]} has not finished writing its pages: all {ranks} ranks must "
                "finish"
                if missing
                else f"rank {max(found)} has written pages, but there are only {ranks} ranks"
            )
        return [self._part(rank) for rank in range(ranks)]

    def _part(self, rank: int) -> Part:
        with opened(part_path(self.folder, rank)) as fd:
            data = read_whole(fd, MOST_BYTES, f"the part file of rank {rank}")
        try:
            part = Part.load(data)
        except (ValueError, TypeError) as error:
            raise SnapshotError(f"the part file of rank {rank} is damaged: {error}") from error
        if part.rank != rank:
            raise SnapshotError(f"the part file of rank {rank} was written by rank {part.rank}")
        return part

    def _keep_only(self, files: dict[str, StoredPage]) -> None:
        """Check the files of the pages, and remove all other files except the lock.

        Raises:
            SnapshotError: a file is missing, or its length has changed.
        """
        found = {}
        for entry in os.scandir(self.folder / PAGES):
            if entry.name in files:
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
            else:
                os.unlink(entry.path)  # noqa: PTH108
        for digest, file in files.items():
            if found.get(digest) != file.nbytes:
                raise SnapshotError(
                    f"the file of page {digest} is missing, or has another size than when it was "
                    "written"
                )
        for entry in os.scandir(self.folder):
            if entry.name not in (PAGES, LOCK):
                os.unlink(entry.path)  # noqa: PTH108


def _order(page: SnapshotPage) -> tuple[int, int, int]:
    return page.group, page.block, page.rank


def _files_of(parts: Iterable[Part]) -> dict[str, StoredPage]:
    """Merge the files of all ranks.

    Raises:
        SnapshotError: two ranks disagree about a file.
    """
    files = dict[str, StoredPage]()
    for part in parts:
        for digest, file in part.files.items():
            known = files.setdefault(digest, file)
            if known.nbytes != file.nbytes:
                raise SnapshotError(f"two ranks wrote files of different sizes for page {digest}")
            if known.origin is Origin.BESIDE:  # the other rank knows the file's origin
                files[digest] = file
    return files


def _refuse_taken(path: Path) -> None:
    for taken in (path, path.with_name(path.name + ZIP)):
        refuse_taken(taken)


def _sweep_locks(root: Path) -> None:
    """Remove the locks of snapshots whose maker was killed after it had published the snapshot."""
    for path in root.iterdir():
        if path.name.startswith("."):  # a draft needs its lock
            continue
        lock = path / LOCK
        with contextlib.suppress(OSError):
            if (path / MANIFEST).is_file() and not path.is_symlink() and not lock.stat().st_size:
                lock.unlink()
