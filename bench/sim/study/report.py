"""Results of studies as Markdown, and as drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.bench.agents.plotting import COLOURS, PlotError, looks, matplotlib_modules

from .study import FCFS, INFINITE

TIER_COLOURS = {"vram": COLOURS[1], "cpu": COLOURS[6], "ssd": COLOURS[5], "recomputed": COLOURS[3]}
BAR_INCHES = 0.24
ENDS, ERROR_BARS = ("low", "high"), {"elinewidth": 0.8, "capsize": 1.5}

Row = Mapping[str, Any]


# -- Markdown ---------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> str:
    """Return the tables of a result as Markdown: one per scene for a sweep over loads, otherwise
    one.
    """
    if "folds" in result:
        return _folds_table(result)
    if "figure" in result:
        return _cases_table(result)
    parts = [_loads_table(scene, rows) for scene, rows in by_scene(result["rows"]).items()]
    ratio = result.get("stable_load_ratio")
    if ratio is not None:
        parts.append(f"Highest stable load over FCFS's, minimum over the scenes: {ratio:.2f}.\n")
    return "\n".join(parts)


def by_scene(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by workload, hardware, model and CPU memory."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        scene = (row["workload"], row["gpu"], row["model"], f"{row['cpu_gib']:g}GiB")
        found.setdefault(scene, []).append(row)
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, f"|{'---|' * len(head)}")
    return "\n".join(lines) + "\n"


def _loads_table(scene: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table with the mean and P95 of completion times in seconds, and the fraction of the
    gap between stock vLLM and infinite VRAM that is closed, for each policy at each load.
    """
    workload, gpu, model, cpu = scene
    loads = sorted({row["load"] for row in rows})
    cells: dict[str, dict[float, str]] = {row["policy"]: dict.fromkeys(loads, "") for row in rows}
    for row in rows:
        closed = "" if row["closed"] is None else f" {row['closed']:.2f}"
        cells[row["policy"]][row["load"]] = f"{_seconds(row['mean_s'], row['p95_s'], 1)}{closed}"
    head = f"{workload}, {gpu}, {model}, {cpu} of CPU memory"
    table = ([policy, *found.values()] for policy, found in cells.items())
    return _table([head, *(f"load {load:g}" for load in loads)], table)


def _cases_table(result: Mapping[str, Any]) -> str:
    figure = result["figure"]
    times = "P90, s", "first token, mean and P99, s", "recomputed"
    return _table(
        [result["title"], figure, "over the first", *times],
        (
            [
                f"{row['group']}: {row['case']}",
                f"{row['figures'][figure]:.1f}",
                _ratio(row["over_first"]),
                f"{row['figures']['p90_s']:.1f}",
                f"{row['figures']['ttft_s']:.2f}, {row['figures']['ttft_p99_s']:.2f}",
                f"{row['figures']['recomputed']:.2f}",
            ]
            for row in result["rows"]
        ),
    )


def _folds_table(result: Mapping[str, Any]) -> str:
    rows = []
    for fold in result["folds"]:
        mean_s, p95_s, best = fold["mean_s"], fold["p95_s"], fold["best_other"]
        ours = next(iter(mean_s))
        rows.append(
            [
                f"{fold['workload']}, {fold['gpu']}{fold['tiers'].replace('+', ' + ')}",
                _seconds(mean_s[ours], p95_s[ours]),
                f"{best}, {_seconds(mean_s[best], p95_s[best])}",
                *(_ratio(fold[name]) for name in ("over_best", "on_over_off", "over_reach")),
            ]
        )
    ratios = (
        "tiered-kv over best other",
        "admission control on over off",
        "tiered-kv over job-reach",
    )
    table = _table(["jobs, machine, tiers", "tiered-kv: mean s (P95)", "best other", *ratios], rows)
    return f"{table}\nGeometric mean over the best other: {result['geomean_over_best']:.2f}.\n"


def _seconds(mean_s: float, p95_s: float, digits: int = 0) -> str:
    return f"{mean_s:.{digits}f} ({p95_s:.0f})"


def _ratio(over: Mapping[str, float | None]) -> str:
    interval = "" if over["low"] is None else f" ({over['low']:.2f} to {over['high']:.2f})"
    return f"{over['value']:.2f}{interval}"


# -- drawings ---------------------------------------------------------------------------


