"""Files of a store's segments: named, listed and deleted, if need be later."""

from __future__ import annotations

from pathlib import Path

from .capacity import Capacity
from .folders import SEGMENT_NAME, SEGMENT_SUFFIX
from .options import StoreContext

LAST_NUMBER = 99_999_999
"""Largest number of a segment, whose name has eight digits."""
NEARLY_LAST_NUMBER = LAST_NUMBER - 10_000_000
"""Largest number of a segment of an earlier process.

No disk lives to see so many, and no process writes as many as lie between the two.
"""


class SegmentFolder:
    """The folder of one store."""

    def __init__(self, context: StoreContext, capacity: Capacity) -> None:
        self._context = context
        self._capacity = capacity
        self._path = context.options.folder
        self._doomed: list[Path] = []  # to be deleted, which did not work yet
        self._unreadable: list[Path] = []  # perhaps only today

    def path(self, number: int) -> Path:
        return self._path / f"{number:08}{SEGMENT_SUFFIX}"

    def numbers(self) -> list[int]:
        """Numbers of the segments that are there, oldest first.

        Raises:
            OSError: the disk failed.
        """
        names = self._context.files.names(self._path)
        return sorted(int(Path(name).stem) for name in names if SEGMENT_NAME.fullmatch(name))

    def next_number(self) -> int:
        """Number for a new segment: greater than those of the segments that are there.

        A number that no segment lives to have does not count.

        Raises:
            OSError: the disk failed.
        """
        numbers = [number for number in self.numbers() if number <= NEARLY_LAST_NUMBER]
        return max(numbers, default=0) + 1

    def sync(self) -> None:
        """Make durable what was created and deleted.

        Raises:
            OSError: the disk failed.
        """
        self._context.files.sync_folder(self._path)

    def delete(self, path: Path) -> None:
        """Delete a file, later if that fails now. One that is gone is fine."""
        try:
            self._context.files.unlink(path)
            self.sync()
        except FileNotFoundError:
            self._capacity.changed()
        except OSError as error:
            self._context.write_failed(f"{path} cannot be deleted", error)
            self._doomed.append(path)
            self._capacity.changed()
        else:
            self._capacity.granted()

    def retry(self) -> None:
        """Delete what could not be deleted before."""
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            self.delete(path)

    def set_aside(self, path: Path) -> None:
        """Keep a segment that cannot be read now, for as long as there is room."""
        self._unreadable.append(path)

    def delete_set_aside(self) -> bool:
        """Delete the segments set aside; False if there are none."""
        unreadable, self._unreadable = self._unreadable, []
        for path in unreadable:
            self.delete(path)
        return bool(unreadable)

    def delete_all(self) -> None:
        """Delete all segments, durably.

        Raises:
            OSError: some may be left.
        """
        self._doomed = [self.path(number) for number in self.numbers()]
        self.retry()
        self.sync()
        if self._doomed:
            raise FileExistsError(f"{self._doomed[0]} cannot be deleted")
