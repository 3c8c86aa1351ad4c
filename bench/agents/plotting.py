"""Style of all plots: colours that everybody tells apart, and matplotlib, if it is there."""

from __future__ import annotations

import importlib
from typing import Any

COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#999933")
"""Told apart with any colour vision: Okabe and Ito, "Color Universal Design", 2008; the last is
darker than their yellow, which a white page swallows."""
MARKERS = "osD^vPX*<>hp"
"""Markers, for print in grey: each compared thing has its own."""


class PlotError(RuntimeError):
    """There is nothing to draw with, or nothing to draw."""


def matplotlib_modules() -> tuple[Any, Any]:
    """``matplotlib`` and ``matplotlib.figure``.

    Raises:
        PlotError: it is not installed.
    """
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("matplotlib is not installed: pip install matplotlib") from error
