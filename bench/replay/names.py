"""Names of servers and loads."""

from __future__ import annotations

STOCK, REACH, BOUND, TIERED = "stock", "reach", "bound", "tiered"
CONTROL = "control"
"""Stock vLLM once more, at idle only. The ratio of two stock runs shows the machine's noise."""
LMCACHE, ROUTER, BEHIND_ROUTER = "lmcache", "vllm-router", "tiered-behind-router"
"""LMCache, and vLLM's router with program scheduling in front of stock vLLM or of tiered-kv."""
IDLE, PRESSURE, BEYOND = "idle", "pressure", "beyond"
CALIBRATION = "calibration"
"""Load of the stock runs that search for the arrival rate. The selected run counts as the first
under pressure; the others are in no figure."""
LOADS, SERVERS = (IDLE, PRESSURE, BEYOND), (STOCK, CONTROL, TIERED, REACH, BOUND)
"""Order of loads and servers in results. Any others follow."""
