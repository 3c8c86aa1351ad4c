"""Connection to one server, with a deadline for every byte.

The module also resolves a server's addresses, on a separate thread, because a name server may be
slow.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from tiered_kv.remote.address import Server
from tiered_kv.remote.base import Parts

from .replies import Replies

REFRESH_S = 0.01
"""Maximum wait for new addresses if earlier ones are known, seconds."""
THREAD_NAME = "tiered-kv-names"


class Address(NamedTuple):
    """Network address of a server, as passed to ``socket.connect``."""

    family: int
    place: tuple[Any, ...]


class Resolver:
    """Addresses of a server's name, which is resolved again for each connection. Used from one
    thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: Sequence[Address] = ()
        self._error: OSError | None = None
        self._asking: Thread | None = None

    def addresses(self, deadline: float) -> Sequence[Address]:
        """Return the addresses. If resolving the name takes long, returns the previous addresses.

        Args:
            deadline: a time of ``time.monotonic()``.

        Raises:
            OSError: the name has no address, or is not resolved by the deadline.
        """
        with suppress(OSError):
            return self._look_up(socket.AI_NUMERICHOST)  # which uses no name server
        if self._asking is None or not self._asking.is_alive():
            self._asking = Thread(target=self._ask, name=THREAD_NAME, daemon=True)
            self._asking.start()
        left = max(0.0, deadline - time.monotonic())
        self._asking.join(min(left, REFRESH_S) if self._known else left)
        if self._known:
            return self._known
        if self._asking.is_alive():
            raise TimeoutError("the server's host name is still being resolved")
        raise self._error or OSError("the server's host name has no address")

    def _ask(self) -> None:
        try:
            self._known = self._look_up(0)
        except OSError as error:
            self._error = error

    def _look_up(self, flags: int) -> Sequence[Address]:
        server = self._server
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=flags)
        return [Address(family, place) for family, _, _, _, place in found]


MOST_PARTS = 512
"""Number of parts passed to one system call; Linux accepts 1,024."""
LEAST_S = 1e-4
"""Shortest wait, seconds. A wait of zero would return immediately."""
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """An open connection. After an OSError or ``ProtocolError`` it is unusable.

    Args:
        addresses: addresses of the server, tried in order.
        tls: encrypts the connection; None for no encryption.
        deadline: deadline for connecting, a time of ``time.monotonic()``.

    Attributes:
        replies: the server's replies, in order.
        deadline: deadline for the next sends and reads.
        received: bytes received in this call.
        owes: True while replies may be outstanding.

    Raises:
        OSError: the server cannot be reached.
    """

    def __init__(
        self,
        server: Server,
        addresses: Sequence[Address],
        tls: ssl.SSLContext | None,
        deadline: float,
    ) -> None:
        self.begin(deadline)
        self._socket = self._reach(addresses)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(self._left_s())
                self._socket = tls.wrap_socket(self._socket, server_hostname=server.host)
            self._socket.setblocking(False)  # buffered data is read without waiting
        except BaseException:
            self._socket.close()
            raise
        self._encrypted = tls is not None
        self.replies = Replies(self._receive)

    def _reach(self, addresses: Sequence[Address]) -> socket.socket:
        """Return a socket that is connected to one of the addresses. The time until the deadline is
        divided among the addresses. Raises OSError if no connection succeeds."""
        failed: OSError | None = None
        for at, address in enumerate(addresses):
            try:
                return _reach_one(address, self._left_s() / (len(addresses) - at))
            except OSError as error:
                failed = error
        raise failed or OSError("the server has no address")

    def begin(self, deadline: float) -> None:
        """Start a call. Until it is answered completely, the connection serves no other call."""
        self.deadline = deadline
        self.received = 0
        self.owes = True

    def is_idle(self) -> bool:
        """True if the next reply will answer the next command: no reply is outstanding, no extra
        data has arrived, and the server has not closed the connection, as some servers do after a
        while."""
        if self.owes or self.replies.unread:
            return False
        try:
            self._socket.recv(1)  # through TLS, which has its own messages
        except _NOT_YET:
            return True
        except OSError:
            return False
        return False

    def send(self, parts: Parts) -> None:
        """Send all parts without copying them.

        Raises:
            OSError: not everything was sent by the deadline.
        """
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        for start in range(0, len(views), MOST_PARTS):
            self._send_some(views[start : start + MOST_PARTS])

    def _send_some(self, views: Sequence[memoryview]) -> None:
        rest = list(views)
        while rest:
            self._left_s()
            try:
                # TLS has no vectored send.
                sent = self._socket.send(rest[0]) if self._encrypted else self._socket.sendmsg(rest)
            except _NOT_YET as error:
                self._wait(error, select.POLLOUT)
                continue
            at = 0
            while at < len(rest) and sent >= rest[at].nbytes:
                sent -= rest[at].nbytes
                at += 1
            rest = rest[at:]
            if rest and sent:
                rest[0] = rest[0][sent:]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _receive(self, into: memoryview, beyond: memoryview) -> int:
        while True:
            self._left_s()
            try:
                if self._encrypted:
                    count = self._socket.recv_into(into)
                else:
                    count = self._socket.recvmsg_into((into, beyond))[0]
            except _NOT_YET as error:
                self._wait(error, select.POLLIN)
                continue
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self.received += count
            return count

    def _wait(self, error: OSError, event: int) -> None:
        """Wait until a call that would have blocked can be repeated.

        Args:
            error: the call's exception.
            event: ``POLLIN`` or ``POLLOUT``, for a connection without TLS.

        Raises:
            TimeoutError: the deadline has passed.
        """
        if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):  # either direction
            event = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll(1e3 * self._left_s())

    def _left_s(self) -> float:
        """Return the time left until the deadline, seconds.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return max(left, LEAST_S)


def _reach_one(address: Address, seconds: float) -> socket.socket:
    reached = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        reached.settimeout(seconds)
        reached.connect(address.place)
    except BaseException:
        reached.close()
        raise
    return reached
