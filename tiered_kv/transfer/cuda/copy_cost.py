"""Choice of the faster of two ways to copy, from the measured cost of each.

The cost of a way has three parts: the start with the first contiguous run, each further run, and
each byte. Runs are set up while earlier bytes travel, so the larger of the last two counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RUN_BYTES = 4096
MANY_RUNS = 256
LARGE_BYTES = 16 << 20

KERNEL_MARGIN = 0.95
"""Factor by which a kernel must be faster, since it takes multiprocessors from the model."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of a way to copy, seconds; see the module."""

    begin_s: float
    run_s: float
    byte_s: float

    def seconds(self, runs: int, nbytes: int) -> float:
        return self.begin_s + max((runs - 1) * self.run_s, nbytes * self.byte_s)


def measure_cost(seconds: Callable[[int, int], float]) -> CopyCost:
    """Measure a cost with three copies.

    Args:
        seconds: makes copies, given the number of runs and the bytes of each; returns the duration.
    """
    begin_s = seconds(1, RUN_BYTES)
    many_s, large_s = seconds(MANY_RUNS, RUN_BYTES), seconds(1, LARGE_BYTES)
    return CopyCost(
        begin_s,
        max(0.0, many_s - begin_s) / (MANY_RUNS - 1),
        max(0.0, large_s - begin_s) / (LARGE_BYTES - RUN_BYTES),
    )


def kernel_pays(kernel: CopyCost, engines: CopyCost, runs: int, nbytes: int) -> bool:
    """True if a kernel should make the copy, not the copy engines."""
    return kernel.seconds(runs, nbytes) < KERNEL_MARGIN * engines.seconds(runs, nbytes)
