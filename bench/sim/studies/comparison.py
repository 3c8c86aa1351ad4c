"""A comparison: groups of servers, each group under one load, with the same jobs in every run.

In a group every server is told against the first one. A ratio is a geometric mean over seeds, and
its interval is Student's, of the logarithms: all servers get the same jobs at the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiered_kv.bench.agents.paired import PairedRatio
from tiered_kv.bench.sim.study.cells import Bench, Cell, Place, Source, Summary, means
from tiered_kv.bench.sim.study.folds import LOAD, SEARCH
from tiered_kv.bench.sim.study.loads import borne_by_stock

SEEDS = range(100, 110)
"""Seeds of jobs and arrivals, on which nothing was tuned."""


@dataclass(frozen=True, slots=True)
class Case:
    """A server on a machine.

    Attributes:
        label: as the figure has it.
        place: the machine; None: the group's.
    """

    label: str
    server: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Servers that get the same jobs at the same times.

    Attributes:
        place: machine on which ``fcfs`` tells the load.
        cases: the first is what the others are told against.
    """

    label: str
    place: Place
    source: Source
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups, and what is asked of them.

    Attributes:
        title: of the figure.
        figure: name of what is compared, in a run's summary.
        load: arrivals over those that stock vLLM just bears; None where all jobs arrive at once.
    """

    title: str
    groups: tuple[Group, ...]
    figure: str = "mean_s"
    load: float | None = LOAD


FIGURES = ("mean_s", "p50_s", "p90_s", "p95_s", "ttft_s", "ttft_p99_s", "makespan_s", "recomputed")


@dataclass(frozen=True, slots=True)
class Row:
    """A case, means over seeds.

    Attributes:
        over_first: the figure over that of the group's first case.
        figures: those of ``FIGURES``.
    """

    group: str
    case: str
    jobs_per_s: float
    over_first: PairedRatio
    figures: Mapping[str, float]


def run_comparison(
    comparison: Comparison,
    bench: Bench,
    tell: Callable[[str], None],
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    """Find the loads, and run every case on every seed; one JSON object."""
    tell("loads")
    rates = _rates(comparison, bench)
    tell("runs")
    cells = {
        (group, case): [
            Cell.of(case.place or group.place, group.source, case.server, rates[group], seed)
            for seed in seeds
        ]
        for group in comparison.groups
        for case in group.cases
    }
    found = bench.run(cell for several in cells.values() for cell in several)
    rows = [
        _row(
            group,
            case,
            rates[group],
            [found[cell] for cell in cells[group, group.cases[0]]],
            [found[cell] for cell in cells[group, case]],
            comparison.figure,
        )
        for group, case in cells
    ]
    return {
        "title": comparison.title,
        "figure": comparison.figure,
        "load": comparison.load,
        "seeds": list(seeds),
        "rows": [asdict(row) for row in rows],
    }


def _rates(comparison: Comparison, bench: Bench) -> dict[Group, float]:
    """Arrivals of each group, jobs a second; any where all jobs arrive at once."""
    if comparison.load is None:
        return dict.fromkeys(comparison.groups, 1.0)
    scenes = list(dict.fromkeys((group.place, group.source) for group in comparison.groups))
    borne = borne_by_stock(bench, scenes, SEARCH)
    return {
        group: comparison.load * borne[group.place, group.source] for group in comparison.groups
    }


def _row(
    group: Group,
    case: Case,
    jobs_per_s: float,
    first: Sequence[Summary],
    own: Sequence[Summary],
    figure: str,
) -> Row:
    mean = means(own)
    return Row(
        group=group.label,
        case=case.label,
        jobs_per_s=jobs_per_s,
        over_first=PairedRatio.of([one[figure] for one in own], [one[figure] for one in first]),
        figures={name: mean[name] for name in FIGURES},
    )


def markdown(result: Mapping[str, Any]) -> str:
    """A table of a result."""
    figure = result["figure"]
    lines = [
        f"| {result['title']} | {figure} | over the first | P90, s | first token, mean and P99, s |"
        " computed again |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        over, told = row["over_first"], row["figures"]
        interval = "" if over["low"] is None else f" ({over['low']:.2f} to {over['high']:.2f})"
        lines.append(
            f"| {row['group']}: {row['case']} | {told[figure]:.1f} | {over['value']:.2f}{interval} "
            f"| {told['p90_s']:.1f} | {told['ttft_s']:.2f}, {told['ttft_p99_s']:.2f} "
            f"| {told['recomputed']:.2f} |"
        )
    return "\n".join(lines) + "\n"
