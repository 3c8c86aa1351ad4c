"""The files of a store's segments: named, listed and deleted, if need be later."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.storage.capacity import SEGMENT_SUFFIX, Capacity
from tiered_kv.storage.store_means import StoreMeans


class SegmentFolder:
    """The folder of one store."""

    def __init__(self, means: StoreMeans, capacity: Capacity) -> None:
        self._means = means
        self._capacity = capacity
        self._path = means.options.folder
        self._doomed: list[Path] = []  # to be deleted, which did not work yet
        self._unreadable: list[Path] = []  # perhaps only today

    def path(self, number: int) -> Path:
        return self._path / f"{number:08}{SEGMENT_SUFFIX}"

    def numbers(self) -> list[int]:
        """Numbers of the segments that are there, oldest first.

        Raises:
            OSError: the disk failed.
        """
        names = [Path(name) for name in self._means.files.names(self._path)]
        stems = [name.stem for name in names if name.suffix == SEGMENT_SUFFIX]
        return sorted(int(stem) for stem in stems if len(stem) == 8 and stem.isdecimal())

    def sync(self) -> None:
        """What was created and deleted stays so.

        Raises:
            OSError: the disk failed.
        """
        self._means.files.sync_folder(self._path)

    def delete(self, path: Path) -> None:
        """A file that cannot be deleted now is tried again later. One that is gone is fine."""
        try:
            self._means.files.unlink(path)
            self.sync()
        except FileNotFoundError:
            pass
        except OSError as error:
            self._means.write_failed(f"{path} cannot be deleted", error)
            self._doomed.append(path)
        self._capacity.changed()

    def retry(self) -> None:
        """Delete what could not be deleted before."""
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            self.delete(path)

    def set_aside(self, path: Path) -> None:
        """A segment that cannot be read now stays, for as long as there is room."""
        self._unreadable.append(path)

    def delete_set_aside(self) -> bool:
        """Whether there was anything."""
        unreadable, self._unreadable = self._unreadable, []
        for path in unreadable:
            self.delete(path)
        return bool(unreadable)

    def delete_all(self) -> None:
        """Nothing is left, durably.

        Raises:
            OSError: perhaps something is.
        """
        self._doomed = [self.path(number) for number in self.numbers()]
        self.retry()
        self.sync()
        if self._doomed:
            raise FileExistsError(f"{self._doomed[0]} cannot be deleted")
