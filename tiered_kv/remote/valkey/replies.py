"""Replies of the Redis protocol (RESP 2), read from a connection.

Lines pass through a small buffer. A value is received directly into the caller's memory: only its
first bytes, which arrived with the line before it, are copied. Any received bytes either give a
reply or raise ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

BUFFER_BYTES = 16 << 10
AHEAD_BYTES = 1 << 10
"""Bytes that are read beyond a value: its end, and the line of the next value. More bytes would
belong to the next value, and would have to be copied."""
MOST_LINE = 8 << 10
"""Longest line of a reply, bytes."""
MOST_DIGITS = 20

MOST_ITEMS, MOST_DEPTH, MOST_TEXT = 1 << 16, 6, 1 << 16
"""Limits of a nested reply: items of a list, nesting, and bytes of a text. The slots of a cluster
are at most 2^14 lists."""

ABSENT = -1
"""Length of a missing value."""

Reply: TypeAlias = "bytes | int | list[Reply] | None"
"""A reply of any type; None for a missing value."""


class ProtocolError(Exception):
    """Bytes that are not a valid reply in RESP 2."""


class ServerError(Exception):
    """An error reply. The connection remains usable."""

    @property
    def code(self) -> str:
        """The error code at the start of the message, or the whole message for generic errors."""
        code = str(self).split(" ", 1)[0]
        return str(self) if code == "ERR" else code


class Replies:
    """Reads a server's replies from a connection. All methods that read raise ServerError for an
    error reply, ProtocolError for any other unexpected reply, and the errors of ``receive``.

    Args:
        receive: receives at least one byte into memory and returns the number of bytes, or raises
            OSError. Once the first piece of memory is full, it may continue in the second piece.
    """

    def __init__(self, receive: Callable[[memoryview, memoryview], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # range of received and unread bytes

    @property
    def unread(self) -> bool:
        """True if received bytes have not been read."""
        return self._start < self._stop

    def status(self) -> None:
        """Read a reply that reports success.

        Raises:
            ServerError: the reply is an error.
        """
        if (line := self._line())[:1] != b"+":
            raise ProtocolError(f"expected a status, got {line[:40]!r}")

    def number(self) -> int:
        """Read an integer reply, and return the integer."""
        return self._integer(self._line(), b":")

    def length(self) -> int:
        """Read the start of a value, and return its length in bytes, or ``ABSENT`` if the value is
        missing.

        ``value`` or ``skip`` must follow, unless the value is missing.
        """
        length = self._integer(self._line(), b"$")
        if length < ABSENT:
            raise ProtocolError(f"the length of a value is negative: {length} bytes")
        return length

    def value(self, out: memoryview) -> None:
        """Read a value of ``len(out)`` bytes into ``out``."""
        done, whole = min(len(out), self._stop - self._start), len(out)
        out[:done] = self._view[self._start : self._start + done]
        self._start += done
        if done < whole:
            ahead = self._view[:AHEAD_BYTES]
            while done < whole:
                done += self._receive(out[done:], ahead)
            self._start, self._stop = 0, done - whole
        self._end_of_value()

    def skip(self, length: int) -> None:
        """Read a value of ``length`` bytes and discard it."""
        while length:
            if self._start == self._stop:
                self._fill()
            step = min(length, self._stop - self._start)
            self._start += step
            length -= step
        self._end_of_value()

    def nested(self, depth: int = MOST_DEPTH) -> Reply:
        """Read a reply of any type.

        Raises:
            ServerError: the reply is an error, or contains one.
        """
        line = self._line()
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b":":
            return self._integer(line, b":")
        listed = line[:1] == b"*"
        count = self._integer(line, b"*" if listed else b"$")
        if count == ABSENT:
            return None
        if not 0 <= count <= (MOST_ITEMS if listed else MOST_TEXT) or not depth:
            raise ProtocolError(f"the reply is too large or nested too deeply: {line[:40]!r}")
        if listed:
            return [self.nested(depth - 1) for _ in range(count)]
        text = bytearray(count)
        self.value(memoryview(text))
        return bytes(text)

    def _end_of_value(self) -> None:
        while self._stop - self._start < 2:
            self._fill()
        at_end = self._buffer.startswith(b"\r\n", self._start)
        self._start += 2
        if not at_end:
            raise ProtocolError("the value is longer than announced")

    def _integer(self, line: bytes, kind: bytes) -> int:
        digits = line[1:]
        if line[:1] != kind or len(digits) > MOST_DIGITS or not digits.lstrip(b"-").isdigit():
            raise ProtocolError(f"expected {kind.decode()} and a number, got {line[:40]!r}")
        try:
            return int(digits)
        except ValueError:
            raise ProtocolError(f"{line[:40]!r} does not contain a number") from None

    def _line(self) -> bytes:
        """Return the next line, without its line end.

        Raises:
            ServerError: the line is an error reply.
        """
        searched = self._start
        while (end := self._buffer.find(b"\r\n", searched, self._stop)) < 0:
            if self._stop - self._start > MOST_LINE:
                raise ProtocolError(f"a line of the reply is longer than {MOST_LINE} bytes")
            searched = max(self._start, self._stop - 1)
            moved = self._fill()
            searched -= moved
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        if line[:1] == b"-":
            raise ServerError(line[1:].decode("utf-8", "replace"))
        return line

    def _fill(self) -> int:
        """Receive more bytes. Returns the distance by which buffered bytes were moved to the
        front."""
        moved = 0
        if self._start == self._stop:
            moved, self._start, self._stop = self._start, 0, 0
        elif self._stop == len(self._buffer):
            moved = self._start
            self._buffer[: self._stop - moved] = self._buffer[moved : self._stop]
            self._start, self._stop = 0, self._stop - moved
        self._stop += self._receive(self._view[self._stop :], self._view[:0])
        return moved
