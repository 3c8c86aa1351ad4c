"""The studies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tiered_kv.bench.sim.study.cells import CODING_AGENTS, Place, Source
from tiered_kv.bench.sim.study.presets import SMALL, TIGHT
from tiered_kv.bench.sim.workloads.generate import ROLLOUTS, TURNS

from .comparison import Case, Comparison, Group

H100 = Place("h100-80", SMALL)
ORIGINAL, SWE = Source("original", 150), Source("swe-agent", 75)
CODING_JOBS = 36
TURNS_JOBS = 100
PROMPTS = 12
"""Prompts of a step of reinforcement learning."""

PINS_AND_OFFLOADING = (
    Case("stock vLLM", "fcfs"),
    Case("pins, VRAM alone", "occupancy"),
    Case("offloading, LRU", "lru+cpu"),
    Case("both", "occupancy+cpu"),
)


def ablation(traces: str) -> Comparison:
    """Worth of each part of ours: without tiers, with CPU memory, and with an SSD below it."""
    coding = Source(CODING_AGENTS, CODING_JOBS, traces)
    parts = {
        "all of it": "occupancy",
        "no pins": "occupancy-unpinned",
        "no forecast": "occupancy-blind",
        "no holding": "occupancy-open",
        "vLLM's order, no holding": "occupancy-alone",
    }

    def group(label: str, tiers: str, more: Mapping[str, str]) -> Group:
        named = {**parts, **more}
        cases = tuple(Case(what, name + tiers) for what, name in named.items())
        return Group(label, H100, coding, cases)

    return Comparison(
        "Parts switched off, one at a time",
        (
            group("VRAM alone", "", {}),
            group("64 GiB of CPU memory", "+cpu", {}),
            group("and an SSD", "+cpu+ssd", {"nothing ahead": "occupancy-late"}),
        ),
    )


def ssd(traces: str) -> Comparison:
    """Worth of an SSD behind CPU memory of several sizes."""
    coding = Source(CODING_AGENTS, CODING_JOBS, traces)

    def group(cpu_gib: float) -> Group:
        place = replace(H100, cpu_gib=cpu_gib)
        cases = (Case("CPU memory", "occupancy+cpu"), Case("and an SSD", "occupancy+cpu+ssd"))
        return Group(f"{cpu_gib:g} GiB of CPU memory", place, coding, cases)

    return Comparison("An SSD behind CPU memory", tuple(map(group, (16.0, 64.0, 256.0))))


def batches(traces: str) -> Comparison:
    """vLLM's limits of a step: tokens, requests, and the part of a long prompt."""

    def group(server: str) -> Group:
        def case(label: str, **changed: int) -> Case:
            return Case(label, server, replace(H100, **changed))  # type: ignore[arg-type]

        cases = (
            case("8,192 tokens a step"),
            case("2,048 tokens a step", batched_tokens=2_048),
            case("512 tokens a step", batched_tokens=512),
            case("2,048 of a long prompt", long_prefill=2_048),
            case("512 of a long prompt", long_prefill=512),
            case("32 requests at once", max_seqs=32),
            case("8 requests at once", max_seqs=8),
        )
        return Group(server, H100, SWE, cases)

    return Comparison("Limits of a step", tuple(map(group, ("fcfs", "occupancy+cpu"))))


def turns(traces: str) -> Comparison:
    """Gain over stock by the number of a job's turns."""

    def group(count: int) -> Group:
        # As many jobs: with fewer, arrivals are over before a queue has grown.
        source = Source(f"turns-{count}", TURNS_JOBS)
        return Group(f"{count} turns", TIGHT, source, PINS_AND_OFFLOADING)

    return Comparison("Gain by the number of turns", tuple(map(group, TURNS)))


def gpus(traces: str) -> Comparison:
    """Pins against offloading on small and large GPUs."""

    def group(gpu: str) -> Group:
        return Group(gpu, Place(gpu, SMALL), SWE, PINS_AND_OFFLOADING)

    names = ("rtx4090-24", "rtx5090-32", "a100-40", "l40s-48", "h100-80", "h200-141")
    return Comparison("Pins against offloading", tuple(map(group, names)))


def rollouts(traces: str) -> Comparison:
    """A step of reinforcement learning: groups of agents from one prompt, until all have ended."""
    source = Source("rollouts", PROMPTS * ROLLOUTS)

    def group(gpu: str) -> Group:
        cases = (
            Case("stock vLLM", "fcfs"),
            Case("jobs in order", "job-fcfs"),
            Case("offloading, LRU", "lru+cpu"),
            Case("tiered-kv, VRAM alone", "occupancy"),
            Case("tiered-kv", "occupancy+cpu"),
            Case("unlimited VRAM", "infinite"),
        )
        return Group(gpu, Place(gpu, SMALL), source, cases)

    names = ("rtx5090-32", "a100-40", "h100-80")
    return Comparison("A step of rollouts", tuple(map(group, names)), "makespan_s", load=None)


def basics(traces: str) -> Comparison:
    """Worth of prefix caching, chunks and batches on stock vLLM: mini-vLLM's questions. Contiguous
    memory and static batches are emulated."""
    uncached = replace(TIGHT, prefix_caching=False)
    longest = 4_096  # what a request would reserve, at least the longest context
    contiguous = replace(uncached, max_seqs=(TIGHT.pool_tokens or 0) // longest)
    short = (
        Case("stock vLLM", "fcfs"),
        Case("4 requests at once", "fcfs", replace(TIGHT, max_seqs=4)),
        Case("no prefix caching", "fcfs", uncached),
        Case("contiguous memory (emulated)", "fcfs", contiguous),
        Case("static batches (emulated)", "in-batches", uncached),
    )
    long = (
        Case("stock vLLM, 8,192 tokens a step", "fcfs"),
        Case("prompts in one piece", "fcfs", replace(H100, batched_tokens=65_536)),
        Case("2,048 tokens a step", "fcfs", replace(H100, batched_tokens=2_048)),
        Case("512 tokens a step", "fcfs", replace(H100, batched_tokens=512)),
    )
    return Comparison(
        "Parts of a scheduler",
        (
            Group("Continuum's benchmark", TIGHT, ORIGINAL, short),
            Group("long prompts", H100, SWE, long),
        ),
        load=0.7,
    )


STUDIES: Mapping[str, Callable[[str], Comparison]] = {
    "ablation": ablation,
    "ssd": ssd,
    "batches": batches,
    "turns": turns,
    "gpus": gpus,
    "rollouts": rollouts,
    "basics": basics,
}
"""Each made from the file of recorded sessions."""
