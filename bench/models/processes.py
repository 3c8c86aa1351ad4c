"""Processes of models: started in a group of their own, and ended with all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiered_kv.bench.servers.load import group_members

TERM_GRACE_S = 10.0


class TimedOut(RuntimeError):
    """The process took longer than it may."""


def run_process(
    module: str, words: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float
) -> int:
    """Run a module; returns its exit status, negative if a signal ended it.

    Nothing that it started is left when this returns or raises.

    Raises:
        TimedOut: it was ended after ``timeout_s``.
    """
    command = [sys.executable, "-m", module, *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise TimedOut(f"took longer than {timeout_s:.0f} s") from None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process's group: first asked, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None and not group_members(process.pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + TERM_GRACE_S
        while time.monotonic() < deadline and group_members(process.pid):
            process.poll()
            time.sleep(0.05)
    process.wait()
