"""What servers and loads are called."""

from __future__ import annotations

STOCK, BOUND, TIERED = "stock", "bound", "tiered"
IDLE, PRESSURE, BEYOND = "idle", "pressure", "beyond"
CALIBRATION = "calibration"
"""The load of runs that only look for the arrival rate: in no row, but a second run of stock."""
