"""The studies that are published, by name."""

from __future__ import annotations

from dataclasses import replace

from .cells import CODING_AGENTS, Place, Source
from .study import Study

SMALL, LARGE = "llama-3.1-8b", "llama-3.1-70b"
HYBRID = "nemotron-nano-9b-v2"
PLACES = (
    Place("rtx4090-24", SMALL),
    Place("a100-40", SMALL),
    Place("l40s-48", SMALL),
    Place("h100-80", SMALL),
    Place("h200-141", SMALL),
    Place("h200-141", LARGE, ranks=2),
    Place("h100-80", LARGE, ranks=4),
    Place("a100-40", LARGE, ranks=8),
)
"""Every machine and model that fit each other."""

WITHOUT_OFFLOAD = (
    "job-fcfs",
    "autellix",
    "infercept",
    "thunderagent",
    "continuum-fixed",
    "continuum",
    "occupancy",
)
WITH_OFFLOAD = ("lru+cpu", "continuum+cpu", "occupancy+cpu")
LOADS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3)

BLOCK = 16
AMPLE = Place("rtx5090-32", SMALL, pool_tokens=5_402 * BLOCK, cpu_gib=256.0)
TIGHT = Place("rtx4090-24", SMALL, pool_tokens=3_000 * BLOCK, cpu_gib=256.0)
LITTLE_DRAM_GIB = 5.0
TABLE_JOBS = 150


def scheduling() -> Study:
    """Continuum's benchmark on two small GPUs: without offloading, with room for all in DRAM, and
    with little DRAM."""
    jobs = Source("original", TABLE_JOBS)
    capped = replace(AMPLE, cpu_gib=LITTLE_DRAM_GIB)
    return Study(
        scenes=((AMPLE, jobs), (TIGHT, jobs), (capped, jobs)),
        servers=(
            WITHOUT_OFFLOAD + WITH_OFFLOAD,
            WITHOUT_OFFLOAD + WITH_OFFLOAD,
            WITH_OFFLOAD,
        ),
        loads=LOADS,
        seeds=5,
        stable_for=("occupancy",),
    )


TABLES = {"scheduling": scheduling}


def paper(traces: str) -> Study:
    """Coding agents and SWE-agents on every machine and model."""
    servers = (*WITHOUT_OFFLOAD, "lmcache", *WITH_OFFLOAD)
    return _everywhere(traces, servers, (0.7, 1.1, 1.3))


def limits(traces: str) -> Study:
    """The same past FCFS's collapse: what ours could gain if it knew each job beforehand, and if
    clients never timed out."""
    servers = ("continuum", "thunderagent", "occupancy", "occupancy-knowing", "occupancy-patient")
    return _everywhere(traces, servers, (1.1, 1.3))


def hybrid(traces: str) -> Study:
    """Coding agents on a model of states and full attention, small enough to take minutes."""
    place = Place("rtx4090-24", HYBRID, cpu_gib=16.0, ssd_gib=64.0)
    servers = ("occupancy", *WITH_OFFLOAD, "lru+cpu+ssd", "occupancy+cpu+ssd")
    return Study(((place, Source(CODING_AGENTS, 24, traces)),), (servers,), (1.1,), 1)


PRESETS = {"paper": paper, "limits": limits, "hybrid": hybrid}


def _everywhere(traces: str, servers: tuple[str, ...], loads: tuple[float, ...]) -> Study:
    coding, swe = Source(CODING_AGENTS, 36, traces), Source("swe-agent", 75)
    scenes = tuple((place, source) for place in PLACES for source in (coding, swe))
    return Study(scenes, (servers,) * len(scenes), loads, 2)
