"""Generator of arbitrary request ids and hints, mostly in the fields that the server reads."""

from __future__ import annotations

import random
import string
from typing import Any

from tiered_kv.policies.jobs.identity import BODY_FIELDS, INFERRED_PREFIX, PARAMS_FIELDS

MARK = '[{"type": "text", "text": "x-anthropic-billing-header: cc_is_subagent=true;"}]'
"""Marker at the start of the system prompt of Claude Code's sub-agents."""
LEAVES: list[Any] = [
    None, True, 0, -1, 2**63, 1.5, float("nan"), "", "lead", "S", "T", "x" * 600, "\ud83d", [], {},
    f"{INFERRED_PREFIX}1", "(sha256) 0", "a/agent:b", '{"session_id": "S"}', "{", "resp_1",
    "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11", "ses_1", b"S", MARK, "true",
]  # fmt: skip
FIELDS = sorted(
    PARAMS_FIELDS
    | BODY_FIELDS
    | {"user_id", "session_id", "thread_id", "agent_context", "trajectory_id", "cache_salt"}
    | {"session", "agent", "parent_agent", "parent_session", "subagent", "follows", "ignored"}
    | {"program_id", "parent_program_id", "task_id", "salt"}
)


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Return an arbitrary JSON-like value, mostly built from the field names that the server
    reads."""
    if depth and rng.random() < 0.6:
        return {rng.choice(FIELDS): anything(rng, depth - 1) for _ in range(rng.randrange(1, 5))}
    if rng.random() < 0.1:
        return "".join(rng.choices(string.printable, k=rng.randrange(20)))
    return rng.choice(LEAVES)
