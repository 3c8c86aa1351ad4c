"""CPU time of a piece of Python, measured independently of how fast or busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUNDS = 20
_LOOP = range(1000)


def loops(work: Callable[[], object], calls: int) -> float:
    """Loops of a thousand additions that this thread could have run during one of ``calls``.

    ``work`` makes all of the calls. The best of some rounds, each with its own loops beside it:
    a machine that is slow is slow at both. An idle core runs one loop in about 30 µs.
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
