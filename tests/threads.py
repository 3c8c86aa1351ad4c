"""Threads that a test leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet

LAST_BREATH_S = 2.0
"""For a thread that has been told to stop, and only has to return."""


def running_threads() -> frozenset[threading.Thread]:
    return frozenset(threading.enumerate())


def leaked_threads(
    before: AbstractSet[threading.Thread], patience_s: float = LAST_BREATH_S
) -> list[str]:
    """Names of this project's threads, and of all that would keep the process alive,
    which run now and did not ``before``."""
    suspects = [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("tiered-kv"))
    ]
    for thread in suspects:
        thread.join(patience_s)
    return [thread.name for thread in suspects if thread.is_alive()]
