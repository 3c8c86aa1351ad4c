"""Checks of what the machine gives: cores, CPU memory, locked memory, huge pages."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from tiered_kv.config import GIB, TierConfig, check_cpu_size
from tiered_kv.errors import ConfigError

from .finding import Finding, fail, ok, warn

DEVICES = Path("/dev")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def count_gpus(env: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Number of NVIDIA GPUs that a server started here would see."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return sum(re.fullmatch(r"nvidia\d+", one.name) is not None for one in devices.glob("nvidia*"))


def check_cores(gpus: int, usable: int) -> Finding:
    """Check the cores against the ranks: one a GPU, each of which keeps a core busy.

    Args:
        usable: cores that a process may keep busy here.
    """
    ranks = max(1, gpus)
    words = f"{usable} for {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if usable < ranks:
        advice = "Give the server a core for each rank, and some for pages and tool calls."
        return fail("cores", words, advice)
    if usable == ranks:
        advice = "Give the server more: none is left to compress pages and to read tool calls."
        return warn("cores", words, advice)
    return ok("cores", words)


def check_cpu_memory(config: TierConfig, gpus: int, total: int, available: int) -> Finding:
    """Check CPU memory for KV against what the machine and its control group have.

    Args:
        total, available: bytes of memory; equal where a server that runs has its share already.
    """
    ranks = max(1, gpus)
    room = f"{total / GIB:.1f} GiB"
    room = f"{available / GIB:.1f} of {room} left" if available < total else f"{room} in all"
    words = f"TIERED_KV_CPU_GIB={config.cpu_gib:g}, {room}"
    if config.cpu_gib == 0:
        return ok("CPU memory", "TIERED_KV_CPU_GIB=0: the tier is off")
    try:
        check_cpu_size(config, ranks, ranks, total, available)
    except ConfigError as error:
        _, _, advice = str(error).rpartition("; ")
        return fail("CPU memory", words, f"{advice.capitalize()}")
    if config.cpu_bytes_per_rank(1) > available:
        advice = "The ranks take it together: lower TIERED_KV_CPU_GIB, or free some."
        return fail("CPU memory", words, advice)
    if config.cpu_bytes_per_rank(1) > 0.8 * available:
        advice = "Leave a fifth to the server itself: lower TIERED_KV_CPU_GIB."
        return warn("CPU memory", words, advice)
    return ok("CPU memory", words)


def check_locked_memory(config: TierConfig, gpus: int, limit: int) -> Finding:
    """Check the limit of locked memory, in which the CPU tier is pinned for GPUs.

    Args:
        limit: bytes that a process may lock; ``resource.RLIM_INFINITY`` for no limit.
    """
    said = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
    if not gpus:
        return ok("locked memory", f"{said}: no GPU here that would need it")
    needed = config.cpu_bytes_per_rank(gpus)
    if limit != resource.RLIM_INFINITY and limit < needed:
        advice = (
            "ulimit -l unlimited (LimitMEMLOCK=infinity of systemd, --ulimit memlock=-1 of "
            "Docker): memory that is not pinned is copied more slowly."
        )
        return warn("locked memory", f"{said}, {needed / GIB:.2f} GiB a rank to pin", advice)
    return ok("locked memory", said)


def check_huge_pages(enabled: Path = HUGE_PAGES) -> Finding:
    """Check whether the kernel gives huge pages to those that ask.

    Args:
        enabled: the kernel's file, which has the chosen word in brackets.
    """
    try:
        found = re.search(r"\[(\w+)\]", enabled.read_text())
    except OSError:
        found = None
    word = found[1] if found else "not in this kernel"
    if word in ("always", "madvise"):
        return ok("huge pages", f"{word}: the CPU tier asks for them")
    advice = f"echo madvise > {enabled}: small pages make copies of large pools slower."
    return warn("huge pages", word, advice)


def check_resources(
    config: TierConfig,
    *,
    gpus: int,
    usable: int,
    memory: tuple[int, int],
    locked: int,
) -> Iterator[Finding]:
    """Check all of them.

    Args:
        usable: cores that a process may keep busy.
        memory: bytes in all, and those that are left.
        locked: bytes that a process may lock.
    """
    yield check_cores(gpus, usable)
    yield check_cpu_memory(config, gpus, *memory)
    yield check_locked_memory(config, gpus, locked)
    yield check_huge_pages()
