"""Charts of a page, in plotly's JSON format.

The page's style, which has a light and a dark mode, colours all texts and lines that have no
explicit colour. Histograms have logarithmic bins, so that a page contains counts instead of values.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered_kv.trace.analysis import Spread
from tiered_kv.trace.turn_table import Column, TurnTable

from .kv_places import PLACES, Bars, Lanes, Phase, Place, Stays
from .page_style import PHASE_COLOURS, PLACE_COLOURS, PLAIN, SOURCE_COLOURS

BINS = 160
"""Number of points of a curve."""
SOURCES = ("tokens.vram", "tokens.cpu", "tokens.ssd", "tokens.recomputed")
"""Fields of a record that count prompt tokens by where they were found."""


@dataclass(frozen=True, slots=True, eq=False)
class OverTime:
    """Tokens over the time of the trace, in equal intervals.

    Attributes:
        at: middle of each interval, seconds after the first arrival. Shape (BINS,).
        resting: mean number of KV tokens in the interval, by place.
        prompts: prompt tokens admitted in the interval, per second, by field in ``SOURCES``.
    """

    at: Column
    resting: Mapping[Place, Column]
    prompts: Mapping[str, Column]

    @classmethod
    def of(cls, table: TurnTable, stays: Stays) -> OverTime:
        """Return the curves of a trace that is not empty."""
        arrived = table["arrived"] - table["arrived"].min()
        last = max(float((arrived + table["times.end_s"]).max()), float(stays.end.max(initial=0)))
        edges = np.linspace(0.0, max(last, 1e-3), BINS + 1)
        width = edges[1] - edges[0]
        context = (table["tokens.prompt"] + table["tokens.output"])[stays.row].astype(float)
        resting = {}
        for index, place in enumerate(PLACES):
            chosen = stays.place == index
            some = stays.among(chosen)
            resting[place] = np.diff(_lain(edges, some, context[chosen])) / width
        admitted = arrived + np.nan_to_num(table["times.admitted_s"].astype(float))
        prompts = {
            name: np.histogram(admitted, edges, weights=table[name].astype(float))[0] / width
            for name in SOURCES
        }
        return cls((edges[1:] + edges[:-1]) / 2, resting, prompts)


def _lain(edges: Column, stays: Stays, tokens: Column) -> Column:
    """Return the token-seconds of the stays up to each edge."""
    return _since(edges, stays.begin, tokens) - _since(edges, stays.end, tokens)


def _since(edges: Column, moments: Column, tokens: Column) -> Column:
    """Return, for each edge, the sum over earlier moments of the tokens times the seconds since the
    moment.
    """
    order = np.argsort(moments)
    moments, tokens = moments[order], tokens[order]
    before = np.searchsorted(moments, edges)
    sums = np.append(0.0, np.cumsum(tokens))[before]
    offsets = np.append(0.0, np.cumsum(tokens * moments))[before]
    total: Column = sums * edges - offsets
    return total


LEAST_S = 1e-3
"""Start of the first bin of a histogram of times, seconds."""
A_DECADE = 8
"""Number of bins per power of ten."""


def histograms(
    values: Mapping[str, Column], least: float
) -> tuple[Column, dict[str, Column]] | None:
    """Compute histograms of several sets of values, with the same bins. NaN values are left out,
    and so are sets without values.

    Args:
        least: start of the first bin, a power of ten. Smaller values are counted in this bin.

    Returns:
        The edges of the bins, of shape (bins + 1,), and the number of values in each bin, by set;
        None if there are no values.
    """
    sets = {name: some[~np.isnan(some)].astype(float) for name, some in values.items()}
    sets = {name: np.maximum(some, least) for name, some in sets.items() if len(some)}
    if not sets:
        return None
    low = int(np.floor(np.log10(min(some.min() for some in sets.values()))))
    high = int(np.floor(np.log10(max(some.max() for some in sets.values())))) + 1
    edges = np.logspace(low, high, (high - low) * A_DECADE + 1)
    edges[0], edges[-1] = edges[0] * (1 - 1e-9), edges[-1] * (1 + 1e-9)  # against rounding errors
    return edges, {name: np.histogram(some, edges)[0] for name, some in sets.items()}


Chart = dict[str, Any]
"""A plotly figure: its traces under ``data``, and its ``layout``."""

LANE_PX = 22
"""Height of a lane, pixels."""
_TURN_PX, _KV_PX = 11, 5
SOURCE_NAMES = {
    "tokens.vram": "found in VRAM",
    "tokens.cpu": "found in CPU memory",
    "tokens.ssd": "found on SSD",
    "tokens.recomputed": "computed",
}
"""Names of the sources of prompts in legends."""
_UNITS = (("days", 86_400.0, 2.0), ("hours", 3600.0, 3.0), ("minutes", 60.0, 10.0))
"""Units of time: name, length in seconds, and minimum length of an axis in this unit."""


def lane_chart(lanes: Lanes, names: Sequence[str], told: Sequence[str]) -> Chart:
    """Return the chart of the lanes: turns as thick bars, and the KV between turns as thin bars.

    Args:
        names: label of each lane.
        told: description of each lane's job.
    """
    longest = max((float(bars.end.max(initial=0.0)) for bars in lanes.bars.values()), default=0.0)
    unit, length = _unit(longest)
    data = [_lane_trace(kind, bars, length) for kind, bars in lanes.bars.items() if len(bars.lane)]
    origin = np.zeros(len(names)) if lanes.apart else lanes.began / length
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": _floats(origin),
            "y": np.arange(len(names)),
            "marker": {"symbol": "triangle-right", "size": 8, "color": PLAIN},
            "text": [_shown(one) for one in told],
            "hovertemplate": "%{text}<extra></extra>",
            "name": "start of the job",
        }
    )
    since = "the job's first arrival" if lanes.apart else "the first arrival of the trace"
    layout = _layout(f"{unit} since {since}", "", 90 + LANE_PX * len(names))
    layout["hoverdistance"] = 40
    layout["xaxis"]["range"] = [-0.005 * longest / length, 1.005 * longest / length]
    layout["yaxis"] |= {
        "tickvals": np.arange(len(names)).tolist(),
        "ticktext": [_shown(one) for one in names],
        "range": [len(names) - 0.4, -0.6],
        "showgrid": False,
        "zeroline": False,
    }
    return {"data": data, "layout": layout}


def _lane_trace(kind: Phase | Place, bars: Bars, length: float) -> Chart:
    """Return bars of one type as one line with gaps. Points in the middle of the bars show
    tooltips.
    """
    count = len(bars.lane)
    middle, nothing = (bars.begin + bars.end) / 2, np.full(count, np.nan)
    x = np.stack([bars.begin, middle, bars.end, nothing], axis=1).ravel() / length
    told = np.stack([bars.turn, bars.end - bars.begin], axis=1)
    is_phase = isinstance(kind, Phase)
    what = f"turn %{{customdata[0]}} {kind.value}" if is_phase else f"its KV is {kind.value}"
    colour = PHASE_COLOURS[kind] if isinstance(kind, Phase) else PLACE_COLOURS[kind]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"turn {kind.value}" if is_phase else f"KV {kind.value}",
        "x": _floats(x),
        "y": np.repeat(bars.lane, 4),
        "customdata": _floats(np.repeat(told, 4, axis=0)),
        "line": {"width": _TURN_PX if is_phase else _KV_PX, "color": colour},
        "hovertemplate": f"{what} for %{{customdata[1]:,.4~r}} s<extra></extra>",
    }


def stacked_charts(curves: OverTime) -> tuple[Chart, Chart]:
    """Return two charts over time: KV tokens by place, and prompt tokens by where they were
    found.
    """
    names = {place: place.value for place in PLACES}
    of_prompts = (curves.prompts, SOURCE_NAMES, SOURCE_COLOURS)
    return (
        _stacked(curves.at, curves.resting, names, PLACE_COLOURS, "KV tokens", "tokens"),
        _stacked(curves.at, *of_prompts, "prompt tokens per second", "tokens/s"),
    )


def _stacked(
    at: Column,
    curves: Mapping[Any, Column],
    names: Mapping[Any, str],
    colours: Mapping[Any, str],
    what: str,
    unit_of_y: str,
) -> Chart:
    unit, length = _unit(float(at[-1]))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "one",
            "name": names[kind],
            "x": _floats(at / length),
            "y": _floats(curve),
            "line": {"width": 0, "color": colours[kind], "shape": "hvh"},
            "fillcolor": colours[kind],
            "hovertemplate": f"%{{y:,.3~s}} {unit_of_y}",
        }
        for kind, curve in curves.items()
        if curve.any()
    ]
    layout = _layout(f"{unit} since the first arrival of the trace", what, 380)
    layout["hovermode"] = "x unified"
    layout["yaxis"]["tickformat"] = "~s"
    return {"data": data, "layout": layout}


def histogram_chart(
    values: Mapping[str, Column],
    y: str,
    *,
    times: bool = True,
    colours: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    spread: Spread | None = None,
) -> Chart | None:
    """Return a chart of the histograms of several sets of values, with logarithmic bins; None if
    there are no values.

    Args:
        y: noun for the counted items.
        times: True if the values are seconds, False if they are tokens.
        colours: colours of the sets, by name; ``PLAIN`` for other sets.
        names: names of the sets in the legend; None for no legend.
        spread: distribution whose median and 95th percentile are marked; None for no marks.
    """
    found = histograms(values, LEAST_S if times else 1.0)
    if found is None:
        return None
    (edges, counts), colours = found, colours or {}
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": _shown(names[name]) if names else "",
            "x": np.append(edges[0], edges),
            "y": np.concatenate([[0], one, [0]]),
            "line": {"shape": "hv", "width": 1.5, "color": colours.get(name, PLAIN)},
            "fill": "tozeroy",
            "fillcolor": _faint(colours.get(name, PLAIN)),
            "hovertemplate": f"%{{y:,}} {y}",
        }
        for name, one in counts.items()
    ]
    most = max(int(one.max()) for one in counts.values())
    low, high = np.log10(edges[[0, -1]]).round()
    if spread is not None:
        data += _marks(spread, float(low), float(high), most)
    layout = _layout("time" if times else "tokens of a turn", y, 330)
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [step * 10.0**power for power in np.arange(low, high + 1) for step in steps]
    tick = _short if times else "{:,.0f}".format
    layout["xaxis"] |= {
        "type": "log",
        "range": [float(low), float(high)],
        "tickvals": ticks,
        "ticktext": [tick(one) for one in ticks],
    }
    layout["yaxis"] |= {"range": [0, 1.3 * most], "tickformat": ",~r"}
    if most < 6:
        layout["yaxis"]["dtick"] = 1  # counts are whole numbers
    layout["hovermode"] = "x"
    return {"data": data, "layout": layout}


def legend(chart: Chart) -> dict[str, str]:
    """Return the colours of a chart's named traces, by name."""
    return {
        html.unescape(trace["name"]): trace.get("marker", trace.get("line", {}))["color"]
        for trace in chart["data"]
        if trace.get("name")
    }


