"""The order in which waiting requests are admitted and running requests are kept running.

The functions are pure and return ranks. The request with the lowest rank comes first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SENIORITY = 0.1
"""Maximum time by which a later request may precede an earlier request while more requests wait
than may run, as a fraction of ``admission_max_wait_s``. While that many wait, preferring requests
of older jobs saves no computation."""


class QueuePosition(NamedTuple):
    """The properties of a request that determine its rank. A tuple, because thousands of requests
    are sorted.

    Attributes:
        job_started_at: start of its job, seconds; without a job, the arrival of the request.
        arrived_at: arrival of the request, seconds.
        new: True if no turn of its job has been allocated blocks.
        preempted: True if it was preempted.
        overdue: True if it has waited for at least ``admission_max_wait_s``.
        has_kv: True if its job's KV is pinned, or being promoted for it.
        is_last_step: True if its job ends with this turn.
        client_blocks: for a new job, blocks of its client's active jobs, and of the client's
            parked new jobs that arrived earlier.
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
    requests, then requests whose KV is pinned or being promoted, then all others. Overdue requests
    are ordered by arrival, and the requests of each other group by the start of their jobs.

    Args:
        seniority_s: maximum time by which a request may have arrived later than a request that it
            precedes, seconds. If it is finite, which callers use while more requests wait than may
            run, all requests that are neither preempted nor overdue form one group.
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
