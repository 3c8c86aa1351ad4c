"""A proxy in front of a store, which can be slow or flip bytes of what it carries."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Self

DELAY_S = 0.2
BYTES_PER_S = 1_000_000
PIECE = 64 << 10
SLOW_PIECE = 16 << 10
LONG = 1_000
"""Length of a piece in which a byte is flipped: in values, not in what frames them."""


class Link(Enum):
    """Quality of the link."""

    GOOD = "good"
    SLOW = "slow"
    """200 ms later, at 1 MB/s."""
    FLIPS = "flips"
    """A byte of every long piece from the store is another one."""


class Proxy:
    """A port that leads to another, gone when the block ends.

    Attributes:
        port: where it listens.
        link: what becomes of bytes from now on.
    """

    def __init__(self, target: int) -> None:
        self.link = Link.GOOD
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._over = False

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        for end in [self._listener, *self._ends]:
            _shut(end)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _begin(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                back = socket.create_connection(("127.0.0.1", self._target), 1.0)
                back.settimeout(None)
            except OSError:
                client.close()
                continue
            for end in (client, back):  # else what is small waits 40 ms for an acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends |= {client, back}
            self._begin(self._carry, client, back, False)
            self._begin(self._carry, back, client, True)

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(SLOW_PIECE if self.link is Link.SLOW else PIECE):
                if self.link is Link.SLOW:
                    time.sleep((0.0 if answers else DELAY_S) + len(data) / BYTES_PER_S)
                elif self.link is Link.FLIPS and answers and len(data) >= LONG:
                    at = len(data) // 2
                    data = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
                target.sendall(data)
        for end in (source, target):
            _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
