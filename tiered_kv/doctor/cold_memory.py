"""Checks of cores, CPU memory, locked memory and huge pages, and of the compression of idle pages,
which needs spare cores.
"""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tiered_kv.config import GIB, TierConfig, check_cpu_size
from tiered_kv.errors import ConfigError
from tiered_kv.formatting import count
from tiered_kv.machine import CORES

from .finding import FAIL, WARN, Finding, fail, judge, ok, warn

CORES_CHECK, PAGES_CHECK = "compression", "cold pages"
"""Names of the two checks of compression."""
BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable that binds vLLM's CPU workers to cores."""
LEFT_BY_VLLM = 2
"""Number of cores that vLLM's CPU worker leaves free for a connector, if the machine has more."""
LEAST_RATIO = 1.15
"""Pages per slot below which compression saves too little space for its CPU time."""
HAS_ROOM = 7 / 8
"""Fraction of slots in use above which pages are compressed, because one slot in eight is kept
free."""
RAW = "TIERED_KV_CODEC=raw turns compression off"

_CORES = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def check_spare_cores(
    config: TierConfig,
    env: Mapping[str, str],
    gpus: int,
    usable: int,
    cores: frozenset[int] = CORES,
) -> Finding:
    """Check whether a core is left to compress pages in CPU memory. Without one, a thread with low
    priority compresses them.

    Args:
        gpus: number of GPUs. Each GPU has a rank that keeps a core busy.
        usable: number of cores that a process can keep busy on this machine.
        cores: numbers of the cores that the process may run on.
    """
    off = _turned_off(config)
    if off is not None:
        return ok(CORES_CHECK, off)
    others = count(gpus, "rank") if gpus else "the model"
    left = usable - (gpus or _taken_by_model(env, usable, cores))
    if left > 0:
        return ok(
            CORES_CHECK,
            f"{left} of {usable} cores are left to compress pages (the rest is used by {others})",
        )
    advice = (
        f"Give the server's container or service {gpus + 1} cores or more, one more than it has "
        f"ranks. {RAW}."
        if gpus
        else f"Leave a core out of {BIND}, or use a machine with more cores. {RAW}."
    )
    return warn(
        CORES_CHECK,
        f"0 of {usable} cores are left to compress pages (all are used by {others}): one "
        "low-priority thread compresses them",
        advice,
    )


def check_cold_pages(seen: Mapping[str, float]) -> Finding:
    """Check whether a running server compresses pages in CPU memory, and how much space it saves.

    Args:
        seen: the server's counters and gauges by event name, summed over engines.
    """

    seen = defaultdict(float, seen)
    spent = (
        f"{seen['compression_seconds']:,.1f} s to compress, "
        f"{seen['decompression_seconds']:,.1f} s to restore so far"
    )
    cold, slots = seen["cpu_pages_compressed"], seen["cpu_slots_compressed"]
    if cold and slots:
        ratio = cold / slots
        pages = f"{cold:,.0f} of {seen['cpu_pages']:,.0f} pages are compressed"
        words = f"{pages}, {ratio:.2f} per slot; {spent}"
        if ratio < LEAST_RATIO:
            return warn(PAGES_CHECK, words, f"Compression saves little space. {RAW}.")
        return ok(PAGES_CHECK, words)
    if compressed := seen["pages_compressed"]:
        return ok(PAGES_CHECK, f"no pages are compressed now, but {compressed:,.0f} were; {spent}")
    if not seen["pages_evicted"] and seen["cpu_pages"] < HAS_ROOM * seen["cpu_slots"]:
        return ok(PAGES_CHECK, "no pages are compressed yet, because slots are free")
    advice = (
        "See the server's log, which reports at startup whether pages will be compressed. "
        "Pages are not compressed with TIERED_KV_CODEC=raw, with TIERED_KV_EVICTION=lru, with "
        "fewer than 32 slots, or if their type shrinks too little (fp8, fp16, states)."
    )
    return warn(PAGES_CHECK, "no pages are compressed, although CPU memory is full", advice)


def _turned_off(config: TierConfig) -> str | None:
    """Return the setting that disables compression, with its effect in words; None if compression
    is enabled."""
    settings = {
        "TIERED_KV_CPU_GIB=0: there is nothing to compress": config.cpu_gib == 0,
        "TIERED_KV_CODEC=raw: pages in CPU memory stay uncompressed": config.codec == "raw",
        "TIERED_KV_EVICTION=lru: pages in CPU memory stay uncompressed": config.eviction == "lru",
    }
    return next((words for words, is_set in settings.items() if is_set), None)


