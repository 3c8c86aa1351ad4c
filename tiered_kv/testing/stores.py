"""Names of stores in tests."""

from __future__ import annotations

from tiered_kv.page_group import CONTEXT
from tiered_kv.tiers import SSD as SSD_TIER
from tiered_kv.tiers import StoreId

SSD = StoreId(SSD_TIER, CONTEXT)
"""Id of the SSD store of an engine with one page group."""
