"""The machine that a process runs on: the cores and the memory that the process may use.

Limits come from the CPU affinity, and from control groups of version 2, which containers and
services run in.
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
    """Yield the folders of a control group and of its ancestors, innermost first.

    Args:
        group: the group, in the format of ``/proc/self/cgroup``; None for this process's group.
        mounted: folder where control groups are mounted.
    """
    inside = Path((_own_group() if group is None else group).strip("/"))
    yield from (mounted / one for one in (inside, *inside.parents))


def _own_group() -> str:
    """Return this process's control group; empty on a machine without control groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


CORES = frozenset(os.sched_getaffinity(0))
"""Cores that this process may run on. This module must be imported early: vLLM's CPU worker binds
the main thread to a single core, and every thread started later inherits that binding."""


def usable_cores(group: str | None = None, mounted: Path = CGROUPS) -> int:
    """Return the number of cores that this process may keep busy: the cores that it may run on, or
    fewer if its container's CPU quota is smaller.

    Args:
        group: the process's control group, in the format of ``/proc/self/cgroup``; None to read
            that file.
        mounted: folder where control groups of version 2 are mounted.
    """
    shares = (_share(folder / "cpu.max") for folder in lineage(group, mounted))
    return max(1, min([len(CORES), *(int(share) for share in shares if share is not None)]))


def run_beside(name: str, threads: int, nice: int = 0) -> ThreadPoolExecutor:
    """Return an executor whose threads may run on all cores of this process, even if the engine's
    thread is bound to one core.

    Args:
        name: name of the threads, after ``tiered-kv-``.
        nice: niceness of the threads; above 0 they yield to all other work on the machine.
    """
    return ThreadPoolExecutor(threads, f"tiered-kv-{name}", leave_core, (nice,))


def leave_core(nice: int = 0) -> None:
    """Allow the calling thread to run on all cores of this process, and set its niceness if
    ``nice`` is above 0."""
    with suppress(OSError):
        os.sched_setaffinity(0, CORES)
        if nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def spare_cores(ranks: int) -> int:
    """Return the number of cores that are left if each of ``ranks`` ranks on this machine uses one
    core to drive its device."""
    return max(0, usable_cores() - ranks)


def _share(file: Path) -> float | None:
    """Return the CPU quota of a control group, in cores; None without a limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


MEMINFO = Path("/proc/meminfo")


def system_memory(
    group: str | None = None, mounted: Path = CGROUPS, meminfo: Path = MEMINFO
) -> tuple[int, int]:
    """Return the total memory, and the memory that this process may still allocate, bytes.

    Each is the smallest of the values of the machine and of the process's control groups.

    Args:
        group: the process's control group, in the format of ``/proc/self/cgroup``; None to read
            that file.
        mounted: folder where control groups of version 2 are mounted.
        meminfo: file in the format of ``/proc/meminfo``.
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
    """Return the part of a control group's file cache that was not used recently, which the kernel
    can reclaim, bytes."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
