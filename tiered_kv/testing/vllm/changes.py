"""Dependencies that a test or a simulation puts in place of the connector's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies

Change = Callable[[Dependencies], Dependencies]
"""Puts something else in place of some dependencies, and closes what it leaves out."""

clock: ContextVar[Clock] = ContextVar("clock", default=time.monotonic)
change: ContextVar[Change | None] = ContextVar("change", default=None)


@contextmanager
def given(the_clock: Clock, the_change: Change) -> Iterator[None]:
    """Have connectors made meanwhile run on this clock, with changed dependencies."""
    clocks, changes = clock.set(the_clock), change.set(the_change)
    try:
        yield
    finally:
        clock.reset(clocks)
        change.reset(changes)
