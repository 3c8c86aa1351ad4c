"""Memory of the machine, as far as this process may have it."""

from __future__ import annotations

from pathlib import Path

from .control_groups import CGROUPS, lineage

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
