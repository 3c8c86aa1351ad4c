"""Style of a page, in light and in dark mode, including the colours of texts and lines in charts.

Each tier has the same colour everywhere, and all colours are distinguishable in both modes.
"""

from __future__ import annotations

from .kv_places import Phase, Place

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1d2430; --faint: #5b6472; --line: #dde1e7; --panel: #f5f7f9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181f; --text: #e4e8ee; --faint: #9aa4b2; --line: #323a46; --panel: #1c222b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1500px; padding: 24px 28px 60px;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 26px; margin: 0 0 8px; }
h2 { font-size: 19px; margin: 44px 0 6px; }
h3 { font-size: 15px; margin: 14px 0 2px; }
h1, h3, td { overflow-wrap: anywhere; }
p { max-width: 100ch; margin: 4px 0; color: var(--faint); overflow-wrap: anywhere; }
li > p { color: var(--text); }
.headline { display: flex; flex-wrap: wrap; gap: 10px; margin: 20px 0 0; }
.headline div {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 16px; min-width: 140px;
}
dt { font-size: 12.5px; color: var(--faint); }
dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts {
  display: grid; gap: 18px 28px; margin-top: 10px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr));
}
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin: 4px 0; }
.legend i {
  display: inline-block; width: 14px; height: 10px; border-radius: 2px; margin-right: 6px;
}
.scroll { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; }
th.number, td.number {
  text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
}
details > summary { cursor: pointer; color: var(--faint); font-size: 13.5px; }
.js-plotly-plot text { fill: var(--text) !important; }
.js-plotly-plot .xtick text, .js-plotly-plot .ytick text { fill: var(--faint) !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
.js-plotly-plot .zerolinelayer path { stroke: var(--line) !important; }
.js-plotly-plot .hoverlayer .hovertext path,
.js-plotly-plot .hoverlayer .axistext path,
.js-plotly-plot .hoverlayer .bg {
  fill: var(--panel) !important; stroke: var(--line) !important; fill-opacity: 1 !important;
}
"""
"""Style sheet."""


_VRAM, _CPU, _SSD, _COMPUTED = "#3d86d6", "#e8902f", "#9a5fc9", "#8b9099"

PLACE_COLOURS = {
    Place.RUNNING: "#1f5796",
    Place.PINNED: _VRAM,
    Place.VRAM: "#93c1f0",
    Place.CPU: _CPU,
    Place.SSD: _SSD,
    Place.NOWHERE: _COMPUTED,
    Place.UNKNOWN: "#c9b79a",
}
"""Colours by the place of KV. VRAM is blue."""
SOURCE_COLOURS = {
    "tokens.vram": _VRAM,
    "tokens.cpu": _CPU,
    "tokens.ssd": _SSD,
    "tokens.recomputed": _COMPUTED,
}
"""Colours of prompt tokens, by where they were found."""
PHASE_COLOURS = {
    Phase.WAITING: "#d8434e",
    Phase.RESTORING: "#e4b400",
    Phase.COMPUTING: "#5d6673",
    Phase.ANSWERING: "#36a35a",
}
"""Colours by the phase of a turn."""
CLASS_COLOURS = {"fast": "#2a9d9d", "uncertain": "#c99a1d", "slow": "#c2508c"}
"""Colours by gap class."""
PLAIN = "#2a9d9d"
"""Colour of items that have neither a tier nor a class."""
