"""The keyboard: each key at once, without being shown, and the terminal as it was afterwards."""

from __future__ import annotations

import os
import re
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .job_sorting import JobOrder
from .view import SORT_KEYS, Action

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
"""Actions of keys, by what terminals send for them."""

_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]|\x1b(?!$|[\[O])", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_MOST_BEGUN = 32
"""Bytes of a key that has not come whole, at most."""


class Keyboard:
    """Keys typed at a terminal.

    Args:
        fd: its descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begun = b""

    def read(self) -> Iterator[Action | JobOrder]:
        """Read the actions of the keys that were typed; the end of the terminal quits. There must
        be something to read."""
        try:
            typed = os.read(self.fd, 4096)
        except OSError:  # the terminal is gone
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
def each_key_at_once(fd: int) -> Iterator[Keyboard]:
    """The keyboard of a terminal, which gets its settings back at the end."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keyboard(fd)
    finally:
        with suppress(termios.error, OSError):  # it is gone
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)
