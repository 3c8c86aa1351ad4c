"""Mounts: the file system that a path is on, and its options."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: where it is mounted.
        kind: such as ``ext4``.
        source: such as ``/dev/nvme0n1``.
        options: of the mount, then of the file system.
    """

    point: Path
    kind: str
    source: str
    options: tuple[str, ...]


def find_mount(path: Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """Find the file system that a path is on; None if the kernel does not say.

    Args:
        mountinfo: the kernel's list, whose format is in proc_pid_mountinfo(5).
    """
    real = Path(os.path.realpath(path))
    best: Mount | None = None
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words, after = fields.split(" "), rest.split(" ")
        if len(words) < 6 or len(after) < 3:
            continue
        point = Path(_unescape(words[4]))
        # Of two on one another, the later one covers the other.
        if real.is_relative_to(point) and (
            best is None or len(point.parts) >= len(best.point.parts)
        ):
            options = (*words[5].split(","), *after[2].split(","))
            best = Mount(point, after[0], _unescape(after[1]), tuple(dict.fromkeys(options)))
    return best


def _unescape(word: str) -> str:
    r"""Put spaces and such back, which the kernel writes as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
