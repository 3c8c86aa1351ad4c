"""Addresses of a server, found beside the thread that asks: a name server may take long."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from tiered_kv.remote.address import Server

REFRESH_S = 0.01
"""Seconds for which new addresses are waited for where old ones are known."""
THREAD_NAME = "tiered-kv-names"


class Address(NamedTuple):
    """Place of a server, as ``socket.connect`` takes it."""

    family: int
    place: tuple[Any, ...]


class Resolver:
    """The addresses that a server's name has, looked up anew for each connection. One thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: Sequence[Address] = ()
        self._error: OSError | None = None
        self._asking: Thread | None = None

    def addresses(self, deadline: float) -> Sequence[Address]:
        """The addresses, by a time of ``time.monotonic()``: those of before if new ones take long.

        Raises:
            OSError: there are none, or not yet.
        """
        with suppress(OSError):
            return self._look_up(socket.AI_NUMERICHOST)  # which asks nobody
        if self._asking is None or not self._asking.is_alive():
            self._asking = Thread(target=self._ask, name=THREAD_NAME, daemon=True)
            self._asking.start()
        left = max(0.0, deadline - time.monotonic())
        self._asking.join(min(left, REFRESH_S) if self._known else left)
        if self._known:
            return self._known
        if self._asking.is_alive():
            raise TimeoutError("its name is still being looked up")
        raise self._error or OSError("its name has no address")

    def _ask(self) -> None:
        try:
            self._known = self._look_up(0)
        except OSError as error:
            self._error = error

    def _look_up(self, flags: int) -> Sequence[Address]:
        server = self._server
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=flags)
        return [Address(family, place) for family, _, _, _, place in found]
