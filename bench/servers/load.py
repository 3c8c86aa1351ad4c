"""Measures the load by other programs during a measurement.

vLLM's CPU worker runs one thread per core, and every step waits for the slowest thread, so another
program on one core can triple step time. A measurement on a CPU should therefore report the load by
other programs.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_UNSEEN: list[float] = []


@dataclass(frozen=True, slots=True)
class CpuClock:
    """One reading of the clocks that ``cores_of_others`` compares, all in seconds.

    Attributes:
        wall: monotonic time.
        machine: CPU time of all programs, over all cores.
        own: the part of ``machine`` that belongs to this process, its finished children, and the
            process groups given to ``read_clock``. Grandchildren are included if their parent
            waited for them.
    """

    wall: float
    machine: float
    own: float


def read_clock(*groups: int) -> CpuClock | None:
    """Read the clocks for this process and some process groups. Returns None without /proc."""
    try:
        fields = (PROC / "stat").read_text().splitlines()[0].split()
        user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    own = time.process_time() + children_seconds()
    own += sum(map(group_seconds, groups)) + sum(_UNSEEN)
    return CpuClock(time.monotonic(), (user + nice + system + irq + softirq) / ticks, own)


def cores_of_others(begin: CpuClock | None, end: CpuClock | None) -> float | None:
    """Return the average number of cores that all other programs used between two readings; None if
    a reading is missing or no time passed between them.
    """
    if begin is None or end is None or end.wall <= begin.wall:
        return None
    others = (end.machine - begin.machine) - (end.own - begin.own)
    return max(0.0, others / (end.wall - begin.wall))


def group_members(group: int) -> dict[int, list[str]]:
    """Return the live (not zombie) processes of a process group by id, each as its stat fields,
    starting with the state.
    """
    members = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid pgrp …", and the name may contain anything.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                members[int(stat.parent.name)] = fields
    return members


def group_seconds(group: int) -> float:
    """Return the CPU seconds of the live processes of a process group."""
    # utime and stime are the 14th and 15th fields of stat, counted from the process id.
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in group_members(group).values())
    return ticks / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Return the CPU seconds of this process's finished children, and of the grandchildren that
    they waited for.
    """
    times = os.times()
    return times.children_user + times.children_system


def add_unseen(seconds: float) -> None:
    """Count the CPU time of a finished server as this process's own. No process waits for vLLM's
    engine, so the kernel does not add its time to any parent process.
    """
    _UNSEEN.append(max(0.0, seconds))
