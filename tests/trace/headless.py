"""A headless browser for tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 600
"""Seconds after which a browser hangs: a busy machine takes a minute."""


def dom_of(page: Path, folder: Path) -> str:
    """A page's elements once its scripts have run, as HTML. The test is skipped where there is no
    Chromium.

    Args:
        folder: for all that the browser writes.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no Chromium: on Debian, apt-get install chromium")
    arguments = [
        browser,
        "--headless=new",
        "--no-sandbox",  # which root cannot have
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=60000",  # the scripts' own time, however long that takes
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
    """End a browser and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
