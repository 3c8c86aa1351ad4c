"""Model types, by the KV groups that vLLM creates for them."""

from __future__ import annotations

from tiered_kv.page_group import KvKind
from tiered_kv.testing.vllm.groups import GroupSpec

FULL = GroupSpec()
WINDOW = GroupSpec(KvKind.WINDOW, 16, 40)
LARGE_WINDOW = GroupSpec(KvKind.WINDOW, 32, 40)
"""Window with blocks of twice the size, as in Gemma 4."""
CHUNK = GroupSpec(KvKind.CHUNK, 16, 80)
STATE = GroupSpec(KvKind.STATE, 16)

MODELS = {
    "full": (FULL,),
    "full-window": (FULL, WINDOW),
    "full-large_window": (FULL, LARGE_WINDOW),
    "full-chunk": (FULL, CHUNK),
    "full-state": (FULL, STATE),
    "full-large_window-state": (FULL, LARGE_WINDOW, STATE),
    "window": (WINDOW,),
    "state": (STATE,),
}
