"""Checks of the folder for pages on SSD and of its file system. The checks leave no files
behind.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.config import GIB, TierConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.plain_files import opened
from tiered_kv.storage.admin.inventory import find_stores, is_root
from tiered_kv.storage.disk.probe import DiskSpeed, measure_disk
from tiered_kv.storage.store.locks import StoreError

from .finding import FAIL, WARN, Finding, fail, judge, ok, warn

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: path where it is mounted.
        kind: type, such as ``ext4``.
        source: device, such as ``/dev/nvme0n1``.
        options: options of the mount, then options of the file system.
    """

    point: Path
    kind: str
    source: str
    options: tuple[str, ...]


def find_mount(path: Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """Return the mounted file system that contains a path; None if the kernel does not report it.

    Args:
        mountinfo: the kernel's list, in the format of proc_pid_mountinfo(5).
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
        # If two file systems are mounted at the same point, the later one hides the other.
        if real.is_relative_to(point) and (
            best is None or len(point.parts) >= len(best.point.parts)
        ):
            options = (*words[5].split(","), *after[2].split(","))
            best = Mount(point, after[0], _unescape(after[1]), tuple(dict.fromkeys(options)))
    return best


def _unescape(word: str) -> str:
    r"""Decode spaces and other characters, which the kernel writes as octal numbers (``\040``)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


IN_MEMORY = frozenset({"tmpfs", "ramfs"})
OVER_NETWORK = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3"}
)
PROBE_BYTES = 64 << 20
PROBE_THREADS = 4
SLOW_BYTES_PER_S = 0.5e9
"""Read rate below which restores are hardly worthwhile for any model, bytes per second. With 131 KB
per token, as for Llama 3.1 8B, it corresponds to 4,000 tokens per second."""


def check_ssd(config: TierConfig) -> Iterator[Finding]:
    """Check the folder, its file system, and the speed of its disk."""
    path = config.ssd_path
    if path is None:
        yield ok("SSD", "TIERED_KV_SSD_PATH is unset: the tier is off")
        return
    if not path.is_dir():
        yield _to_be_made(path)
        return
    mount = find_mount(path)
    if mount is not None:
        yield check_mount(mount)
    try:
        tempfile.TemporaryFile(prefix=".doctor-", dir=path).close()
    except OSError as error:
        advice = "Choose a folder that the server's user can write to, or change its owner."
        yield fail("SSD folder", f"{path}: {error.strerror}", advice)
        return
    yield ok("SSD folder", f"{path} is writable")
    yield _space(config, path)
    yield _direct(path)
    yield _speed(path)


def _to_be_made(path: Path) -> Finding:
    if os.access(path.parent, os.W_OK | os.X_OK):
        advice = f"To test the disk, create the folder and run doctor again: mkdir {path}"
        return warn("SSD folder", f"{path} is missing; the server creates it at startup", advice)
    advice = f"Create the folder for the server's user: this user cannot write to {path.parent}."
    return fail("SSD folder", f"{path} is missing", advice)


def check_mount(mount: Mount) -> Finding:
    """Check the type and the mount options of the file system."""
    seen = f"{mount.kind} on {mount.source}, {','.join(mount.options)}"
    return judge(
        "SSD mount",
        seen,
        (
            "ro" in mount.options,
            FAIL,
            f"The mount is read-only. Run mount -o remount,rw {mount.point}",
        ),
        (
            mount.kind in IN_MEMORY,
            WARN,
            "The folder is in memory: raise TIERED_KV_CPU_GIB instead, or use a folder on a disk.",
        ),
        (
            mount.kind in OVER_NETWORK or mount.kind.startswith("fuse"),
            WARN,
            "Choose a local disk: a store belongs to one machine, and reads must be fast.",
        ),
        (
            mount.kind == "overlay",
            WARN,
            "Mount a volume there: a container's own layer is deleted with the container.",
        ),
        (
            {"sync", "dirsync"}.intersection(mount.options),
            WARN,
            "Mount the file system without sync: pages are made durable in groups, not one by one.",
        ),
    )


def _space(config: TierConfig, path: Path) -> Finding:
    """Compare free space, plus the size of existing stores, with the configured capacity."""
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    ours = 0
    with suppress(StoreError, TieredKVError, OSError):
        ours = sum(store.nbytes for store in find_stores(path).stores) if is_root(path) else 0
    seen = f"{free / GIB:.1f} GiB free"
    if ours:
        seen += f", {ours / GIB:.1f} GiB in stores"
    seen += f", TIERED_KV_SSD_GIB={config.ssd_gib:g}"
    advice = (
        f"Set TIERED_KV_SSD_GIB={int((free + ours) / GIB)} or less, or free disk space: otherwise "
        "the tier is smaller than configured."
    )
    return judge("SSD space", seen, (free + ours < config.ssd_bytes, WARN, advice))


def _direct(path: Path) -> Finding:
    """Check that files can be written with direct I/O."""
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=path) as file:
        try:
            direct = opened(Path(file.name), os.O_RDWR | os.O_DIRECT)
            with direct as fd, mmap.mmap(-1, 1 << 16) as buffer:
                os.pwrite(fd, buffer, 0)
        except OSError as error:
            advice = "Use ext4 or XFS. Otherwise the page cache takes memory from the server."
            return warn("O_DIRECT", str(error.strerror), advice)
    return ok("O_DIRECT", "works")


def _speed(path: Path) -> Finding:
    try:
        return judge_speed(measure_disk(path, PROBE_THREADS, PROBE_BYTES))
    except OSError as error:
        advice = f"Free at least {PROBE_BYTES >> 20} MiB, or choose another disk."
        return fail("SSD speed", f"cannot be measured: {error.strerror or error}", advice)


def judge_speed(speed: DiskSpeed) -> Finding:
    """Return the finding about a measured speed."""
    seen = f"reads {speed.read / 1e9:.2f} GB/s, writes {speed.write / 1e9:.2f} GB/s"
    advice = "Use a local NVMe disk: a GPU prefills most contexts faster than this disk reads them."
    return judge("SSD speed", seen, (speed.read < SLOW_BYTES_PER_S, WARN, advice))
