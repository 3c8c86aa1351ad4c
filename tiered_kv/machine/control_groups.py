"""Control groups of version 2: the limits that containers and services run under."""

from __future__ import annotations

from collections.abc import Iterator
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
