"""Draft of a snapshot: a folder that nobody takes for one until it is whole and durable.

    begin    sweeps what killed makers left; makes ROOT/.making-<16 hex>
    ranks    write pages and parts into it, each in its own process: ``rank_writer``
    seal     writes the manifest, makes all durable, and only then renames it to ROOT/NAME

Pages get into the pool of the root after that, so that the pool has none that is not durable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tiered_kv.storage.disk.files import RealFiles, check_owner, open_plain

from .making import LOCK, Making, sweep
from .manifest import Manifest, SnapshotError, SnapshotPage, dump
from .page_pool import PagePool
from .part_file import Origin, Part, StoredPage, part_path, ranks_of
from .snapshot_files import (
    MANIFEST,
    PAGES,
    ZIP,
    check_name,
    disk_errors,
    make_folder,
    read_whole,
    write_durable,
)
from .strict_json import MOST_BYTES


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
            write_durable(self.folder / MANIFEST, dump(whole))
            RealFiles().sync_folder(self.folder / PAGES)
            RealFiles().sync_folder(self.folder)
            _refuse_taken(self._path)
            try:
                self._making.publish(self._path)
            except OSError:
                _refuse_taken(self._path)  # since a moment ago
                raise
            RealFiles().sync_folder(self._root)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        fd = open_plain(part_path(self.folder, rank), os.O_RDONLY)
        try:
            part = Part.load(read_whole(fd, MOST_BYTES, f"the part of rank {rank}"))
        except (ValueError, TypeError) as error:
            raise SnapshotError(f"the part of rank {rank} is damaged: {error}") from error
        finally:
            os.close(fd)
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
        if os.path.lexists(taken):
            raise SnapshotError(f"there is {taken} already: give another name, or remove that one")


def _sweep_locks(root: Path) -> None:
    """Remove the locks of snapshots whose maker was killed right after the last step."""
    for path in root.iterdir():
        if path.name.startswith("."):  # a draft needs its lock
            continue
        lock = path / LOCK
        with contextlib.suppress(OSError):
            if (path / MANIFEST).is_file() and not path.is_symlink() and not lock.stat().st_size:
                lock.unlink()
