"""Studies: groups of servers. In every run, the servers of a group get the same jobs at the same
times.

A group's load is a multiple of the highest stable arrival rate of stock vLLM on its machine. Ratios
between servers are paired by seed: geometric means, with Student's interval of the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiered_kv.bench.agents.paired import PairedRatio
from tiered_kv.bench.sim.engine.metrics import TIERS

from .cells import LEFT_OUT, Bench, Cell, Key, Place, Source, Summary, means

FCFS, INFINITE = "fcfs", "infinite"
"""Stock vLLM, whose collapse determines every load, and stock vLLM with unlimited VRAM."""
STABLE_TIMES = 3.0
"""A server is stable while the mean job time is at most this multiple of the time of a job alone.
"""
ALONE_JOBS_PER_S = 1e-5
"""Arrival rate at which no two jobs overlap, jobs/s."""
STEP = 1.04
"""Factor between adjacent rates in the search for the collapse rate."""
STRIDE, MOST_STRIDES = 16, 12
ROW_FIGURES = ("mean_s", "p95_s", "p50_s", "p99_s", "ttft_s", *TIERS, "preempted", "dropped")
FIGURES = (
    *("mean_s", "p50_s", "p90_s", "p95_s", "ttft_s", "ttft_p99_s"),
    *("makespan_s", "recomputed", "parents_found"),
)


Scene = tuple[Place, Source]
"""A machine and the jobs that arrive there."""


@dataclass(frozen=True, slots=True)
class Case:
    """A server on a machine.

    Attributes:
        label: name of the case, unique in the group.
        server: name of the server.
        place: the machine; None for the machine of the group.
    """

    label: str
    server: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Servers that get the same jobs at the same times.

    Attributes:
        label: name of the group in the results.
        place: machine on which the highest stable rate of stock vLLM is measured.
        source: workload that generates the jobs.
        cases: the servers.
        load: arrival rate, as a multiple of the highest stable rate of stock vLLM; None if all jobs
            arrive at the start.
    """

    label: str
    place: Place
    source: Source
    cases: tuple[Case, ...]
    load: float | None

    @property
    def scene(self) -> Scene:
        return self.place, self.source