def plot(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a result as PNG and SVG. Existing files are replaced. Returns the paths.

    A sweep over loads yields a figure per scene: mean, P95 and speed-up over FCFS by load, and the
    sources of prompt tokens at the highest load. A study of one question yields one bar chart of
    its cases, with intervals.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    if "folds" in result:
        raise PlotError(
            "a study of folds has no figure: print its table with python -m bench.sim report"
        )
    if not result["rows"]:
        raise PlotError("the result contains no runs to draw")
    folder.mkdir(parents=True, exist_ok=True)
    if "figure" in result:
        return _draw_bars(result, folder / f"study-{result['study']}")
    return [
        path
        for scene, rows in by_scene(result["rows"]).items()
        for path in _draw_loads(scene, rows, folder)
    ]


@contextmanager
def _figure(base: Path, paths: list[Path], **size: Any) -> Iterator[Any]:
    """Create a figure, and save it as ``base``.png and .svg when the block ends. Equal rows yield
    equal files.
    """
    matplotlib, figures = matplotlib_modules()
    with matplotlib.rc_context({"svg.hashsalt": "sim", "font.size": 9}):
        figure = figures.Figure(**size, layout="constrained")
        yield figure
        paths += [base.with_suffix(".png"), base.with_suffix(".svg")]
        figure.savefig(paths[-2], dpi=130)
        figure.savefig(paths[-1], metadata={"Date": None})


def _draw_loads(scene: Sequence[str], rows: Sequence[Row], folder: Path) -> list[Path]:
    paths = list[Path]()
    base = folder / "-".join(scene).replace(" ", "").replace(".", "_")
    policies = looks(row["policy"] for row in rows)
    panels: Sequence[tuple[str, str, str, Callable[[Row], float]]] = (
        ("mean completion time", "seconds", "log", lambda row: row["mean_s"]),
        ("P95 completion time", "seconds", "log", lambda row: row["p95_s"]),
        ("mean speed-up over FCFS", "", "linear", lambda row: 1 / row["over_fcfs"]),
    )
    with _figure(base, paths, figsize=(15, 4.6)) as figure:
        *lines, tiers = figure.subplots(1, 4)
        figure.suptitle(f"{scene[0]} on {scene[1]}, {scene[2]}, {scene[3]} of CPU memory")
        for axes, (title, unit, scale, value) in zip(lines, panels, strict=True):
            for policy, look in policies.items():
                own = [row for row in rows if row["policy"] == policy]
                points = sorted((row["load"], value(row)) for row in own)
                dotted = ":" if policy in (FCFS, INFINITE) else "-"
                axes.plot(*zip(*points, strict=True), dotted, label=policy, markersize=4, **look)
            axes.set(
                title=title,
                xlabel="load, as a fraction of FCFS's collapse",
                ylabel=unit,
                yscale=scale,
            )
            axes.grid(alpha=0.3, which="both")
        _draw_tiers(tiers, rows)
        handles, labels = lines[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    return paths


def _draw_tiers(axes: Any, rows: Sequence[Row]) -> None:
    load = max(row["load"] for row in rows)
    at_load = [row for row in rows if row["load"] == load]
    policies, left = [row["policy"] for row in at_load], np.zeros(len(at_load))
    for tier, colour in TIER_COLOURS.items():
        shares = np.array([row[tier] for row in at_load])
        axes.barh(policies, shares, left=left, color=colour, label=tier)
        left = left + shares
    axes.invert_yaxis()
    axes.set(title=f"where prompts came from at {load:g}", xlim=(0, 1))
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=4, frameon=False)


def _draw_bars(result: Mapping[str, Any], base: Path) -> list[Path]:
    """Draw a bar chart with a panel per group. If all groups have the same cases, all panels share
    a scale. Returns the paths of the files.
    """
    groups = dict[str, list[Row]]()
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    alike = len({tuple(row["case"] for row in rows) for rows in groups.values()}) == 1
    heights = [1 + len(rows) for rows in groups.values()]
    paths = list[Path]()
    with _figure(base, paths, figsize=(7, 1 + BAR_INCHES * sum(heights))) as figure:
        panels = figure.subplots(
            len(groups), 1, sharex=alike, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (group, rows) in zip(panels, groups.items(), strict=True):
            over = [row["over_first"] for row in rows]
            cases, values = [row["case"] for row in rows], [one["value"] for one in over]
            # Without an interval the bounds are None, and there is no error bar.
            bars = [
                [abs((one[end] or one["value"]) - one["value"]) for one in over] for end in ENDS
            ]
            axes.barh(cases, values, color=COLOURS, xerr=bars, error_kw=ERROR_BARS)
            axes.invert_yaxis()  # the first case on top, as in the table
            axes.axvline(1.0, color=COLOURS[0], linewidth=0.8)
            axes.grid(alpha=0.3, axis="x")
            axes.set_title(group, loc="left", fontsize=9)
        panels[-1].set_xlabel(f"{result['figure']} over the first case")
        figure.suptitle(result["title"])
    return paths
