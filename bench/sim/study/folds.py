"""Folds: our scheduling against every other policy, on machines, jobs and seeds that it was not
tuned on, past the load at which stock vLLM collapses.

Each ratio is a geometric mean over seeds, since every server gets the same jobs at the same times;
its interval is Student's, of the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiered_kv.bench.agents.paired import PairedRatio

from .cells import CODING_AGENTS, Bench, Cell, Place, Source, Summary
from .loads import borne_by_stock

SEEDS = range(100, 106)
"""Seeds of jobs and arrivals. Those below a hundred are for whoever tunes something."""
SEARCH = range(100, 102)
LOAD = 1.2
"""Arrivals over those that stock vLLM just bears."""
SMALL = "llama-3.1-8b"
SWE, SWE_JOBS, CODING_JOBS = "swe-agent", 75, 36
NO_TIER, CPU, SSD = "", "+cpu", "+cpu+ssd"

OURS, OPEN, REACH = "occupancy", "occupancy-open", "job-reach"
STOCK = ("job-fcfs", "autellix", "thunderagent")
"""Servers without a tier, and none to add."""
OTHERS = ("continuum", "infercept", "lru")


@dataclass(frozen=True, slots=True)
class Fold:
    """Jobs on a machine.

    Attributes:
        tiers: those beside VRAM, as they stand behind a server's name.
    """

    place: Place
    source: Source
    tiers: str

    def servers(self) -> tuple[str, ...]:
        """Every server, ours first and then without holding, and the bound last."""
        others = [name + self.tiers for name in OTHERS if self.tiers or name != "lru"]
        stock = STOCK if not self.tiers else ()
        return (OURS + self.tiers, OPEN + self.tiers, *stock, *others, REACH)


def every_fold(traces: str) -> tuple[Fold, ...]:
    """Eight folds: both kinds of jobs, with and without tiers."""
    coding, swe = Source(CODING_AGENTS, CODING_JOBS, traces), Source(SWE, SWE_JOBS)

    def fold(gpu: str, source: Source, tiers: str) -> Fold:
        return Fold(Place(gpu, SMALL), source, tiers)

    return (
        fold("rtx4090-24", coding, NO_TIER),
        fold("rtx4090-24", swe, NO_TIER),
        fold("l40s-48", coding, CPU),
        fold("l40s-48", coding, SSD),
        fold("l40s-48", swe, CPU),
        fold("h100-80", coding, NO_TIER),
        fold("h100-80", coding, SSD),
        fold("h100-80", swe, CPU),
    )


def run_folds(
    folds: Sequence[Fold], bench: Bench, tell: Callable[[str], None], seeds: Sequence[int] = SEEDS
) -> dict[str, Any]:
    """Run every server on every fold; returns the ratios."""
    tell("loads")
    scenes = list(dict.fromkeys((fold.place, fold.source) for fold in folds))
    rates = borne_by_stock(bench, scenes, SEARCH)
    tell("runs")
    cells = {
        (fold, server): [
            Cell.of(fold.place, fold.source, server, LOAD * rates[fold.place, fold.source], seed)
            for seed in seeds
        ]
        for fold in folds
        for server in fold.servers()
    }
    found = bench.run(cell for several in cells.values() for cell in several)
    rows = [
        _row(fold, {server: [found[cell] for cell in cells[fold, server]] for server in servers})
        for fold in folds
        for servers in [fold.servers()]
    ]
    over = [row["over_best"] for row in rows]
    return {
        "folds": rows,
        "geomean_over_best": math.exp(sum(math.log(one["value"]) for one in over) / len(over)),
        "highest_low": max(one["low"] for one in over),
        "highest_on_over_off": max(row["on_over_off"]["value"] for row in rows),
        "load": LOAD,
        "seeds": list(seeds),
    }


def _row(fold: Fold, found: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    means = {server: [one["mean_s"] for one in runs] for server, runs in found.items()}
    ours, off = OURS + fold.tiers, OPEN + fold.tiers
    others = [server for server in means if server not in (ours, off, REACH)]
    best = min(others, key=lambda server: sum(means[server]))

    def over(server: str) -> dict[str, float]:
        return asdict(PairedRatio.of(means[ours], means[server]))

    def mean(server: str, figure: str) -> float:
        return sum(one[figure] for one in found[server]) / len(found[server])

    return {
        "gpu": fold.place.name,
        "workload": fold.source.workload,
        "tiers": fold.tiers,
        "best_other": best,
        "over_best": over(best),
        "on_over_off": over(off),
        "over_reach": over(REACH),
        "promoted_wasted": mean(ours, "promoted_wasted"),
        "mean_s": {server: mean(server, "mean_s") for server in found},
        "p95_s": {server: mean(server, "p95_s") for server in found},
    }
