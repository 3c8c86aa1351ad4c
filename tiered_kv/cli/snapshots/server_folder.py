"""Access to the server's snapshot folder from a command on the same machine.

``take_out`` moves a snapshot to a path that the user chooses; ``bring_in`` links or copies a
snapshot into the folder, for the server to restore.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.pack import pack, unpack
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.snapshot.snapshot_files import MANIFEST, PAGES, ZIP, make_folder
from tiered_kv.storage.disk.files import RealFiles


def is_path(text: str) -> bool:
    """Return True if the text is a path, and False if it is a snapshot name in the server's
    folder.
    """
    return "/" in text or text.endswith(ZIP)


def new_name() -> str:
    """Return a new random name for a snapshot."""
    return f"cli-{secrets.token_hex(8)}"


def check_new(path: Path) -> None:
    """Check that a snapshot can be created at a path.

    Raises:
        SnapshotError: the path exists, or its folder is missing or not writable.
    """
    if os.path.lexists(path):
        raise SnapshotError(f"{path} already exists: choose another path")
    if not path.parent.is_dir():
        raise SnapshotError(
            f"{path} cannot be created, because the folder {path.parent} does not exist: create "
            "that folder, or choose another path"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SnapshotError(
            f"{path} cannot be created, because you do not have permission to write to "
            f"{path.parent}: choose another path"
        )


class ServerFolder:
    """The server's snapshot folder.

    Args:
        path: path of the folder on the server's machine.

    Raises:
        SnapshotError: the folder does not exist on this machine, or this user has no access.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise SnapshotError(
                f"the server's snapshot folder {path} is not on this machine: run the command on "
                "the server's machine, or use a snapshot name instead of a path"
            )
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise SnapshotError(
                f"you cannot read and write the server's snapshot folder {path}: run the command "
                "as the server's user, or use a snapshot name instead of a path"
            )
        self._path = path

    def take_out(self, name: str, path: Path) -> None:
        """Move a snapshot from the folder to an unused path. If the path ends in ``.zip``, the
        snapshot becomes one file.

        Raises:
            SnapshotError, OSError: the snapshot cannot be moved. It remains in the folder.
        """
        folder = self._path / name
        if not (folder / MANIFEST).is_file():
            raise SnapshotError(
                f"the folder {self._path} on this machine is not the server's snapshot folder: "
                f"copy the snapshot {name} from that folder on the server's machine"
            )
        if path.name.endswith(ZIP):
            pack(folder, path)
        else:
            try:
                folder.rename(path)
                RealFiles().sync_folder(path.parent)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                unpack(folder, path)
        self.remove(name)

    def bring_in(self, path: Path) -> str:
        """Link or copy a snapshot into the folder. Returns the name of the snapshot there.

        Raises:
            SnapshotError, OSError: the path is not a snapshot, or cannot be copied.
        """
        with open_snapshot(path) as snapshot:
            digests = list(snapshot.files)
        name = new_name()
        try:
            if path.is_file():
                _link(path, self._path / f"{name}{ZIP}")
                return name
            folder = self._path / name
            make_folder(folder)
            make_folder(folder / PAGES)
            for digest in digests:
                _link(path / PAGES / digest, folder / PAGES / digest)
            _link(
                path / MANIFEST, folder / MANIFEST
            )  # last: only a folder with a manifest is a snapshot
        except BaseException:
            self.remove(name)
            raise
        return name

    def remove(self, name: str) -> None:
        """Remove a snapshot from the folder, if it exists."""
        with suppress(FileNotFoundError):
            (self._path / name / MANIFEST).unlink()
        shutil.rmtree(self._path / name, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self._path / f"{name}{ZIP}").unlink()


def _link(source: Path, target: Path) -> None:
    """Make ``source`` available at ``target``: with a hard link if possible, otherwise as a
    copy.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy(source, target, follow_symlinks=False)