def _marks(spread: Spread, low: float, high: float, most: int) -> list[Chart]:
    """Return lines at the median and at the 95th percentile. The labels of the lines have different
    heights, and are on sides on which they neither overlap nor leave the chart.
    """

    def share(value: float) -> float:
        return (math.log10(max(value, 10**low)) - low) / (high - low)

    to_left = share(spread.p95) > 0.6
    sides = {"P50": "left" if to_left and share(spread.p50) > 0.25 else "right"}
    sides["P95"] = "left" if to_left else "right"
    heights = (1.1, 1.22) if to_left else (1.22, 1.1)
    values = (spread.p50, spread.p95)
    return [
        {
            "type": "scatter",
            "mode": "lines+text",
            "x": [max(value, 10**low)] * 2,
            "y": [0, height * most],
            "text": ["", f" {name} {_short(value)} "],
            "textposition": f"middle {side}",
            "line": {"width": 1.5, "dash": "dot", "color": PLACE_COLOURS[Place.NOWHERE]},
            "hoverinfo": "skip",
            "cliponaxis": False,
        }
        for (name, side), value, height in zip(sides.items(), values, heights, strict=True)
    ]


def _layout(x: str, y: str, height: int) -> Chart:
    axis: dict[str, Any] = {
        "automargin": True,
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
        "title": {"standoff": 12},
        "zeroline": False,
    }
    return {
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "font": {"size": 13, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,  # the page shows its own legend outside the chart
        "hoverlabel": {"namelength": -1},
        "xaxis": {**axis, "title": {**axis["title"], "text": x}},
        "yaxis": {**axis, "title": {**axis["title"], "text": y}},
    }


def _unit(longest_s: float) -> tuple[str, float]:
    """Return the time unit of an axis that is ``longest_s`` seconds long, and the length of the
    unit in seconds."""
    for name, length, least in _UNITS:
        if longest_s >= least * length:
            return name, length
    return "seconds", 1.0


def _shown(text: str) -> str:
    """Escape a text for plotly, which interprets some HTML, but not the entities of quotes."""
    return html.escape(text, quote=False)


def _short(length_s: float) -> str:
    if length_s >= 1:
        return f"{float(f'{length_s:.3g}'):,.10g} s"
    return f"{length_s * 1e3:.3g} ms"


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"


def _floats(values: Column) -> Column:
    """Return the numbers in single precision, which is precise enough and halves their size."""
    short: Column = values.astype(np.float32)
    return short
