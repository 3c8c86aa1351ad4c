"""A rig whose pool has space for three new jobs."""

from __future__ import annotations

from typing import Any

from tests.runtime.conftest import MakeRig
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig

TOKENS, BLOCKS = 300, 64
"""Prompt tokens of a new job, and blocks of the pool. A new job needs 19 of the 63 usable blocks,
so three fit and a fourth does not."""


def holding_rig(
    make_rig: MakeRig, *, in_job_order: bool, priority: bool = False, **settings: Any
) -> Rig:
    """Create a rig on which recomputing contexts is expensive, so that jobs are held back for lack
    of space."""
    rig = make_rig(
        blocks=BLOCKS,
        max_model_len=512,
        extra={"cpu_gib": 0.0, "admission": "auto", **settings},
        in_job_order=in_job_order,
        policy="priority" if priority else "fcfs",
    )
    prefills_take(rig, 1e3)
    return rig


def prefills_take(rig: Rig, token_s: float) -> None:
    """Fix the estimated prefill time to this many seconds per token."""
    fit = rig.half.gaps.prefills.fit
    vars(fit)["seconds"] = lambda behind, tokens: token_s * tokens


def begin(rig: Rig, name: str, *, tokens: int = TOKENS, last: bool = True, seed: int = 0) -> None:
    """Add the first turn of a new job."""
    params = {"job_id": name, "is_last_step": last}
    rig.add(name, text(tokens, seed=seed or sum(name.encode())), max_tokens=40, params=params)


def running(rig: Rig) -> list[str]:
    return sorted(request.request_id for request in rig.scheduler.running)
