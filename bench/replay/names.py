"""Names of servers and loads."""

from __future__ import annotations

STOCK, REACH, BOUND, TIERED = "stock", "reach", "bound", "tiered"
CONTROL = "control"
"""A second server of stock vLLM, for the idle load only. The ratio of two stock runs shows the
machine's noise."""
LMCACHE, ROUTER, BEHIND_ROUTER = "lmcache", "vllm-router", "tiered-behind-router"
"""LMCache, and vLLM's router with program scheduling in front of stock vLLM or of tiered-kv."""
IDLE, PRESSURE, BEYOND = "idle", "pressure", "beyond"
CALIBRATION = "calibration"
"""Load of the stock runs that search for the arrival rate. The selected run counts as the first run
under pressure. The other runs are not used in any figure."""
LOADS, SERVERS = (IDLE, PRESSURE, BEYOND), (STOCK, CONTROL, TIERED, REACH, BOUND)
"""Loads and servers that come first in results, in this order. All others come after them."""
