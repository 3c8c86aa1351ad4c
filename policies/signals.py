"""What a policy is told, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class JobKey(NamedTuple):
    """A job, scoped by the cache salt: equal names under different salts are strangers."""

    salt: str
    name: str


class Tier(Enum):
    """Where a finished turn's KV waits."""

    PIN = "pin"
    """In VRAM until a deadline, with its copy in CPU memory."""
    CPU = "cpu"
    """In CPU memory; VRAM may reuse its blocks at once."""
    SSD = "ssd"
    """On SSD, as soon as it is saved: the next turn is far away."""
    DROP = "drop"
    """Nowhere in particular: the job is over."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that just finished.

    Attributes:
        job: None when the client named no job.
        turn: 1 for the job's first turn.
        is_last_step: the client says that no turn follows.
        aborted: the client went away or cancelled.
        context_tokens: tokens whose KV exists now.
    """

    job: JobKey | None
    turn: int
    is_last_step: bool
    aborted: bool
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the turn's KV waits; ``ttl_s`` seconds at most if pinned, else 0."""

    tier: Tier
    ttl_s: float = 0.0


class TurnPolicy(Protocol):
    """Decides at the end of every turn. Pure, under 100 µs, on the scheduler thread."""

    def decide(self, turn: TurnEnd) -> Decision: ...
