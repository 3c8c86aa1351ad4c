"""Published studies by name: tables, sweep presets, folds, and studies of a single question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tiered_kv.bench.sim.workloads.generate import ROLLOUTS, TURNS

from .cells import CODING_AGENTS, FAMILIES, Place, Source
from .study import FCFS, INFINITE, Case, Group, Scene, Study, over_best, over_first, over_loads

SMALL, LARGE, HYBRID = "llama-3.1-8b", "llama-3.1-70b", "nemotron-nano-9b-v2"
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
"""Machines, each with a model that fits."""
BLOCK = 16
AMPLE = Place("rtx5090-32", SMALL, pool_tokens=5_402 * BLOCK, cpu_gib=256.0)
TIGHT = Place("rtx4090-24", SMALL, pool_tokens=3_000 * BLOCK, cpu_gib=256.0)
LITTLE_DRAM_GIB = 5.0
RTX4090, L40S, H100 = (Place(gpu, SMALL) for gpu in ("rtx4090-24", "l40s-48", "h100-80"))

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
SEARCH_SEEDS = 2

HELD_OUT = 100
"""First seed that was not used for tuning. Lower seeds are for tuning."""
FOLD_SEEDS = range(HELD_OUT, HELD_OUT + 6)
STUDY_SEEDS = range(HELD_OUT, HELD_OUT + 10)
LOAD = 1.2
"""Load of folds and studies, beyond the collapse of stock vLLM, as a multiple of its highest stable
load."""
ORIGINAL, SWE = Source("original", 150), Source("swe-agent", 75)
CODING_JOBS = 36


def sweep(
    name: str,
    scenes: Iterable[tuple[Scene, Sequence[str]]],
    loads: Iterable[float],
    seeds: int,
    stable_for: tuple[str, ...] = (),
) -> Study:
    """Return a sweep of servers over loads, for each scene. Stock vLLM and infinite VRAM are always
    included.

    Args:
        scenes: machines with their jobs, and the names of the servers to compare.
        loads: arrival rates, as multiples of the highest stable rate of stock vLLM.
        seeds: number of runs per server and load.
        stable_for: servers whose highest stable load is also determined.
    """
    loads = tuple(loads)
    groups = tuple(
        Group(
            f"load {load:g}",
            *scene,
            tuple(Case(one, one) for one in dict.fromkeys((FCFS, *servers, INFINITE))),
            load,
        )
        for scene, servers in scenes
        for load in loads
    )
    search = range(min(SEARCH_SEEDS, seeds))
    return Study(name, groups, range(seeds), search, over_loads, stable_for)


def scheduling(traces: str) -> Study:
    """Continuum's benchmark on two small GPUs: without offloading, with space for all KV in CPU
    memory, and with little CPU memory."""
    every = WITHOUT_OFFLOAD + WITH_OFFLOAD
    capped = replace(AMPLE, cpu_gib=LITTLE_DRAM_GIB)
    places = ((AMPLE, every), (TIGHT, every), (capped, WITH_OFFLOAD))
    scenes = [((place, ORIGINAL), servers) for place, servers in places]
    return sweep("scheduling", scenes, LOADS, 5, stable_for=("occupancy",))


TABLES = {"scheduling": scheduling}


def paper(traces: str) -> Study:
    """Coding agents and SWE-agents on every machine and model."""
    servers = (*WITHOUT_OFFLOAD, "lmcache", *WITH_OFFLOAD)
    return _everywhere("paper", traces, servers, (0.7, 1.1, 1.3))


def limits(traces: str) -> Study:
    """Loads beyond the collapse of stock vLLM: the gain from knowing each job in advance, and from
    clients that never time out.
    """
    servers = ("continuum", "thunderagent", "occupancy", "occupancy-knowing", "occupancy-patient")
    return _everywhere("limits", traces, servers, (1.1, 1.3))


def hybrid(traces: str) -> Study:
    """Coding agents on a model with Mamba layers and full attention. The study is small enough to
    run in minutes.
    """
    place = Place("rtx4090-24", HYBRID, cpu_gib=16.0, ssd_gib=64.0)
    servers = ("occupancy", *WITH_OFFLOAD, "lru+cpu+ssd", "occupancy+cpu+ssd")
    return sweep("hybrid", [((place, Source(CODING_AGENTS, 24, traces)), servers)], (1.1,), 1)


PRESETS = {"paper": paper, "limits": limits, "hybrid": hybrid}


def _everywhere(name: str, traces: str, servers: Sequence[str], loads: Sequence[float]) -> Study:
    sources = Source(CODING_AGENTS, CODING_JOBS, traces), SWE
    scenes = [((place, source), servers) for place in PLACES for source in sources]
    return sweep(name, scenes, loads, 2)


def folds(traces: str, seeds: Sequence[int] = FOLD_SEEDS) -> Study:
    """The default policy compared with all others with the same tiers, on machines, jobs and seeds
    not used for tuning.
    """
    coding = Source(CODING_AGENTS, CODING_JOBS, traces)
    groups = (
        fold(RTX4090, coding),
        fold(RTX4090, SWE),
        fold(L40S, coding, "+cpu"),
        fold(L40S, coding, "+cpu+ssd"),
        fold(L40S, SWE, "+cpu"),
        fold(H100, coding),
        fold(H100, coding, "+cpu+ssd"),
        fold(H100, SWE, "+cpu"),
    )
    return Study("folds", groups, seeds, FOLD_SEEDS[:SEARCH_SEEDS], over_best)


def fold(place: Place, source: Source, tiers: str = "") -> Group:
    """Return a fold: the default policy, the default policy without admission control, the other
    policies, and the bound ``job-reach``.

    Args:
        tiers: tiers of all policies, such as ``+cpu``.
    """
    others = ["continuum", "infercept", "lru"] if tiers else ["continuum", "infercept"]
    stock = () if tiers else ("job-fcfs", "autellix", "thunderagent")
    ours = [name + tiers for name in ("occupancy", "occupancy-open")]
    servers = (*ours, *stock, *(name + tiers for name in others), "job-reach")
    return Group(tiers, place, source, tuple(Case(one, one) for one in servers), LOAD)


# -- one question each ------------------------------------------------------------------


PINS_AND_OFFLOADING = (
    Case("stock vLLM", "fcfs"),
    Case("pins, VRAM alone", "occupancy"),
    Case("offloading, LRU", "lru+cpu"),
    Case("both", "occupancy+cpu"),
)


def _question(
    name: str,
    title: str,
    groups: Iterable[tuple[str, Place, Source, Sequence[Case]]],
    *,
    figure: str = "mean_s",
    load: float | None = LOAD,
) -> Study:
    made = tuple(
        Group(label, place, source, tuple(cases), load) for label, place, source, cases in groups
    )
    result = partial(over_first, title, figure)
    return Study(name, made, STUDY_SEEDS, FOLD_SEEDS[:SEARCH_SEEDS], result)


def ablation(traces: str) -> Study:
    """Value of each part of the default policy: without tiers, with CPU memory, and with CPU memory
    and SSD.
    """
    coding = Source(CODING_AGENTS, CODING_JOBS, traces)
    parts = {
        "all parts": "occupancy",
        "no pins": "occupancy-unpinned",
        "no forecast": "occupancy-blind",
        "no admission control": "occupancy-open",
        "vLLM's order, no admission control": "occupancy-alone",
    }
    late = {"no prefetch": "occupancy-late"}
    tiers = (
        ("VRAM alone", "", parts),
        ("64 GiB of CPU memory", "+cpu", parts),
        ("and an SSD", "+cpu+ssd", parts | late),
    )
    groups = [
        (label, H100, coding, [Case(what, name + tier) for what, name in named.items()])
        for label, tier, named in tiers
    ]
    return _question("ablation", "Parts switched off, one at a time", groups)


def ssd(traces: str) -> Study:
    """Value of an SSD below CPU memory of several sizes."""
    coding = Source(CODING_AGENTS, CODING_JOBS, traces)
    cases = (Case("CPU memory", "occupancy+cpu"), Case("and an SSD", "occupancy+cpu+ssd"))
    groups = [
        (f"{gib:g} GiB of CPU memory", replace(H100, cpu_gib=gib), coding, cases)
        for gib in (16.0, 64.0, 256.0)
    ]
    return _question("ssd", "An SSD below CPU memory", groups)


def batches(traces: str) -> Study:
    """Effect of vLLM's limits per step: tokens, requests, and tokens of a long prompt."""
    places = {
        "8,192 tokens per step": H100,
        "2,048 tokens per step": replace(H100, batched_tokens=2_048),
        "512 tokens per step": replace(H100, batched_tokens=512),
        "2,048 of a long prompt": replace(H100, long_prefill=2_048),
        "512 of a long prompt": replace(H100, long_prefill=512),
        "32 concurrent requests": replace(H100, max_seqs=32),
        "8 concurrent requests": replace(H100, max_seqs=8),
    }
    groups = [
        (server, H100, SWE, [Case(label, server, place) for label, place in places.items()])
        for server in ("fcfs", "occupancy+cpu")
    ]
    return _question("batches", "Limits of a step", groups)


