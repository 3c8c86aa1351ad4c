"""Connection to one server, with a deadline for every byte."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence

from tiered_kv.remote.address import Server
from tiered_kv.remote.base import Parts

from .replies import Replies

MOST_PARTS = 512
"""Parts given to the system at a time; Linux takes 1,024."""
LEAST_S = 1e-4
"""Shortest time that is waited. Zero would mean to not wait at all."""


class Connection:
    """An open connection. After any OSError or ``ProtocolError`` it is of no use.

    Args:
        tls: encrypts the connection; None if it is not encrypted.
        deadline: of the connecting, a time of ``time.monotonic()``.

    Attributes:
        replies: what the server says, in order.
        deadline: of what is sent and read next.
        received: bytes received so far.

    Raises:
        OSError: the server cannot be reached.
    """

    def __init__(self, server: Server, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.deadline = deadline
        self.received = 0
        self._socket = socket.create_connection((server.host, server.port), self._left_s())
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(self._left_s())
                self._socket = tls.wrap_socket(self._socket, server_hostname=server.host)
        except BaseException:
            self._socket.close()
            raise
        self._encrypted = tls is not None
        self.replies = Replies(self._receive)

    def send(self, parts: Parts) -> None:
        """Send all parts, from where they lie.

        Raises:
            OSError: not all was sent by the deadline.
        """
        if self._encrypted:  # no vectored send
            self._socket.settimeout(self._left_s())
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part) for part in parts if len(part)]
        for start in range(0, len(views), MOST_PARTS):
            self._send_some(views[start : start + MOST_PARTS])

    def _send_some(self, views: Sequence[memoryview]) -> None:
        rest = list(views)
        while rest:
            self._socket.settimeout(self._left_s())
            sent = self._socket.sendmsg(rest)
            at = 0
            while at < len(rest) and sent >= rest[at].nbytes:
                sent -= rest[at].nbytes
                at += 1
            rest = rest[at:]
            if rest and sent:
                rest[0] = rest[0].cast("B")[sent:]

    def close(self) -> None:
        """Give the connection up. Idempotent."""
        self._socket.close()

    def _receive(self, into: memoryview) -> int:
        self._socket.settimeout(self._left_s())
        count = self._socket.recv_into(into)
        if not count:
            raise ConnectionResetError("the server has closed the connection")
        self.received += count
        return count

    def _left_s(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        return max(left, LEAST_S)
