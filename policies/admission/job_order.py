"""The order of requests: who is let in, admitted and kept running first. Pure.

Each rank sorts ascending: the least is first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MOST_HELD_IN_QUEUE = 8
"""New jobs held at once in the engine's own queue: it looks each one's prefix up in every step."""
TIGHT_TOKENS = 4096
"""Room in free blocks, beside one for each running request, below which the order of victims
matters: a step's prefills may take as much."""


@dataclass(frozen=True, slots=True)
class Place:
    """A request, as the orders see it.

    Attributes:
        job_started_at: start of its job, seconds; the request's own arrival without a job.
        arrived_at: arrival of the request, seconds.
        new: True if no turn of its job has had blocks.
        preempted: True if it was preempted.
        has_kv: True if its job's KV is pinned, or on its way for it.
        is_last_step: True if its job ends with it.
    """

    job_started_at: float
    arrived_at: float
    new: bool = False
    preempted: bool = False
    has_kv: bool = False
    is_last_step: bool = False


def parked_rank(place: Place) -> tuple[bool, float]:
    """Order in which held requests are let in: turns of started jobs by the start of their jobs,
    then new jobs as they came."""
    return place.new, place.arrived_at if place.new else place.job_started_at


def waiting_rank(place: Place) -> tuple[int, float, float]:
    """Order in which waiting requests are admitted: those that were preempted, those whose KV is
    held or on its way, the others; by the start of their jobs."""
    group = 0 if place.preempted else 1 if place.has_kv else 2
    return group, place.job_started_at, place.arrived_at


def running_rank(place: Place) -> tuple[bool, float]:
    """Order in which running requests lose most by a preemption: last turns, then the oldest
    jobs. The last in this order is the victim."""
    return not place.is_last_step, place.job_started_at


def one_too_many(held: Collection[str]) -> str | None:
    """The request to let in of those held in the engine's own queue: the one that has been held
    the longest; None while they are few enough.

    Args:
        held: their ids, the longest held first.
    """
    return next(iter(held)) if len(held) > MOST_HELD_IN_QUEUE else None


def prefill_blocks(block_size: int) -> int:
    """Blocks that a step's prefills may take."""
    return TIGHT_TOKENS // block_size


def is_tight(free: int, running: int, prefills: int) -> bool:
    """True if one of this many running requests may be preempted in this step, so that their order
    matters.

    Args:
        free: free blocks.
        running: running requests, each of which may take one.
        prefills: see ``prefill_blocks``.
    """
    return free < prefills + running