@dataclass(frozen=True, slots=True)
class Load:
    """Limits of the servers for a machine and its jobs.

    Attributes:
        alone_s: mean completion time of a job alone on stock vLLM.
        stable: highest stable rate of each server, jobs/s, by server name.
    """

    alone_s: float
    stable: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a group.

    Attributes:
        jobs_per_s: arrival rate.
        limits: limits of the group's scene; None without a load.
        runs: summaries of each case by its label, one per seed.
    """

    group: Group
    jobs_per_s: float
    limits: Load | None
    runs: Mapping[str, Sequence[Summary]]

    def mean(self, label: str, figure: str) -> float:
        return means(self.runs[label])[figure]

    def over(self, label: str, other: str, figure: str = "mean_s") -> PairedRatio:
        """Return the ratio of a figure: the case ``label`` over the case ``other``."""
        ours, theirs = ([one[figure] for one in self.runs[name]] for name in (label, other))
        return PairedRatio.of(ours, theirs)


@dataclass(frozen=True, slots=True)
class Study:
    """Groups to run, and the function that summarizes the results.

    Attributes:
        name: name of the study, used in file names.
        seeds: seeds of jobs and arrivals.
        search: seeds used to find the loads.
        result: converts the measured groups to a JSON object.
        stable_for: servers whose highest stable load is also determined.
    """

    name: str
    groups: tuple[Group, ...]
    seeds: Sequence[int]
    search: Sequence[int]
    result: Callable[[Study, Sequence[Measured]], dict[str, Any]]
    stable_for: tuple[str, ...] = ()

    @property
    def total_runs(self) -> int:
        """Number of runs, excluding the search for loads."""
        return len(self.seeds) * sum(len(group.cases) for group in self.groups)


def run_study(study: Study, bench: Bench, tell: Callable[[str], None]) -> dict[str, Any]:
    """Find the loads, run every case with every seed, and return the result as a JSON object.

    Args:
        tell: called with the name of each phase.
    """
    tell("loads")
    scenes = dict.fromkeys(group.scene for group in study.groups if group.load is not None)
    limits = find_loads(bench, scenes, study.search, (FCFS, *study.stable_for))
    tell("runs")
    rates = {
        group: 1.0 if group.load is None else group.load * limits[group.scene].stable[FCFS]
        for group in study.groups
    }
    found = bench.run(
        {
            (group, case.label): [
                Cell.of(case.place or group.place, group.source, case.server, rates[group], seed)
                for seed in study.seeds
            ]
            for group in study.groups
            for case in group.cases
        }
    )
    measured = [
        Measured(
            group,
            rates[group],
            limits.get(group.scene),
            {case.label: found[group, case.label] for case in group.cases},
        )
        for group in study.groups
    ]
    return {"study": study.name, **study.result(study, measured)}


# -- loads -------------------------------------------------------------------------------


def find_loads(
    bench: Bench,
    scenes: Collection[Scene],
    seeds: Sequence[int],
    servers: Sequence[str] = (FCFS,),
) -> dict[Scene, Load]:
    """Find the highest stable load of each server in each scene. All searches run concurrently,
    because each needs the result of a run to determine its next rate.
    """

    def cells(scene: Scene, server: str, rate: float) -> list[Cell]:
        return [Cell.of(*scene, server, rate, seed) for seed in seeds]

    def mean_s(wanted: Mapping[Key, Sequence[Cell]]) -> dict[Key, float]:
        return {key: means(runs)["mean_s"] for key, runs in bench.run(wanted).items()}

    alone = mean_s({scene: cells(scene, FCFS, ALONE_JOBS_PER_S) for scene in scenes})
    searches = {
        (scene, server): search(first_guess(scene, alone[scene]))
        for scene in scenes
        for server in servers
    }
    tried = {one: next(looking) for one, looking in searches.items()}
    found = dict[tuple[Scene, str], float]()
    while tried:
        took = mean_s({one: cells(*one, rate) for one, rate in tried.items()})
        for one, took_s in took.items():
            try:
                tried[one] = searches[one].send(took_s <= STABLE_TIMES * alone[one[0]])
            except StopIteration as end:
                found[one] = end.value
                del tried[one]
    return {
        scene: Load(alone[scene], {server: found[scene, server] for server in servers})
        for scene in scenes
    }


def first_guess(scene: Scene, alone_s: float) -> float:
    """Return the rate at which the contexts of concurrent jobs would fill VRAM if all were kept,
    jobs/s. By Little's law, the number of concurrent jobs is the arrival rate times a job's
    duration.
    """
    place, source = scene
    machine = place.machine()
    workload = source.jobs_for(machine, 0)
    beside = machine.beside(machine.block or workload.block)
    longest = sum(job.longest + beside for job in workload.jobs) / len(workload.jobs)
    return max(1.0, machine.pool_tokens / longest) / alone_s


def search(guess: float) -> Generator[float, bool, float]:
    """Yield rates, and receive whether each is stable. Returns the highest stable rate, within a
    factor of ``STEP``. Rates are powers of ``STEP``, so that stored runs can be reused.

    Raises:
        ValueError: no stable or no unstable rate was found near ``guess``.
    """
    at: float = round(math.log(guess) / math.log(STEP))
    low, high = -math.inf, math.inf
    for _ in range(MOST_STRIDES):
        if (yield STEP**at):
            low, at = at, at + STRIDE
        else:
            high, at = at, at - STRIDE
        if high - low < math.inf:
            break
    else:
        raise ValueError("the search did not find the highest stable rate")
    while high - low > 1:
        middle = (low + high) // 2
        if (yield STEP**middle):
            low = middle
        else:
            high = middle
    return float(STEP**low)


# -- results ----------------------------------------------------------------------------


def over_loads(study: Study, measured: Sequence[Measured]) -> dict[str, Any]:
    """Summarize servers over a range of loads: means over seeds, one row per server and load.

    ``closed`` is the fraction of the gap between stock vLLM and infinite VRAM that a server closes.
    It is None if stock vLLM has not collapsed, or if infinite VRAM has collapsed too.
    """
    limits = {one.group.scene: one.limits for one in measured if one.limits is not None}
    scenes = [_scene(scene, found, study.stable_for) for scene, found in limits.items()]
    ratios = [ratio for scene in scenes for ratio in scene["stable"].values()]
    return {
        "rows": [_load_row(one, label) for one in measured for label in one.runs],
        "stable_load_ratio": min(ratios, default=None),
        "scenes": scenes,
        "seeds": len(study.seeds),
    }


def _scene(scene: Scene, found: Load, stable_for: Sequence[str]) -> dict[str, Any]:
    place, source = scene
    return {
        "place": asdict(place),
        "source": asdict(source),
        "alone_s": found.alone_s,
        "collapse": found.stable[FCFS],  # jobs/s
        "stable": {name: found.stable[name] / found.stable[FCFS] for name in stable_for},
    }


def _load_row(one: Measured, label: str) -> dict[str, Any]:
    group, mean = one.group, means(one.runs[label])
    fcfs, infinite = one.mean(FCFS, "mean_s"), one.mean(INFINITE, "mean_s")
    collapsed = (
        one.limits is not None
        and (group.load or 0) > 1
        and infinite <= STABLE_TIMES * one.limits.alone_s
        and infinite < fcfs
    )
    return {
        "workload": group.source.workload,
        "gpu": group.place.name,
        "model": group.place.model,
        "cpu_gib": group.place.cpu_gib,
        "policy": label,
        "load": group.load,
        "jobs_per_s": one.jobs_per_s,
        **{name: mean[name] for name in ROW_FIGURES},
        "closed": (fcfs - mean["mean_s"]) / (fcfs - infinite) if collapsed else None,
        "over_fcfs": mean["mean_s"] / fcfs,
        "left_out": {
            name.removeprefix(LEFT_OUT): value
            for name, value in mean.items()
            if name.startswith(LEFT_OUT)
        },
    }


def over_first(
    title: str, figure: str, study: Study, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the ratio of each case to the first case of its group, for a single figure."""
    return {
        "title": title,
        "figure": figure,
        "load": study.groups[0].load,
        "seeds": list(study.seeds),
        "rows": [_case_row(one, label, figure) for one in measured for label in one.runs],
    }


