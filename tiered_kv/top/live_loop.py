"""The loop of the live view: one thread polls the server, and the main thread shows the server's
state and handles keys.
"""

from __future__ import annotations

import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live

from .keyboard import NEWS, Keyboard, Wakeups, cbreak_keyboard, wakeups
from .screen import frame, rows_of
from .server_state import ServerState
from .view import Action, JobOrder, View
from .wording import Canvas

Look = Callable[[], ServerState]


class Looks:
    """Polls a server repeatedly, in a thread.

    Args:
        first: the initial state.
        look: polls the server and returns its state.
        every_s: time from the end of a poll to the start of the next, seconds.
        tell: called after each poll.

    Attributes:
        last: the latest state.
        failure: unexpected exception in a poll, which stopped the polling; None if there was none.
    """

    def __init__(self, first: ServerState, look: Look, every_s: float, tell: Callable[[], None]):
        self.last = first
        self.failure: Exception | None = None
        self._look = look
        self._every_s = every_s
        self._tell = tell
        self._ends = threading.Event()

    def go_on(self) -> None:
        """Poll until ``end`` is called."""
        while not self._ends.wait(self._every_s):
            try:
                self.last = self._look()
            except Exception as error:
                self.failure = error
                self.end()
            self._tell()

    def end(self) -> None:
        """Stop polling, without waiting for a poll in progress."""
        self._ends.set()


@contextmanager
def looks(first: ServerState, look: Look, every_s: float, bell: Wakeups) -> Iterator[Looks]:
    """Poll a server in a separate thread until the block ends."""
    made = Looks(first, look, every_s, bell.ring)
    # This is a daemon thread, so that quitting does not wait for the server's answer.
    thread = threading.Thread(target=made.go_on, name="tiered-kv top", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.end()


def live(first: ServerState, look: Look, view: View, every_s: float, keys: int | None) -> int:
    """Show a server until the user quits.

    Args:
        first: the initial state.
        look: polls the server and returns its state; does not raise.
        every_s: time between two polls, seconds.
        keys: descriptor of the terminal's keyboard; None without a keyboard.

    Returns:
        The exit code: 0 if the user quit, or 128 plus the number of the signal that ended the
        program.
    """
    with wakeups() as bell, looks(first, look, every_s, bell) as seen:
        while True:
            try:
                view, ended_by = _shown(seen, view, bell, keys)
            except (OSError, termios.error):  # the terminal was closed
                ended_by = signal.SIGHUP
            if ended_by != signal.SIGTSTP:
                return 128 + ended_by if ended_by else 0
            os.kill(os.getpid(), signal.SIGSTOP)  # the terminal has been restored


def _shown(seen: Looks, view: View, bell: Wakeups, keys: int | None) -> tuple[View, int]:
    """Show a server until a key quits or a signal arrives. Returns the last view, and the number of
    the signal, which is 0 for a key.

    Raises:
        Exception: polling failed unexpectedly (``Looks.failure``).
        OSError, termios.error: the terminal was closed.
    """
    console = full_size_console()
    with ExitStack() as stack:
        keyboard = stack.enter_context(cbreak_keyboard(keys)) if keys is not None else None
        screen = stack.enter_context(
            Live(
                console=console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        )
        while True:
            state, canvas = seen.last, _canvas(console)
            view = view.within(len(view.of(state).jobs), rows_of(state, view, canvas))
            screen.update(frame(state, view, canvas), refresh=True)
            rung, typed = bell.wait(keys)
            if seen.failure is not None:
                raise seen.failure
            if ends := rung - {NEWS, signal.SIGWINCH}:
                return view, min(ends, key=lambda number: number == signal.SIGTSTP)
            if typed and keyboard is not None:
                after = _typed(keyboard, view, seen.last, canvas)
                if after is None:
                    return view, 0
                view = after


def _typed(keyboard: Keyboard, view: View, state: ServerState, canvas: Canvas) -> View | None:
    """Return the view after the typed keys; None if one of the keys quits."""
    for action in keyboard.read():
        if action is Action.QUIT:
            return None
        if isinstance(action, JobOrder):
            view = view.sorted_by(action)
        else:
            view = view.moved(action, state, rows_of(state, view, canvas))
    return view


def full_size_console() -> Console:
    """Return a console of the terminal's current size. The variables COLUMNS and LINES are
    ignored.
    """
    env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Console(_environ=env)


def _canvas(console: Console) -> Canvas:
    width, height = console.size
    return Canvas(width, height, can_show_unicode(console))


def can_show_unicode(console: Console) -> bool:
    """Return True if the console's encoding is a Unicode encoding."""
    return console.encoding.startswith("utf")
