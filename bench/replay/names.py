"""Names of servers and loads."""

from __future__ import annotations

STOCK, REACH, BOUND, TIERED = "stock", "reach", "bound", "tiered"
IDLE, PRESSURE, BEYOND = "idle", "pressure", "beyond"
CALIBRATION = "calibration"
"""The load of stock's runs that look for the arrival rate. The one that is taken is its first under
pressure; the others are in no figure."""
