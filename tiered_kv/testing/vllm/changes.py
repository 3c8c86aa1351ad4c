"""Dependencies by which a test or a simulation replaces the connector's own."""

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
    """Create connectors with this clock and with changed dependencies inside the ``with`` block."""
    clocks, changes = clock.set(the_clock), change.set(the_change)
    try:
        yield
    finally:
        clock.reset(clocks)
        change.reset(changes)
