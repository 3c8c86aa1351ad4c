"""An HTTP server process on loopback, as a context manager."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .load import add_unseen, children_seconds, group_members, group_seconds

POLL_S = 0.2
STOP_GRACE_S = 20.0
"""Seconds that ``stop`` waits for the process, and then for its children, before killing them."""
START_GRACE_S = 2.0
"""Seconds that a failed or interrupted start waits for the process before killing it. A starting
process has no work to finish, and may ignore SIGTERM."""
LOG_LINES = 30

# Matches only at the start of a message, because warnings also mention errors.
_ERROR = re.compile(r"(?:^|\] )(?P<said>[A-Za-z_.]*(?:Error|Exception): .*\S)")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for loopback


class ServerError(RuntimeError):
    """The server cannot be started, did not start, or died. If it ran, the message ends with the
    tail of its log.

    Attributes:
        log: the complete log; empty if the server did not run.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


def error_in(log: str) -> str | None:
    """Return the first error in a server's log; None if there is none. Later errors mostly report
    only that the server died.
    """
    found = (_ERROR.search(line) for line in log.splitlines())
    return next((match["said"] for match in found if match), None)


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and environment of a process to start.

    Attributes:
        command: program and arguments.
        env: complete environment of the process.
    """

    command: Sequence[str]
    env: Mapping[str, str]


class Service(ABC):
    """A server process and its descendants, in a separate process group.

    Not thread-safe. ``start`` and ``stop`` may alternate; ``stop`` may be called at any time.

    Args:
        log_path: file for standard output and standard error; overwritten at every start.
        start_timeout_s: how long ``start`` waits for ``health_path``.
        on_wait: called about five times per second while ``start`` waits, with the seconds waited
            so far.

    Attributes:
        start_s: duration of the last start, seconds.
        pid: id of the process and of its process group; None when not running.
        health_path: path that returns 200 once the server is ready.
    """

    health_path = "/health"

    def __init__(
        self,
        log_path: Path,
        *,
        start_timeout_s: float = 600.0,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.log_path = log_path
        self.port = 0
        self.start_s = 0.0
        self._start_timeout_s = start_timeout_s
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @abstractmethod
    def launch(self, port: int) -> Launch:
        """Return the command that serves on 127.0.0.1:``port``, and its environment.

        Raises:
            ServerError: the server cannot be started on this machine.
        """

    @property
    def url(self) -> str:
        """Base URL without a path, such as ``http://127.0.0.1:8000``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process and wait until it answers on ``health_path``.

        Raises:
            ServerError: the process died or did not answer in time. No process is left running.
            RuntimeError: the process is already running.
        """
        if self._process is not None:
            raise RuntimeError(f"server {self.url} is already running")
        self.port = free_port()
        launch = self.launch(self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # vLLM leaves sockets and a file of its process group in the temporary folder.
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [*_parent_guard(), *launch.command],
                    env={**launch.env, "TMPDIR": self._scratch.name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A new process group, but not a new session: Linux gives each session a
                    # scheduling group (autogroup), and next to the busy session of an engine, a
                    # client or a store may wait for seconds for a core.
                    process_group=0,
                )
            self._wait_healthy()
        except BaseException:
            self._end(START_GRACE_S)
            raise

    def check(self) -> None:
        """Check that the process is running.

        Raises:
            ServerError: the process is not running.
        """
        if self._process is None:
            raise ServerError("the server is not running")
        code = self._process.poll()
        if code is not None:
            raise self.failed(f"the server exited with status {code}.")

    def stop(self) -> None:
        """Stop the process group: SIGTERM, then SIGKILL after a grace period. Idempotent."""
        self._end(STOP_GRACE_S)

    def quit(self, most_s: float) -> None:
        """Let the server exit by itself, and wait until it has.

        SIGTERM is sent to the API server alone. The API server sends it to the engine, and an
        engine that receives the signal twice is killed before it writes its trace.

        Args:
            most_s: maximum wait, seconds.

        Raises:
            ServerError: the server does not exit in time.
        """
        if (pid := self.pid) is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + most_s
        while group_members(pid):
            if time.monotonic() > deadline:
                raise self.failed(f"the server did not exit within {most_s:g} s.")
            time.sleep(POLL_S)

    def log_text(self) -> str:
        """Return the complete log so far; empty if there is no log."""
        with contextlib.suppress(OSError):
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        return ""

    def log_tail(self) -> str:
        """Return the path of the log and, below it, the last lines."""
        return "\n".join([f"--- {self.log_path}", *self.log_text().splitlines()[-LOG_LINES:]])

    def get(self, path: str, timeout_s: float = 30.0) -> str:
        """Send a GET request and return the body of the response.

        Raises:
            OSError: there is no response, or the response is an error.
        """
        with _DIRECT.open(f"{self.url}{path}", timeout=timeout_s) as response:
            body: bytes = response.read()
        return body.decode()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def failed(self, message: str) -> ServerError:
        """Return an error whose message is followed by the tail of the log."""
        return ServerError(f"{message}\n{self.log_tail()}", self.log_text())

    def _wait_healthy(self) -> None:
        began = time.monotonic()
        while True:
            self.check()
            self.start_s = time.monotonic() - began
            with contextlib.suppress(OSError):
                self.get(self.health_path, 2.0)
                return
            if self.start_s > self._start_timeout_s:
                limit = f"{self._start_timeout_s:.0f} s"
                raise self.failed(f"the server did not answer within {limit}.")
            self._on_wait(self.start_s)
            time.sleep(POLL_S)

    def _end(self, grace_s: float) -> None:
        process, self._process = self._process, None
        scratch, self._scratch = self._scratch, None
        with scratch or contextlib.nullcontext():
            if process is not None:
                _end_group(process, grace_s)


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    used_s, counted_s = group_seconds(process.pid), children_seconds()
    try:
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        # The API server does not wait for the engine, which may still be writing.
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # even if the wait is interrupted
        process.wait()
        add_unseen(used_s - (children_seconds() - counted_s))


def _parent_guard() -> list[str]:
    """Return a command prefix that stops the server when this process is killed; empty without
    setpriv. The kernel watches the thread that forked, so the prefix is empty outside the main
    thread.
    """
    setpriv = shutil.which("setpriv")
    is_main = threading.current_thread() is threading.main_thread()
    return [setpriv, "--pdeathsig", "TERM"] if setpriv and is_main else []


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
