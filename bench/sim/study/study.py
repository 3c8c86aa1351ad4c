"""A study: servers under loads told as shares of the one at which FCFS collapses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cells import LEFT_OUT, Bench, Cell, Place, Source, Summary, means
from .loads import (
    SEARCH_SEEDS,
    STABLE_TIMES,
    Question,
    alone_s,
    closed,
    highest_stable,
)

FCFS, INFINITE = "fcfs", "infinite"


@dataclass(frozen=True, slots=True)
class Study:
    """Subject of the measurement.

    Attributes:
        scenes: places with the jobs that they get.
        servers: for each place, by its index in ``scenes``.
        loads: arrival rates over that of FCFS's collapse.
        stable_for: servers whose own collapse is looked for as well.
    """

    scenes: tuple[tuple[Place, Source], ...]
    servers: tuple[tuple[str, ...], ...]
    loads: tuple[float, ...]
    seeds: int
    stable_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """A place's jobs, and the loads found for them.

    Attributes:
        alone_s: mean completion time of a job alone.
        collapse: jobs a second that FCFS just bears.
        stable: the same of other servers, over FCFS's.
    """

    place: Place
    source: Source
    alone_s: float
    collapse: float
    stable: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A server under a load, means over seeds.

    Attributes:
        closed: share of the way from FCFS to infinite VRAM by the mean; None where FCFS has not
            collapsed, or infinite VRAM has.
        over_fcfs: mean completion time over FCFS's.
        left_out: sessions and turns that were not played, by the reason.
    """

    workload: str
    gpu: str
    model: str
    cpu_gib: float
    policy: str
    load: float
    jobs_per_s: float
    mean_s: float
    p95_s: float
    closed: float | None
    over_fcfs: float
    p50_s: float
    p99_s: float
    ttft_s: float
    vram: float
    cpu: float
    ssd: float
    recomputed: float
    preempted: float
    dropped: float
    left_out: Mapping[str, float]


def run_study(study: Study, bench: Bench, tell: Callable[[str], None]) -> dict[str, Any]:
    """Find the loads, run everything, and put it into rows."""
    tell("loads")
    scenes = _find_loads(study, bench)
    tell("runs")
    cells = [
        cell
        for scene, servers in zip(scenes, study.servers, strict=True)
        for cell in _cells(scene, servers, study)
    ]
    found = bench.run(cells)
    made = [
        row
        for scene, servers in zip(scenes, study.servers, strict=True)
        for row in _rows(scene, servers, study, found)
    ]
    ratios = [ratio for scene in scenes for ratio in scene.stable.values()]
    return {
        "rows": [asdict(row) for row in made],
        "stable_load_ratio": min(ratios) if ratios else None,
        "scenes": [asdict(scene) for scene in scenes],
        "seeds": study.seeds,
    }


def _find_loads(study: Study, bench: Bench) -> list[Scene]:
    seeds = range(min(SEARCH_SEEDS, study.seeds))
    alone = alone_s(bench, study.scenes, seeds)
    servers = (FCFS, *study.stable_for)
    questions = [
        Question(*scene, server, one_s)
        for scene, one_s in zip(study.scenes, alone, strict=True)
        for server in servers
    ]
    found = dict(zip(questions, highest_stable(bench, questions, seeds), strict=True))
    scenes = []
    for (place, source), one_s in zip(study.scenes, alone, strict=True):
        collapse, *others = (found[Question(place, source, one, one_s)] for one in servers)
        stable = {one: rate / collapse for one, rate in zip(study.stable_for, others, strict=True)}
        scenes.append(Scene(place, source, one_s, collapse, stable))
    return scenes


def _cells(scene: Scene, servers: Sequence[str], study: Study) -> Iterator[Cell]:
    for load in study.loads:
        for server in dict.fromkeys((FCFS, INFINITE, *servers)):
            for seed in range(study.seeds):
                yield Cell.of(scene.place, scene.source, server, load * scene.collapse, seed)


def _rows(
    scene: Scene, servers: Sequence[str], study: Study, found: Mapping[Cell, Summary]
) -> Iterator[Row]:
    for load in study.loads:
        rate = load * scene.collapse

        def figures(server: str, rate: float = rate) -> dict[str, float]:
            cells = (
                Cell.of(scene.place, scene.source, server, rate, n) for n in range(study.seeds)
            )
            return means([found[cell] for cell in cells])

        fcfs, infinite = figures(FCFS)["mean_s"], figures(INFINITE)["mean_s"]
        tells = load > 1 and infinite <= STABLE_TIMES * scene.alone_s and infinite < fcfs
        for server in dict.fromkeys((FCFS, *servers, INFINITE)):
            mean = figures(server)
            yield Row(
                workload=scene.source.workload,
                gpu=scene.place.name,
                model=scene.place.model,
                cpu_gib=scene.place.cpu_gib,
                policy=server,
                load=load,
                jobs_per_s=rate,
                closed=closed(mean["mean_s"], fcfs, infinite) if tells else None,
                over_fcfs=mean["mean_s"] / fcfs,
                left_out={
                    name.removeprefix(LEFT_OUT): mean[name]
                    for name in mean
                    if name.startswith(LEFT_OUT)
                },
                **{
                    name: mean[name]
                    for name in Row.__dataclass_fields__
                    if name in mean and name not in ("load", "jobs_per_s")
                },
            )


def total_cells(study: Study) -> int:
    """Runs of the loads; those that look for them come on top."""
    return sum(
        len(study.loads) * study.seeds * len({FCFS, INFINITE, *servers})
        for servers in study.servers
    )
