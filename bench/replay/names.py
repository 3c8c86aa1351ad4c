"""Names of servers and loads."""

from __future__ import annotations

STOCK, REACH, BOUND, TIERED = "stock", "reach", "bound", "tiered"
CONTROL = "control"
"""Stock once more, at idle only: stock's time over its own tells what the machine adds."""
LMCACHE, ROUTER, BEHIND_ROUTER = "lmcache", "vllm-router", "tiered-behind-router"
"""LMCache; vLLM's router with program scheduling in front of stock vLLM, and in front of
tiered-kv."""
IDLE, PRESSURE, BEYOND = "idle", "pressure", "beyond"
CALIBRATION = "calibration"
"""The load of stock's runs that look for the arrival rate. The one that is taken is its first under
pressure; the others are in no figure."""
LOADS, SERVERS = (IDLE, PRESSURE, BEYOND), (STOCK, CONTROL, TIERED, REACH, BOUND)
"""Order of loads and servers in results; others come after them."""
