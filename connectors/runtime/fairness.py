"""Fairness among waiting requests: every wait has a bound, and clients share the engine equally.

A request that has waited for the admission limit since it arrived is *overdue*. Until it is
allocated blocks, no request that arrived later is admitted, and every pin is released if the
overdue request needs its blocks. After a further ``TIERS_GRACE`` of the limit, it no longer waits
for pages of lower tiers. Preempted requests still precede it, as do requests of a higher priority
if the engine admits requests by priority.

A client is a ``cache_salt`` or, without one, a job. While other clients wait, a client gets at most
an equal share of the seats (the requests that the engine runs concurrently) and of the block pool.
One request is always within its client's share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.admission.job_order import SENIORITY
from tiered_kv.policies.admission.working_set import ClientUse, EqualShare
from tiered_kv.policies.base import JobKey, job_scope

from .base import Request
from .engine_state import EngineState

Client: TypeAlias = str | JobKey
NO_USE = ClientUse()

TIERS_GRACE = 0.1
"""Time for which an overdue request still waits for pages that are being promoted, as a fraction of
the limit. Prefilling a long context instead would delay every running request more."""
IDLE_STEPS = 200
"""Number of steps in which no request runs and an overdue request is not admitted, after which
later arrivals no longer wait for it: the engine must be refusing it for a reason other than blocks
and seats."""


@dataclass(slots=True, eq=False)
class _Live:
    """A live request.

    Attributes:
        client: the client that sent it.
        arrived_at: when it arrived, seconds.
        in_line: True until it is allocated blocks for the first time.
    """

    request: Request
    client: Client
    arrived_at: float
    in_line: bool = True


@dataclass(slots=True, eq=False)
class _Share:
    """A client with live requests.

    Attributes:
        requests: number of its live requests.
        admitted_at: when a request of the client was last admitted, seconds; 0 before that.
    """

    requests: int = 0
    admitted_at: float = 0.0


class Fairness:
    """The live requests by arrival and by client. Used on one thread.

    Args:
        max_wait_s: wait after which a request is overdue, seconds.

    Attributes:
        seats_short: True if more requests wait than there are free seats. Written by the engine's
            scheduler.
    """

    def __init__(self, engine: EngineState, max_wait_s: float) -> None:
        self.seats_short = False
        self._facts = engine.facts
        self._max_wait_s = max_wait_s
        self._pool = engine.pool
        self._clock = engine.clock
        self._live: dict[str, _Live] = {}
        # By priority: requests without blocks, in the order of their arrival.
        self._lines: dict[int, OrderedDict[str, _Live]] = {}
        self._requeued: dict[str, _Live] = {}  # preempted requests that wait again
        self._clients: dict[Client, _Share] = {}
        self._crowding = 0  # clients with several requests
        self._changed = False  # True if anything changed since the last ``over_share``
        self._idle_since: int | None = None

    # -- request events -------------------------------------------------------------------

    def on_arrived(self, request: Request, job: JobKey | None, arrived_at: float) -> None:
        """Register an arriving request; ``job`` is None if it belongs to no job."""
        client: Client = job_scope(request.cache_salt) or job or request.request_id
        live = _Live(request, client, arrived_at)
        self._live[request.request_id] = live
        self._lines.setdefault(self._priority(live), OrderedDict())[request.request_id] = live
        share = self._clients.setdefault(client, _Share())
        share.requests += 1
        self._crowding += share.requests == 2
        self._changed = True

    def on_allocated(self, request_id: str) -> None:
        """Record that a request was allocated blocks."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._idle_since = None
        if self._leave_line(live):
            self._clients[live.client].admitted_at = self._clock()
            self._changed = True
        self._requeued.pop(request_id, None)

    def on_ended(self, request_id: str) -> None:
        """Forget a finished request. Unknown requests are ignored."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._leave_line(live)
        self._requeued.pop(request_id, None)
        share = self._clients[live.client]
        share.requests -= 1
        self._crowding -= share.requests == 1
        if not share.requests:
            del self._clients[live.client]
        self._changed = True

    def _leave_line(self, live: _Live) -> bool:
        """Remove a request from its line. Returns False if it is in no line."""
        if not live.in_line:
            return False
        live.in_line = False
        priority = self._priority(live)
        line = self._lines[priority]
        del line[live.request.request_id]
        if not line:
            del self._lines[priority]
        return True

    def _priority(self, live: _Live) -> int:
        return live.request.priority if self._facts.limits.priorities else 0

    # -- the bound on every wait ----------------------------------------------------------

    def arrived_at(self, request_id: str) -> float:
        """Return when a request arrived, seconds. For an unknown request, returns the current
        time."""
        live = self._live.get(request_id)
        return self._clock() if live is None else live.arrived_at

    @property
    def seniority_s(self) -> float:
        """Maximum time by which a request may have arrived later than a request that it precedes,
        if more requests wait than may run; seconds."""
        return SENIORITY * self._max_wait_s

    def overdue_until(self) -> float:
        """Latest arrival time at which a waiting request is overdue by now, seconds."""
        return self._clock() - self._max_wait_s

    def is_overdue(self, request_id: str) -> bool:
        """True if a waiting request has waited for the admission limit."""
        live = self._live.get(request_id)
        return live is not None and self._waits_too_long(live)

    def _waits_too_long(self, live: _Live) -> bool:
        waits = live.in_line or live.request.request_id in self._requeued
        return waits and self._clock() - live.arrived_at >= self._max_wait_s

    def may_wait_for_tiers(self, request_id: str) -> bool:
        """True if a waiting request may wait for pages that are promoted for it. Always True for a
        preempted request, which has not waited since its arrival, and for an unknown request."""
        live, longest_s = self._live.get(request_id), (1 + TIERS_GRACE) * self._max_wait_s
        if live is None or not live.in_line:
            return True
        return self._clock() - live.arrived_at < longest_s

    def next_overdue_at(self) -> float:
        """Return the time at which the next waiting request becomes overdue, seconds; infinite if
        no request waits, or if all waiting requests are overdue already."""
        latest = self.overdue_until()
        times = (
            next((one.arrived_at for one in line.values() if one.arrived_at > latest), math.inf)
            for line in self._lines.values()
        )
        return min(times, default=math.inf) + self._max_wait_s

    def must_yield(self, request_id: str, step: int) -> bool:
        """True if a request that the engine considers for admission must wait, because an overdue
        request arrived before it. Always False for a preempted request, which is recorded as
        waiting again.

        Args:
            step: number of the engine's step.
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        if not live.in_line:
            self._requeued[request_id] = live
            return False
        now = self._clock()
        for first in self._oldest(self._priority(live)):
            if first.arrived_at >= live.arrived_at:
                continue
            if now - first.arrived_at >= self._max_wait_s:
                return not self._is_stuck(step)
        return False

    def _oldest(self, priority: int) -> Iterator[_Live]:
        """Yield the requests that have waited longest and wait only for a seat and blocks: one of
        each line with at least the priority ``priority``, and one of the preempted requests."""
        for at, line in self._lines.items():
            if at <= priority:
                yield from _first_ready(line.values())
        if self._requeued:
            by_arrival = sorted(self._requeued.values(), key=lambda one: one.arrived_at)
            yield from _first_ready(one for one in by_arrival if self._priority(one) <= priority)

    def _is_stuck(self, step: int) -> bool:
        """True if no request has run for ``IDLE_STEPS`` steps, which shows that the overdue request
        waits for something other than a seat or blocks."""
        if any(self._pool.tables[CONTEXT].values()):
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = step
        return step - self._idle_since >= IDLE_STEPS

    # -- equal shares ---------------------------------------------------------------------

    @property
    def shares_changed(self) -> bool:
        """True if the result of ``over_share`` may have changed since the last call."""
        return self._changed and self._crowding > 0 and len(self._clients) > 1

    def over_share(self, waiting: Iterable[str]) -> Mapping[str, tuple[float, float]]:
        """Rank the waiting requests that would take their clients over an equal share, except
        overdue requests. Requests of the client with the smallest excess come first; if excesses
        are equal, requests of the client whose last admission was earliest.

        Args:
            waiting: the requests in the order in which the engine would admit them.

        Returns:
            The rank of each such request; lower ranks go first.
        """
        self._changed = False
        if not self._crowding or len(self._clients) < 2:
            return {}
        share, used = self._equal_share(len(self._clients)), self._used()
        over = dict[str, tuple[float, float]]()
        for request_id in waiting:
            live = self._live.get(request_id)
            if live is None or not live.in_line:
                continue
            client = self._clients[live.client]
            if client.requests == 1:
                continue
            use = used[live.client] = used.get(live.client, NO_USE).plus(self._blocks(live))
            excess = share.excess(use)
            if excess and not self._waits_too_long(live):
                over[request_id] = excess, client.admitted_at
        return over

    def salts_over_share(self, pinned: Mapping[JobKey, int], waiter: str) -> Collection[str]:
        """Return the salts whose pins are released for a waiting request of another client
        regardless of the pins' value, because the clients with these salts have more than an equal
        share of the pool.

        Args:
            pinned: number of blocks of each pin.
            waiter: id of the waiting request.
        """
        live = self._live.get(waiter)
        if live is None or not any(job.salt for job in pinned):
            return frozenset()
        used = self._used()
        for job, blocks in pinned.items():
            if job.salt:
                used[job.salt] = used.get(job.salt, NO_USE).plus(blocks)
        share = self._equal_share(len(self._clients.keys() | used.keys()))
        own = used.get(live.client, NO_USE).plus(self._blocks(live))
        if share.fills_pool(own):
            return frozenset()
        return {one for one, use in used.items() if isinstance(one, str) and share.fills_pool(use)}

    def _equal_share(self, clients: int) -> EqualShare:
        facts = self._facts
        return EqualShare.of(facts.limits.running or math.inf, facts.usable_blocks, clients)

    def _used(self) -> dict[Client, ClientUse]:
        """Return the number of seats and blocks that each client's running requests use."""
        used = dict[Client, ClientUse]()
        for request_id, live in self._live.items():
            if request_id not in self._requeued and not live.in_line:
                used[live.client] = used.get(live.client, NO_USE).plus(self._blocks(live))
        return used

    def _blocks(self, live: _Live) -> float:
        return self._facts.mean_blocks(live.request.num_tokens)


def _first_ready(line: Iterable[_Live]) -> Iterator[_Live]:
    """Yield the first of the requests in ``line`` that the engine could admit, if any."""
    for live in line:
        if live.request.ready:
            yield live
            return
