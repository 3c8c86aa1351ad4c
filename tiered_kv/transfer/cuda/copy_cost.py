"""Which of two ways to copy is faster, from what each was measured to cost.

A way of copying has a cost to begin and make the first contiguous run, one for each further
run, and one for each byte. Runs are set up while earlier bytes travel, so the larger of the
last two counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RUN_BYTES = 4096
MANY_RUNS = 256
LARGE_BYTES = 16 << 20

KERNEL_MARGIN = 0.95
"""A kernel takes multiprocessors from the model: it has to be faster by this much."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds; see the module."""

    begin_s: float
    run_s: float
    byte_s: float

    def seconds(self, runs: int, nbytes: int) -> float:
        return self.begin_s + max((runs - 1) * self.run_s, nbytes * self.byte_s)


def measure_cost(seconds: Callable[[int, int], float]) -> CopyCost:
    """From three copies.

    Args:
        seconds: copies so many runs of so many bytes each; how long that took.
    """
    begin_s = seconds(1, RUN_BYTES)
    many_s, large_s = seconds(MANY_RUNS, RUN_BYTES), seconds(1, LARGE_BYTES)
    return CopyCost(
        begin_s,
        max(0.0, many_s - begin_s) / (MANY_RUNS - 1),
        max(0.0, large_s - begin_s) / (LARGE_BYTES - RUN_BYTES),
    )


def kernel_pays(kernel: CopyCost, engines: CopyCost, runs: int, nbytes: int) -> bool:
    """Whether a kernel should make the copy rather than the copy engines."""
    return kernel.seconds(runs, nbytes) < KERNEL_MARGIN * engines.seconds(runs, nbytes)
