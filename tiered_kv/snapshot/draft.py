"""Draft of a snapshot: a folder that nobody takes for one until it is whole and durable.

    begin    sweeps what killed makers left; makes ROOT/.making-<16 hex>
    ranks    write pages and parts into it, each in its own process: ``rank_writer``
    seal     writes the manifest, makes all durable, and only then renames it to ROOT/NAME

Pages get into the pool of the root after that, so that the pool has none that is not durable.

Folders and files that are being made, and what is left of those whose maker was killed.

``.making-<16 hex>`` is a folder with a file ``lock``, or a plain file. Its maker holds the lock, or
the file itself, with flock, and gives it another name when it is whole. One that nobody holds is
swept by the next maker.

A folder has no lock in its first moment, and then either its maker takes the lock or a sweeper
does. A maker that comes second begins anew.
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
"""Errors of file systems without locks."""
_MADE = os.O_RDWR | os.O_CREAT


class Making:
    """A folder or file of ours that is being made.

    Args:
        parent: folder in which it will have its name.
        folder: True for a folder.

    Attributes:
        path: place of it for now.
        fd: open file that is locked: the file itself, or the lock of the folder.

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
                    # Nobody can sweep there: that takes the lock as well.
                    fd = open_plain(self.path / LOCK if folder else self.path, _MADE)
                if fd is not None:
                    self.fd = fd
                    return
        raise OSError(errno.EBUSY, "others remove what is made there", str(parent))

    def publish(self, path: Path) -> None:
        """Give it its name, which nothing may have, and make that survive a power cut.

        Raises:
            SnapshotError: something has the name.
            OSError: the disk failed; it has its old name then, unless the last step has failed.
        """
        refuse_taken(path)
        try:
            # A folder takes the place of no other that holds anything, and a link never does.
            if self._folder or not _linked(self.path, path):
                os.rename(self.path, path)  # noqa: PTH104
        except OSError:
            refuse_taken(path)  # since a moment ago
            raise
        if self._folder:
            with contextlib.suppress(OSError):
                (path / LOCK).unlink()
        RealFiles().sync_folder(path.parent)

    def release(self) -> None:
        """Remove what has no name yet, and release the lock. Idempotent. Never fails."""
        if self.fd < 0:
            return
        with contextlib.suppress(OSError):
            _remove(self.path)
        os.close(self.fd)
        self.fd = -1


def refuse_taken(path: Path) -> None:
    """Check that nothing has a name.

    Raises:
        SnapshotError: something has it.
    """
    if os.path.lexists(path):
        raise SnapshotError(f"there is {path} already: give another name, or remove that one")


def sweep(parent: Path) -> None:
    """Remove what killed makers left in a folder. Never fails."""
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
    """Open and lock what is being made; None if another process has it."""
    return open_locked(path / LOCK if folder else path, os.O_RDWR | create, tries=1)


def _linked(path: Path, name: Path) -> bool:
    """Give a file a second name; False where the file system has no links."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a folder, its lock last, or a file."""
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
    """A snapshot that is being made. As a context it is abandoned at the end, unless sealed.

    Attributes:
        folder: place of it for the writers of its pages.
    """

    def __init__(self, root: Path, name: str, making: Making) -> None:
        self.folder = making.path
        self._making = making
        self._root, self._path = root, root / name
        self._pool = PagePool(root)

    @classmethod
    def begin(cls, root: Path, name: str) -> SnapshotDraft:
        """Begin a snapshot.

        Args:
            root: folder of snapshots; made if there is none.
            name: name that it will have.

        Raises:
            SnapshotError: it cannot have that name, or the folder cannot be written.
        """
        check_name(name)
        with disk_errors(f"{root} takes no snapshot: a folder is needed that can be written"):
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
        """Make it a snapshot. The parts of all ranks must be there.

        Args:
            manifest: what it is to hold; its pages and sizes are filled in.

        Returns:
            The manifest as written.

        Raises:
            SnapshotError: parts are missing or disagree, the name is taken by now, or the disk
                failed. There is no snapshot then, unless the last step alone, to make its name
                durable, has failed.
        """
        with disk_errors(f"the snapshot {self._path.name} cannot be made"):
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
        """Remove it, unless it is sealed. Idempotent. Never fails."""
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
                f"rank {missing[0]} has not finished its pages; all of {ranks} must"
                if missing
                else f"rank {max(found)} has written pages where there are {ranks} ranks"
            )
        return [self._part(rank) for rank in range(ranks)]

    def _part(self, rank: int) -> Part:
        with opened(part_path(self.folder, rank)) as fd:
            data = read_whole(fd, MOST_BYTES, f"the part of rank {rank}")
        try:
            part = Part.load(data)
        except (ValueError, TypeError) as error:
            raise SnapshotError(f"the part of rank {rank} is damaged: {error}") from error
        if part.rank != rank:
            raise SnapshotError(f"the part of rank {rank} is one of rank {part.rank}")
        return part

    def _keep_only(self, files: dict[str, StoredPage]) -> None:
        """Check the files of the pages, and remove whatever is of no use.

        Raises:
            SnapshotError: a file is missing, or not as long as it was.
        """
        found = {}
        for entry in os.scandir(self.folder / PAGES):
            if entry.name in files:
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
            else:
                os.unlink(entry.path)  # noqa: PTH108
        for digest, file in files.items():
            if found.get(digest) != file.nbytes:
                raise SnapshotError(f"page {digest} is not as its rank has written it")
        for entry in os.scandir(self.folder):
            if entry.name not in (PAGES, LOCK):
                os.unlink(entry.path)  # noqa: PTH108


def _order(page: SnapshotPage) -> tuple[int, int, int]:
    return page.group, page.block, page.rank


def _files_of(parts: Iterable[Part]) -> dict[str, StoredPage]:
    """Files of the pages of all ranks.

    Raises:
        SnapshotError: two ranks do not mean the same file.
    """
    files = dict[str, StoredPage]()
    for part in parts:
        for digest, file in part.files.items():
            known = files.setdefault(digest, file)
            if known.nbytes != file.nbytes:
                raise SnapshotError(f"ranks have unlike files of page {digest}")
            if known.origin is Origin.BESIDE:  # the other rank knows more
                files[digest] = file
    return files


def _refuse_taken(path: Path) -> None:
    for taken in (path, path.with_name(path.name + ZIP)):
        refuse_taken(taken)


def _sweep_locks(root: Path) -> None:
    """Remove the locks of snapshots whose maker was killed right after the last step."""
    for path in root.iterdir():
        if path.name.startswith("."):  # a draft needs its lock
            continue
        lock = path / LOCK
        with contextlib.suppress(OSError):
            if (path / MANIFEST).is_file() and not path.is_symlink() and not lock.stat().st_size:
                lock.unlink()
