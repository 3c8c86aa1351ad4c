"""The cores that this process may use."""

import os
from pathlib import Path

CORES = frozenset(os.sched_getaffinity(0))
"""Asked at import, which must be early: vLLM's CPU worker binds the main thread to a single core,
and every thread started later with it."""

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(group: str | None = None, mounted: Path = CGROUPS) -> int:
    """Number of cores that this process may keep busy: those that it may run on, or fewer where its
    container is given less time than that.

    Args:
        group: its control group, as ``/proc/self/cgroup`` has it; None to read it there.
        mounted: where control groups of version 2 are mounted.
    """
    inside = Path((_own_group() if group is None else group).strip("/"))
    shares = (_share(mounted / one / "cpu.max") for one in (inside, *inside.parents))
    return max(1, min([len(CORES), *(int(share) for share in shares if share is not None)]))


def spare_cores(ranks: int) -> int:
    """Number of cores that ``ranks`` ranks on this machine do not need to drive their devices: one
    each."""
    return max(0, usable_cores() - ranks)


def _own_group() -> str:
    """This process's control group of version 2; none on a machine without."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _share(file: Path) -> float | None:
    """Cores' worth of time that a control group is given; None if it has no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
