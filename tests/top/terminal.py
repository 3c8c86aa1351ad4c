"""A real terminal: a separate tmux server with a command in its only window."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
"""Seconds to wait for an expected text, enough for a busy machine."""
LOOK_EVERY_S = 0.1


class Terminal:
    """A terminal in which a command runs, followed by a shell that waits.

    The shell writes the terminal's settings before and after the command, and the command's exit
    code.

    Args:
        folder: receives tmux's socket and these files.
    """

    def __init__(self, folder: Path, command: list[str], width: int, height: int) -> None:
        self._folder = folder
        self._socket = folder / "tmux"
        code = (
            f"trap : INT TSTP; cd {folder}; stty -g >before; tty >tty; "
            f"sh -c 'echo $$ >pid; exec {shlex.join(command)}'; echo $? >code; "
            "stty -g >after; echo over; exec cat"
        )
        size = ["-x", str(width), "-y", str(height)]
        env = {
            **{name: text for name, text in os.environ.items() if not name.startswith("TMUX")},
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "SHELL": "/bin/sh",
        }
        config = folder / "tmux.conf"
        config.write_text("set -g escape-time 0\nset -g status off\n")
        self._tmux("-u", "-f", str(config), "new-session", "-d", *size, code, env=env)

    def type(self, *keys: str) -> None:
        """Type keys, given by tmux's key names."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def lines(self) -> list[str]:
        """Return the lines on the screen."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def wait_for(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Wait until ``seen`` accepts the lines, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(lines := self.lines()):
            assert time.monotonic() < deadline, "not seen:\n" + "\n".join(lines)
            time.sleep(LOOK_EVERY_S)
        return lines

    def wait_for_text(self, text: str) -> list[str]:
        """Wait until a line contains this text, and return the lines."""
        return self.wait_for(lambda lines: any(text in line for line in lines))

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return int((self._folder / "pid").read_text())

    def is_stopped(self) -> bool:
        """Return True if the process is suspended."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def settings(self) -> str:
        """Return the terminal's current settings."""
        tty = (self._folder / "tty").read_text().strip()
        done = subprocess.run(["stty", "-F", tty, "-g"], capture_output=True, text=True, check=True)
        return done.stdout

    @property
    def settings_before(self) -> str:
        """The terminal's settings before the command ran."""
        return (self._folder / "before").read_text()

    def code(self) -> int:
        """Wait until the command has exited, and return its exit code. Asserts that the terminal's
        settings are restored."""
        self.wait_for(lambda lines: "over" in [line.strip() for line in lines])
        assert (self._folder / "after").read_text() == self.settings_before
        assert self._tmux("display", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]
        return int((self._folder / "code").read_text())

    def end(self) -> None:
        """Close the terminal and everything in it."""
        self._tmux("kill-server", check=False)

    def _tmux(self, *words: str, check: bool = True, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout


def has_ended(pid: int) -> bool:
    """Return True if the process has exited, even if its exit code has not been read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@contextmanager
def top_in(folder: Path, *arguments: str, width: int = 100, height: int = 24) -> Iterator[Terminal]:
    """Run ``tiered-kv top`` in a terminal of this size."""
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux: on Debian, apt-get install tmux")
    command = [sys.executable, "-m", "tiered_kv.cli.app", "top", *arguments]
    made = Terminal(folder, command, width, height)
    try:
        yield made
    finally:
        made.end()
