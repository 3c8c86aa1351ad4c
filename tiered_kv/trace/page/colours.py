"""Colours of a page: one for each tier everywhere, and all told apart in light and in dark."""

from __future__ import annotations

from .kv_places import Place
from .lanes import Phase

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
"""Colours by place of the KV: VRAM is blue."""
SOURCE_COLOURS = {
    "tokens.vram": _VRAM,
    "tokens.cpu": _CPU,
    "tokens.ssd": _SSD,
    "tokens.recomputed": _COMPUTED,
}
"""Colours by source of a prompt's tokens."""
PHASE_COLOURS = {
    Phase.WAITING: "#d8434e",
    Phase.RESTORING: "#e4b400",
    Phase.COMPUTING: "#5d6673",
    Phase.ANSWERING: "#36a35a",
}
"""Colours by phase of a turn."""
CLASS_COLOURS = {"fast": "#2a9d9d", "uncertain": "#c99a1d", "slow": "#c2508c"}
"""Colours by class of a gap."""
PLAIN = "#2a9d9d"
"""Colour of what is of no tier and no class."""
