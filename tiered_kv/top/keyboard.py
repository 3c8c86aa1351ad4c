"""Keys and signals that wake the loop of the live view. Terminal settings are restored
afterwards.
"""

from __future__ import annotations

import os
import re
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from .view import SORT_KEYS, Action, JobOrder

KEYS: dict[bytes, Action | JobOrder] = {
    b"q": Action.QUIT,
    b"Q": Action.QUIT,
    b"j": Action.NEXT_ROW,
    b"\x1b[B": Action.NEXT_ROW,
    b"\x1bOB": Action.NEXT_ROW,
    b"k": Action.PREVIOUS_ROW,
    b"\x1b[A": Action.PREVIOUS_ROW,
    b"\x1bOA": Action.PREVIOUS_ROW,
    b" ": Action.NEXT_PAGE,
    b"\x1b[6~": Action.NEXT_PAGE,
    b"b": Action.PREVIOUS_PAGE,
    b"\x1b[5~": Action.PREVIOUS_PAGE,
    b"g": Action.FIRST,
    b"\x1b[H": Action.FIRST,
    b"\x1bOH": Action.FIRST,
    b"\x1b[1~": Action.FIRST,
    b"G": Action.LAST,
    b"\x1b[F": Action.LAST,
    b"\x1bOF": Action.LAST,
    b"\x1b[4~": Action.LAST,
    b"e": Action.NEXT_ENGINE,
    **{key.encode(): order for key, order in SORT_KEYS.items()},
}
"""Actions of the keys, by the bytes that terminals send for each key."""

_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]|\x1b(?!$|[\[O])", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_MOST_BEGUN = 32
"""Maximum size of an incomplete key sequence, bytes."""


class Keyboard:
    """Reads keys typed at a terminal.

    Args:
        fd: descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begun = b""

    def read(self) -> Iterator[Action | JobOrder]:
        """Yield the actions of the keys that were typed. A closed terminal yields QUIT. Call only
        if the descriptor is readable.
        """
        try:
            typed = os.read(self.fd, 4096)
        except OSError:  # the terminal was closed
            typed = b""
        if not typed:
            yield Action.QUIT
            return
        typed = self._begun + typed
        begun = _BEGUN.search(typed)
        self._begun = begun[0][:_MOST_BEGUN] if begun is not None else b""
        whole = typed[: begun.start()] if begun is not None else typed
        for key in _KEY.findall(whole):
            if (action := KEYS.get(key)) is not None:
                yield action


@contextmanager
def cbreak_keyboard(fd: int) -> Iterator[Keyboard]:
    """Switch a terminal to cbreak mode, in which each key is readable as soon as it is typed.
    Yields its keyboard. The terminal's settings are restored when the block ends.
    """
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keyboard(fd)
    finally:
        with suppress(termios.error, OSError):  # the terminal was closed
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
"""Signals that wake the loop instead of triggering their default actions."""
NEWS = 0
"""Number that stands for a call of ``ring`` among the signal numbers."""


class Wakeups:
    """A pipe to which signals and threads write, to wake the loop."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def ring(self) -> None:
        """Wake the loop. Callable from any thread."""
        with suppress(
            OSError
        ):  # a full pipe wakes the loop anyway; a closed pipe has no waiting loop
            os.write(self._writing, bytes([NEWS]))

    def wait(self, keys: int | None) -> tuple[set[int], bool]:
        """Wait for a signal, a call of ``ring``, or a key.

        Args:
            keys: descriptor of the keyboard; None without a keyboard.

        Returns:
            The numbers of the signals, with NEWS for a call of ``ring``, and True if there are keys
            to read.
        """
        wanted = [self._reading] if keys is None else [self._reading, keys]
        ready, _, _ = select.select(wanted, [], [])
        rung = set(os.read(self._reading, 4096)) if self._reading in ready else set[int]()
        return rung, keys in ready


@contextmanager
def wakeups() -> Iterator[Wakeups]:
    """Redirect ``SIGNALS`` to a pipe until the block ends. Call on the main thread."""
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
    """Do nothing, because Python already writes the signal to the pipe."""
