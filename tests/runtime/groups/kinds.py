"""Models with several KV types, and helpers for their tests."""

from __future__ import annotations

from tiered_kv.keys import PageKey
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

FULL, STATE = GroupSpec(KvKind.FULL, 16), GroupSpec(KvKind.STATE, 16)
WINDOW, CHUNK = GroupSpec(KvKind.WINDOW, 16, 40), GroupSpec(KvKind.CHUNK, 16, 64)
MODELS: dict[str, tuple[GroupSpec, ...]] = {
    "window": (WINDOW,),
    "state": (STATE,),
    "full and window": (FULL, WINDOW),
    "full and chunk": (FULL, CHUNK),
    "full and state": (FULL, STATE),
    "state before full": (STATE, FULL),
    "full, window and state": (FULL, WINDOW, STATE),
    "full and a window of larger blocks": (FULL, GroupSpec(KvKind.WINDOW, 32, 70)),
    "full of larger blocks and a window": (GroupSpec(KvKind.FULL, 32), WINDOW),
}
"""The KV groups of each model, by the name that appears in test ids."""
JOB = {"job_id": "job"}
PROMPT = text(150, seed=1)
ANSWER = 21
"""Tokens of the first turn's answer. The context then ends inside a block."""


def forget_vram(rig: Rig) -> None:
    """Evict everything from VRAM's prefix cache. Saved pages remain."""
    rig.run()
    rig.wait_for_worker()
    rig.run()
    rig.pins.release_all()
    rig.pool.evict_blocks(set(range(len(rig.pool.blocks))))


def cpu_tokens(rig: Rig) -> int:
    """Return the number of prompt tokens restored from CPU memory so far."""
    return rig.count("prompt_tokens_cpu")


def readable(rig: Rig) -> list[PageKey]:
    """Return the pages in CPU memory that no order uses."""
    return list(rig.index.least_valuable(rig.index.num_slots))
