"""A headless browser for tests of HTML pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 600
"""Timeout of the browser in seconds. On a busy machine it takes a minute."""


def dom_of(page: Path, folder: Path) -> str:
    """Return the page's DOM as HTML after its scripts have run. The test is skipped if Chromium is
    not installed.

    Args:
        folder: folder for all files that the browser writes.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no Chromium: on Debian, apt-get install chromium")
    arguments = [
        browser,
        "--headless=new",
        "--no-sandbox",  # root cannot use the sandbox
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=60000",  # the time limit of the scripts, in virtual time
        "--dump-dom",
        page.as_uri(),
    ]
    with (folder / "browser.log").open("w") as log:
        running = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=LIMIT_S)
        finally:
            end(running)
    assert running.returncode == 0, (folder / "browser.log").read_text()
    return output.decode()


def end(running: subprocess.Popen[bytes]) -> None:
    """Kill a browser and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
