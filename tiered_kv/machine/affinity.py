"""The cores that this process may use."""

import os
from pathlib import Path

from .control_groups import CGROUPS, lineage

CORES = frozenset(os.sched_getaffinity(0))
"""Asked at import, which must be early: vLLM's CPU worker binds the main thread to a single core,
and every thread started later with it."""


def usable_cores(group: str | None = None, mounted: Path = CGROUPS) -> int:
    """Number of cores that this process may keep busy: those that it may run on, or fewer where its
    container is given less time than that.

    Args:
        group: its control group, as ``/proc/self/cgroup`` has it; None to read it there.
        mounted: where control groups of version 2 are mounted.
    """
    shares = (_share(folder / "cpu.max") for folder in lineage(group, mounted))
    return max(1, min([len(CORES), *(int(share) for share in shares if share is not None)]))


def spare_cores(ranks: int) -> int:
    """Number of cores that ``ranks`` ranks on this machine do not need to drive their devices: one
    each."""
    return max(0, usable_cores() - ranks)


def _share(file: Path) -> float | None:
    """Cores' worth of time that a control group is given; None if it has no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