def _taken_by_model(env: Mapping[str, str], usable: int, cores: frozenset[int]) -> int:
    """Return the number of cores to which a model on CPUs is bound."""
    said = env.get(BIND, "auto")
    if said == "auto":
        return usable - LEFT_BY_VLLM if usable > LEFT_BY_VLLM else usable
    bound = set[int]()
    for piece in re.split(r"[|,]", said):
        found = _CORES.fullmatch(piece.strip())
        if found is None:  # nobind, or an invalid value: the model can use any core
            return usable
        first, last = int(found[1]), int(found[2] or found[1])
        bound |= {core for core in cores if first <= core <= last}
    return len(bound)


DEVICES = Path("/dev")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def count_gpus(env: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Return the number of NVIDIA GPUs that a server started in this environment would use."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return sum(re.fullmatch(r"nvidia\d+", one.name) is not None for one in devices.glob("nvidia*"))


def check_cores(gpus: int, usable: int) -> Finding:
    """Compare the number of cores with the number of ranks. There is one rank per GPU, and each
    keeps a core busy.

    Args:
        usable: number of cores that a process can keep busy on this machine.
    """
    ranks = max(1, gpus)
    return judge(
        "cores",
        f"{usable} for {count(ranks, 'rank')}",
        (
            usable < ranks,
            FAIL,
            "Give the server a core for each rank, and further cores for pages and tool calls.",
        ),
        (
            usable == ranks,
            WARN,
            "Give the server more cores, because compression and tool call parsing delay ranks.",
        ),
    )


def check_cpu_memory(config: TierConfig, gpus: int, total: int, available: int) -> Finding:
    """Compare the CPU memory for KV with the memory of the machine and its control group.

    Args:
        total, available: total and available memory, bytes. If a server is already running, pass
            the total for both, because the server's own memory counts as available.
    """
    ranks = max(1, gpus)
    room = f"{total / GIB:.1f} GiB"
    room = f"{available / GIB:.1f} of {room} free" if available < total else f"{room} in total"
    words = f"TIERED_KV_CPU_GIB={config.cpu_gib:g}, {room}"
    if config.cpu_gib == 0:
        return ok("CPU memory", "TIERED_KV_CPU_GIB=0: the tier is off")
    try:
        check_cpu_size(config, ranks, ranks, total, available)
    except ConfigError as error:
        _, _, advice = str(error).rpartition("; ")
        return fail("CPU memory", words, f"{advice.capitalize()}")
    whole = config.cpu_bytes_per_rank(1)
    return judge(
        "CPU memory",
        words,
        (
            whole > available,
            FAIL,
            "The ranks together need more than is free: lower TIERED_KV_CPU_GIB, or free memory.",
        ),
        (
            whole > 0.8 * available,
            WARN,
            "Leave a fifth of the memory for the server itself: lower TIERED_KV_CPU_GIB.",
        ),
    )


def check_locked_memory(config: TierConfig, gpus: int, limit: int) -> Finding:
    """Check the limit of locked memory. With GPUs, the CPU tier must be pinned, which locks it.

    Args:
        limit: bytes that a process may lock; ``resource.RLIM_INFINITY`` for no limit.
    """
    said = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
    if not gpus:
        return ok("locked memory", f"{said}: without a GPU, no memory is pinned")
    needed = config.cpu_bytes_per_rank(gpus)
    if limit != resource.RLIM_INFINITY and limit < needed:
        advice = (
            "Set ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit "
            "memlock=-1). Memory that is not pinned is copied more slowly."
        )
        return warn("locked memory", f"{said}, but each rank pins {needed / GIB:.2f} GiB", advice)
    return ok("locked memory", said)


def check_huge_pages(enabled: Path = HUGE_PAGES) -> Finding:
    """Check whether the kernel provides transparent huge pages on request.

    Args:
        enabled: the kernel's file, which has the selected mode in brackets.
    """
    try:
        found = re.search(r"\[(\w+)\]", enabled.read_text())
    except OSError:
        found = None
    word = found[1] if found else "not in this kernel"
    if word in ("always", "madvise"):
        return ok("huge pages", f"{word}: the CPU tier requests huge pages")
    advice = f"Run echo madvise > {enabled}: small memory pages slow down copies of large pools."
    return warn("huge pages", word, advice)
