"""The machine that a process runs on: the cores and the memory that it may use.

The cores that this process may use.

Control groups of version 2: the limits that containers and services run under.

Memory of the machine, as far as this process may have it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Folder where control groups are mounted."""


def lineage(group: str | None = None, mounted: Path = CGROUPS) -> Iterator[Path]:
    """Folders of a control group and of all that it is in, from the inside out.

    Args:
        group: the group, as ``/proc/self/cgroup`` has it; None for this process's.
        mounted: where control groups are mounted.
    """
    inside = Path((_own_group() if group is None else group).strip("/"))
    yield from (mounted / one for one in (inside, *inside.parents))


def _own_group() -> str:
    """This process's control group; none on a machine without."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


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


def run_beside(name: str, threads: int, nice: int = 0) -> ThreadPoolExecutor:
    """Make threads that run next to the engine's thread, on all cores of this process whatever core
    that one is bound to.

    Args:
        name: name of the threads, after ``tiered-kv-``.
        nice: their niceness: above 0 they yield to everything else on the machine.
    """
    return ThreadPoolExecutor(threads, f"tiered-kv-{name}", leave_core, (nice,))


def leave_core(nice: int = 0) -> None:
    """Let the calling thread run on all cores of this process, with that niceness if above 0."""
    with suppress(OSError):
        os.sched_setaffinity(0, CORES)
        if nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


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


MEMINFO = Path("/proc/meminfo")


def system_memory(
    group: str | None = None, mounted: Path = CGROUPS, meminfo: Path = MEMINFO
) -> tuple[int, int]:
    """Bytes in all, and those that this process may still take.

    The machine's, or those of a control group that it is in if that has less.

    Args:
        group: its control group, as ``/proc/self/cgroup`` has it; None to read it there.
        mounted: where control groups of version 2 are mounted.
        meminfo: file with the machine's memory.
    """
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for folder in lineage(group, mounted):
        try:
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text()) - _reclaimable(folder)
        except (OSError, ValueError):  # no limit, or no such group
            continue
        total, available = min(total, limit), min(available, limit - used)
    return total, available


def _reclaimable(folder: Path) -> int:
    """Bytes of a group's files in memory that nobody used lately: the kernel takes them back."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