def turns(traces: str) -> Study:
    """Gain over stock vLLM by the number of turns per job."""
    # All groups have the same number of jobs, because with fewer jobs the arrivals would end before
    # a queue has grown.
    groups = [
        (f"{count} turns", TIGHT, Source(f"turns-{count}", 100), PINS_AND_OFFLOADING)
        for count in TURNS
    ]
    return _question("turns", "Gain by the number of turns", groups)


def gpus(traces: str) -> Study:
    """Pins compared with offloading, on small and large GPUs."""
    names = ("rtx4090-24", "rtx5090-32", "a100-40", "l40s-48", "h100-80", "h200-141")
    groups = [(gpu, Place(gpu, SMALL), SWE, PINS_AND_OFFLOADING) for gpu in names]
    return _question("gpus", "Pins compared with offloading", groups)


def rollouts(traces: str) -> Study:
    """A reinforcement learning step: a group of agents for each of twelve prompts. All agents start
    together, and the step ends when all have finished.
    """
    cases = (
        Case("stock vLLM", "fcfs"),
        Case("jobs in order", "job-fcfs"),
        Case("offloading, LRU", "lru+cpu"),
        Case("tiered-kv, VRAM alone", "occupancy"),
        Case("tiered-kv", "occupancy+cpu"),
        Case("unlimited VRAM", "infinite"),
    )
    source = Source("rollouts", 12 * ROLLOUTS)
    groups = [
        (gpu, Place(gpu, SMALL), source, cases) for gpu in ("rtx5090-32", "a100-40", "h100-80")
    ]
    return _question("rollouts", "A step of rollouts", groups, figure="makespan_s", load=None)


