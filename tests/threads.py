"""Detection of threads that a test leaves running."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet

LAST_BREATH_S = 2.0
"""Seconds that a thread has to return after it was told to stop."""


def running_threads() -> frozenset[threading.Thread]:
    return frozenset(threading.enumerate())


def leaked_threads(
    before: AbstractSet[threading.Thread], patience_s: float = LAST_BREATH_S
) -> list[str]:
    """Return the names of threads that are still running and are not in ``before``: this project's
    threads, and non-daemon threads, which would keep the process alive."""
    suspects = [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("tiered-kv"))
    ]
    for thread in suspects:
        thread.join(patience_s)
    return [thread.name for thread in suspects if thread.is_alive()]
