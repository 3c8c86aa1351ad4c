"""The pool of a root: every page that its snapshots have, under its digest.

``ROOT/.pages/<first two hex>/<sha256>`` and the same page's file in a snapshot are one file with
two names. A page that has no other name is of no snapshot. The pool only saves room: a page that
is missing in it, or cannot be linked, is written again, and nobody reads a snapshot by it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from .manifest import is_sha256
from .part_file import Origin
from .snapshot_files import POOL, make_folder


class PagePool:
    """Pages of a root.

    Args:
        root: folder of snapshots.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / POOL

    def link_to(self, digest: str, path: Path) -> Origin:
        """Give a page of the pool another name, if it can be. Its bytes are not looked at.

        Returns:
            Origin of the file that has this name now, or that must be written under it.
        """
        try:
            # A symbolic link in the pool is not followed: then it is that which gets the name.
            os.link(self._place(digest), path, follow_symlinks=False)
        except FileExistsError:
            return Origin.BESIDE
        except OSError as error:  # mostly: the pool has none
            return Origin.AGAIN if error.errno == errno.EMLINK else Origin.NEW
        return Origin.SHARED

    def take(self, digest: str, path: Path, *, replace: bool) -> None:
        """Put a durable page of a snapshot in the pool, if that can be. Never fails.

        Args:
            replace: True if the page in the pool, if any, is of no use.
        """
        place = self._place(digest)
        with contextlib.suppress(OSError):
            if replace:
                place.unlink(missing_ok=True)
            for folder in (self._folder, place.parent):
                with contextlib.suppress(FileExistsError):
                    make_folder(folder)
            os.link(path, place, follow_symlinks=False)

    def sweep(self) -> None:
        """Remove pages that no snapshot has. Never fails."""
        for shard in _entries(self._folder):
            if shard.is_dir(follow_symlinks=False):
                for entry in _entries(shard.path):
                    with contextlib.suppress(OSError):
                        if is_sha256(entry.name) and entry.stat(follow_symlinks=False).st_nlink < 2:
                            os.unlink(entry.path)  # noqa: PTH108

    def _place(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError):
        if not os.path.islink(folder):  # noqa: PTH114
            with os.scandir(folder) as entries:
                yield from list(entries)
