"""Replaces dependencies of the connector in tests and simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies

Change = Callable[[Dependencies], Dependencies]
"""Function that returns the dependencies with some of them replaced, and closes the replaced ones.
"""

clock: ContextVar[Clock] = ContextVar("clock", default=time.monotonic)
change: ContextVar[Change | None] = ContextVar("change", default=None)


@contextmanager
def given(the_clock: Clock, the_change: Change) -> Iterator[None]:
    """Use this clock and these changed dependencies for connectors that are created inside the
    ``with`` block.
    """
    clocks, changes = clock.set(the_clock), change.set(the_change)
    try:
        yield
    finally:
        clock.reset(clocks)
        change.reset(changes)