def _case_row(one: Measured, label: str, figure: str) -> dict[str, Any]:
    return {
        "group": one.group.label,
        "case": label,
        "jobs_per_s": one.jobs_per_s,
        "over_first": asdict(one.over(label, one.group.cases[0].label, figure)),
        "figures": {name: one.mean(label, name) for name in FIGURES},
    }


def over_best(study: Study, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the ratios of each group's first case to the second case (the same policy without
    admission control), to the last case (a bound), and to the best of the cases in between.
    """
    folds = [_fold_row(one) for one in measured]
    over = [fold["over_best"] for fold in folds]
    return {
        "folds": folds,
        "geomean_over_best": math.exp(sum(math.log(one["value"]) for one in over) / len(over)),
        "highest_low": max(one["low"] for one in over),
        "highest_on_over_off": max(fold["on_over_off"]["value"] for fold in folds),
        "load": study.groups[0].load,
        "seeds": list(study.seeds),
    }


def _fold_row(one: Measured) -> dict[str, Any]:
    ours, off, *others, bound = (case.label for case in one.group.cases)
    best = min(others, key=lambda label: sum(run["mean_s"] for run in one.runs[label]))
    return {
        "gpu": one.group.place.name,
        "workload": one.group.source.workload,
        "tiers": one.group.label,
        "best_other": best,
        "over_best": asdict(one.over(ours, best)),
        "on_over_off": asdict(one.over(ours, off)),
        "over_reach": asdict(one.over(ours, bound)),
        "promoted_wasted": one.mean(ours, "promoted_wasted"),
        "mean_s": {label: one.mean(label, "mean_s") for label in one.runs},
        "p95_s": {label: one.mean(label, "p95_s") for label in one.runs},
    }
