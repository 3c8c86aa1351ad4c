"""Types of models, by the KV groups that vLLM creates for them."""

from __future__ import annotations

from tiered_kv.page_group import KvKind
from tiered_kv.testing.vllm.groups import GroupSpec

FULL = GroupSpec()
WINDOW = GroupSpec(KvKind.WINDOW, 16, 40)
LARGE_WINDOW = GroupSpec(KvKind.WINDOW, 32, 40)
"""In blocks twice as large, as gemma 4 has them."""
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
