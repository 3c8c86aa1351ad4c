"""Style of all plots: colours and markers that colour-blind readers can distinguish, and
reproducible files."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#999933")
"""Colours that are distinguishable with any colour vision, from Okabe and Ito, "Color Universal
Design", 2008. The last colour replaces the authors' yellow, which is hard to see on white."""
MARKERS = "osD^vPX*<>hp"
"""Markers that distinguish the series in greyscale prints."""


class PlotError(RuntimeError):
    """matplotlib is missing, or there is nothing to draw."""


def matplotlib_modules() -> tuple[Any, Any]:
    """Import and return ``matplotlib`` and ``matplotlib.figure``.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("matplotlib is not installed: run pip install matplotlib") from error


def looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the colour and marker of each name, as keyword arguments for ``plot``."""
    return {
        name: {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}
        for at, name in enumerate(dict.fromkeys(names))
    }


@contextmanager
def drawn(folder: Path, name: str, panels: int = 3) -> Iterator[tuple[list[Any], list[Path]]]:
    """Create a row of panels to draw on, and save them as ``name.png`` and ``name.svg`` when the
    block ends. The legend below the panels lists the series of the first panel. Equal drawings
    produce equal files.

    Yields:
        The panels' axes, and the paths of the files.

    Raises:
        PlotError: matplotlib is not installed.
    """
    matplotlib, figures = matplotlib_modules()
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    # A fixed salt and no date keep the files reproducible.
    with matplotlib.rc_context({"svg.hashsalt": name, "font.size": 10}):
        figure = figures.Figure(figsize=(13, 4.2), layout="constrained")
        axes = list(figure.subplots(1, panels))
        yield axes, paths
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})


def draw_times(
    axes: Any,
    at: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    mean: str,
    tail: str,
    name: str,
    look: Mapping[str, str],
) -> None:
    """Draw a line of means, with ``name`` in the legend, and a dotted line of a tail quantile.

    Args:
        at: x position of each row.
        mean, tail: keys of the two values in a row.
        look: colour and marker, as returned by ``looks``.
    """
    axes.plot(at, [row[mean] for row in rows], label=name, **look)
    axes.plot(at, [row[tail] for row in rows], linestyle=":", alpha=0.6, **look)


def label(axes: Any, titles: Mapping[str, str]) -> None:
    """Set a panel's title and axis labels (keys ``title``, ``xlabel`` and ``ylabel``), start its y
    axis at 0, and add a grid.
    """
    axes.set(**titles)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
