"""The order in which requests are admitted and kept running. Pure.

Ranks sort in ascending order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SENIORITY = 0.1
"""Maximum time by which a later request may precede an earlier one if more requests wait than may
run, as a fraction of the admission limit. Preferring the request of an older job then saves no
computation."""


class QueuePosition(NamedTuple):
    """A request as seen by the orders. A tuple, because thousands of requests are sorted.

    Attributes:
        job_started_at: start of its job, seconds; without a job, the arrival of the request.
        arrived_at: arrival of the request, seconds.
        new: True if no turn of its job has been allocated blocks.
        preempted: True if it was preempted.
        overdue: True if it has waited for the admission limit.
        has_kv: True if its job's KV is pinned, or being promoted for it.
        is_last_step: True if its job ends with this turn.
        client_blocks: for a new job, blocks of its client's jobs that precede it.
    """

    job_started_at: float
    arrived_at: float
    new: bool = False
    preempted: bool = False
    overdue: bool = False
    has_kv: bool = False
    is_last_step: bool = False
    client_blocks: float = 0.0


def parked_rank(position: QueuePosition) -> tuple[bool, float, float]:
    """Return the rank of a request that is held back. Turns of started jobs are admitted first, by
    the start of their jobs; then new jobs, by the number of their client's blocks, then by
    arrival."""
    if not position.new:
        return False, 0.0, position.job_started_at
    return True, position.client_blocks, position.arrived_at


def waiting_rank(
    position: QueuePosition, seniority_s: float = math.inf
) -> tuple[int, float, float]:
    """Return the rank of a waiting request. Admitted first are preempted requests, then overdue
    requests by arrival, then requests whose KV is pinned or being promoted, then all others. Within
    the other groups, the order is by the start of their jobs.

    Args:
        seniority_s: maximum time by which a request may have arrived later than a request that it
            precedes, seconds. Finite if more requests wait than may run; then the requests that are
            neither preempted nor overdue form one group.
    """
    if position.overdue and not position.preempted:
        return 1, position.arrived_at, position.arrived_at
    if seniority_s < math.inf and not position.preempted:
        started_at = -math.inf if position.has_kv else position.job_started_at
        return 2, max(started_at, position.arrived_at - seniority_s), position.arrived_at
    stage = 0 if position.preempted else 2 if position.has_kv else 3
    return stage, position.job_started_at, position.arrived_at


def running_rank(position: QueuePosition) -> tuple[bool, float]:
    """Return the rank of a running request. Last turns of jobs come first, then the turns of the
    oldest jobs. The last request in this order is preempted."""
    return not position.is_last_step, position.job_started_at
