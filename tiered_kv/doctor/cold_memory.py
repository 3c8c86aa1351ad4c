"""Checks of cold pages: the cores that compress them, and what a running server has compressed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.config import TierConfig
from tiered_kv.machine import CORES

from .finding import Finding, ok, warn

CORES_CHECK, PAGES_CHECK = "compression", "cold pages"
"""Names of the two checks."""
BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""Variable that tells vLLM's CPU workers their cores."""
LEFT_BY_VLLM = 2
"""Cores that vLLM's CPU worker leaves free by itself beside a connector, where it has more."""
LEAST_RATIO = 1.15
"""Pages in a slot below which the room that is won is hardly worth the time to compress."""
HAS_ROOM = 7 / 8
"""Share of slots in use up to which nothing needs to be compressed: one in eight is kept free."""
RAW = "TIERED_KV_CODEC=raw turns compression off"

_CORES = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class ColdPages:
    """Compression as a running server counts it, over all engines.

    Attributes:
        pages: pages in CPU memory now.
        slots: slots of CPU memory.
        cold: of the pages, those that are compressed.
        cold_slots: of the slots, those that they take.
        compressed: pages that have been compressed since the start.
        evicted: pages that have been evicted since the start.
        encoding_s, decoding_s: time that was spent, seconds.
    """

    pages: float
    slots: float
    cold: float
    cold_slots: float
    compressed: float
    evicted: float
    encoding_s: float
    decoding_s: float


def check_spare_cores(
    config: TierConfig,
    env: Mapping[str, str],
    gpus: int,
    usable: int,
    cores: frozenset[int] = CORES,
) -> Finding:
    """Check whether a core is left to compress pages of CPU memory.

    Args:
        gpus: GPUs, each of which has a rank that keeps a core busy.
        usable: cores that a process may keep busy here.
        cores: numbers of the cores that it may run on.
    """
    off = _turned_off(config)
    if off is not None:
        return ok(CORES_CHECK, off)
    taken = gpus or _taken_by_model(env, usable, cores)
    others = f"{gpus} {'rank' if gpus == 1 else 'ranks'}" if gpus else "the model"
    left = max(0, usable - taken)
    if left:
        return ok(CORES_CHECK, f"{left} of {usable} cores left for it, beside {others}")
    if gpus:
        advice = (
            f"Give the server's container or service {gpus + 1} cores or more: one more than it "
            f"has ranks. {RAW}."
        )
    else:
        advice = f"On a machine with more cores leave it one: {BIND} names the model's. {RAW}."
    return warn(CORES_CHECK, f"no core of {usable} left for it, beside {others}", advice)


def check_cold_pages(seen: ColdPages) -> Finding:
    """Check whether a running server compresses pages of CPU memory, and what it gains."""
    spent = f"{seen.encoding_s:,.1f} s to compress, {seen.decoding_s:,.1f} s to restore so far"
    if seen.cold and seen.cold_slots:
        ratio = seen.cold / seen.cold_slots
        words = (
            f"{seen.cold:,.0f} of {seen.pages:,.0f} pages are compressed, {ratio:.2f} in a slot; "
            f"{spent}"
        )
        if ratio < LEAST_RATIO:
            return warn(PAGES_CHECK, words, f"It wins hardly any room: {RAW}.")
        return ok(PAGES_CHECK, words)
    if seen.compressed:
        return ok(PAGES_CHECK, f"none at present, {seen.compressed:,.0f} were compressed; {spent}")
    if not seen.evicted and seen.pages < HAS_ROOM * seen.slots:
        return ok(PAGES_CHECK, "none yet: slots are free")
    advice = (
        "See the server's log: at start it says whether CPU memory is compressed. It is not with "
        "TIERED_KV_CODEC=raw, TIERED_KV_EVICTION=lru, fewer than 32 slots, or pages of 8 or 16 "
        "bits that shrink too little (fp8, fp16, states)."
    )
    return warn(PAGES_CHECK, "none is compressed, though CPU memory is full", advice)


def _turned_off(config: TierConfig) -> str | None:
    """Setting by which nothing is compressed; None if there is none."""
    if config.cpu_gib == 0:
        return "TIERED_KV_CPU_GIB=0: there is nothing to compress"
    if config.codec == "raw":
        return "TIERED_KV_CODEC=raw: CPU memory keeps pages as they are"
    if config.eviction == "lru":
        return "TIERED_KV_EVICTION=lru: CPU memory keeps pages as they are"
    return None


def _taken_by_model(env: Mapping[str, str], usable: int, cores: frozenset[int]) -> int:
    """Number of cores that a model on CPUs takes: those that it is bound to."""
    said = env.get(BIND, "auto")
    if said == "auto":
        return usable - LEFT_BY_VLLM if usable > LEFT_BY_VLLM else usable
    bound = set[int]()
    for piece in re.split(r"[|,]", said):
        found = _CORES.fullmatch(piece.strip())
        if found is None:  # nobind, or nothing that vLLM reads: any core
            return usable
        first, last = int(found[1]), int(found[2] or found[1])
        bound |= {core for core in cores if first <= core <= last}
    return len(bound)