def basics(traces: str) -> Study:
    """Value of prefix caching, chunked prefill and batching on stock vLLM. Contiguous memory and
    static batches are emulated.
    """
    uncached = replace(TIGHT, prefix_caching=False)
    longest = 4_096  # tokens that a request would reserve, at least the longest context
    contiguous = replace(uncached, max_seqs=(TIGHT.pool_tokens or 0) // longest)
    short = (
        Case("stock vLLM", "fcfs"),
        Case("4 concurrent requests", "fcfs", replace(TIGHT, max_seqs=4)),
        Case("no prefix caching", "fcfs", uncached),
        Case("contiguous memory (emulated)", "fcfs", contiguous),
        Case("static batches (emulated)", "in-batches", uncached),
    )
    long = (
        Case("stock vLLM, 8,192 tokens per step", "fcfs"),
        Case("prompts in one piece", "fcfs", replace(H100, batched_tokens=65_536)),
        Case("2,048 tokens per step", "fcfs", replace(H100, batched_tokens=2_048)),
        Case("512 tokens per step", "fcfs", replace(H100, batched_tokens=512)),
    )
    groups = (
        ("Continuum's benchmark", TIGHT, ORIGINAL, short),
        ("long prompts", H100, SWE, long),
    )
    return _question("basics", "Parts of a scheduler", groups, load=0.7)


def families(traces: str) -> Study:
    """Value of knowing which job started a sub-agent: mean job times, with an SSD that holds all
    KV."""
    source = Source(FAMILIES, 24, traces)
    cases = (
        Case("families", "occupancy+cpu+ssd"),
        Case("parents unknown", "occupancy-orphans+cpu+ssd"),
        Case("offloading, LRU", "lru+cpu+ssd"),
    )
    groups = [
        (place.name, replace(place, ssd_gib=2_048.0), source, cases) for place in (L40S, H100)
    ]
    return replace(_question("families", "Sub-agents", groups), seeds=FOLD_SEEDS)


STUDIES: Mapping[str, Callable[[str], Study]] = {
    one.__name__: one for one in (ablation, ssd, families, batches, turns, gpus, rollouts, basics)
}
"""Functions that return a study, given the path of the recorded sessions."""
