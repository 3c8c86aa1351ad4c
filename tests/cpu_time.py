"""CPU time of a Python function, in a unit that does not depend on the machine's speed or load."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUNDS = 20
_LOOP = range(1000)


def loops(work: Callable[[], object], calls: int) -> float:
    """Return the CPU time of one call, in units of a loop of a thousand additions. A loop
    takes about 30 µs on an idle core.

    ``work`` makes ``calls`` calls. The result is the best of several rounds. Each round times its
    own loops, because a slow machine slows the loops and the calls equally.
    """
    best = float("inf")
    for _ in range(_ROUNDS):
        loop_s = min(_cpu_s(_add) for _ in range(10))
        best = min(best, _cpu_s(work) / calls / loop_s)
    return best


def _add() -> int:
    total = 0
    for number in _LOOP:
        total += number
    return total


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
