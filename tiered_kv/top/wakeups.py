"""Wake-ups of a loop that waits: signals, keys, and news from another thread."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
"""Signals that are waited for instead of what they do by themselves."""
NEWS = 0
"""Stands for news among the numbers of signals."""


class Wakeups:
    """A pipe to which signals and threads write."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def ring(self) -> None:
        """Wake the loop. From any thread."""
        with suppress(OSError):  # full: it wakes anyway; or closed: nobody waits
            os.write(self._writing, bytes([NEWS]))

    def wait(self, keys: int | None) -> tuple[set[int], bool]:
        """Wait for something.

        Args:
            keys: descriptor of the keyboard; None if there is none.

        Returns:
            Signals, and NEWS, that came; and True if there are keys to read.
        """
        wanted = [self._reading] if keys is None else [self._reading, keys]
        ready, _, _ = select.select(wanted, [], [])
        rung = set(os.read(self._reading, 4096)) if self._reading in ready else set[int]()
        return rung, keys in ready


@contextmanager
def wakeups() -> Iterator[Wakeups]:
    """Take the signals for the time being. On the main thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, _nothing) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield Wakeups(reading, writing)
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes the signal to the pipe."""
