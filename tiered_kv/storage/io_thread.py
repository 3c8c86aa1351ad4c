"""The I/O thread: carries out a tier's store orders in the background, when they are due.

The thread owns its store from the start. Orders wait in a heap until they are due. Among orders
that are due, lookups go first, then promotions, because requests wait for them. A demotion is
written in groups, and a promotion can run between two groups. A store may require promotions in
groups too, so that a lookup need not wait for a whole context.

An order is reported only after the store's call has returned, because its slots stay reserved for
as long as the store may access them.

An order never ends the thread: failures are reported as failed pages.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.base import CodedPage
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.orders import (
    DemoteOrder,
    LookupOrder,
    OrderId,
    OrderReport,
    PromoteOrder,
    StoreOrder,
)
from tiered_kv.remote.breaker import Patience

from .base import PageStore, put_present

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LEAST_BYTES = 8 << 20
"""Smallest write at shutdown, bytes. The shutdown may exceed its deadline by one write of this
size."""

ColdSource: TypeAlias = Callable[[PageKey, int], CodedPage | None]
"""Returns a compressed page by its key and its place in a bundle; None if the page is missing or
damaged."""

GROUP_BYTES = 128 << 20
"""Size of a group of demoted pages that are made durable together, bytes. A group is large enough
for a disk to reach its full speed, but a promotion waits only a few hundredths of a second for the
write of a group."""
MOST_LOGGED = 100
"""Maximum number of different errors that are logged."""
HUNG_S = 30.0
"""Maximum time that ``close`` waits for a store call in progress, seconds."""


def group_pages(page_bytes: int) -> int:
    """Return the number of pages in a group."""
    return max(1, GROUP_BYTES // page_bytes)


Task = Callable[[], None]


@dataclass(slots=True)
class _Flight:
    """An order in progress. The pages before index ``done`` were moved or are in ``failed``. The
    store calls so far took ``seconds`` seconds."""

    order: DemoteOrder | PromoteOrder
    epoch: int
    done: int = 0
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0


class IoThread:
    """Carries out the orders for a store, and returns reports.

    Args:
        store: the store; closed with the thread.
        slots: the CPU pool's slots, uint8 ``[num_slots, page_bytes]``.
        clock: monotonic time, seconds.
        cold: returns a compressed page by its key and its place in a bundle; None if the page is
            missing or damaged.
    """

    def __init__(
        self,
        store: PageStore,
        slots: NDArray[np.uint8],
        clock: Callable[[], float] = time.monotonic,
        cold: ColdSource = lambda key, place: None,
    ) -> None:
        self.store = store
        self._cold = cold
        self.failures = 0
        self._logged: set[str] = set()
        self._slots = slots
        self._page_bytes = int(slots.shape[1])
        self._clock = clock
        self._later: list[tuple[float, int, DemoteOrder | PromoteOrder]] = []
        self._promotions: deque[_Flight] = deque()
        self._demotions: deque[_Flight] = deque()
        self._lookups: deque[tuple[LookupOrder, Task]] = deque()
        self._tasks: deque[Task] = deque()
        self._reports: dict[OrderId, OrderReport] = {}
        self._gone: list[PageKey] = []
        self._proposal: Proposal | None = None
        self._submitted = 0
        self._changed = threading.Condition()
        self._busy = False
        self._epoch = 0
        self._promoted_last = False
        self._rest_until = -math.inf  # on the monotonic clock, not on ``clock``
        self._patience = Patience()  # also on the monotonic clock
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-io", daemon=True)
        self._thread.start()

    # -- for the worker's thread ------------------------------------------------------

    def now(self) -> float:
        """Return the current time of this thread's clock, seconds."""
        return self._clock()

    def submit(self, order: DemoteOrder | PromoteOrder, ahead_s: float = 0.0) -> None:
        """Queue an order, which is carried out once it is due.

        Args:
            ahead_s: lead of this thread's clock over the clock to which ``due`` refers, seconds.
        """
        due = order.due + ahead_s if order.due > 0 else order.due
        with self._changed:
            self._submitted += 1
            heapq.heappush(self._later, (due, self._submitted, order))
            self._changed.notify_all()

    def wake(self) -> None:
        """Check again for due orders, because the clock may have jumped."""
        with self._changed:
            self._changed.notify_all()

    def expedite(self, order_ids: Collection[OrderId]) -> None:
        """Make these orders due now. Ignores orders in progress and finished orders."""
        with self._changed:
            self._later = [
                (-math.inf if order.order_id in order_ids else due, number, order)
                for due, number, order in self._later
            ]
            heapq.heapify(self._later)
            self._changed.notify_all()

    def look_up(self, order: LookupOrder) -> None:
        """Queue a lookup that is due now, because a turn waits for the answer."""
        epoch = self._epoch

        def task() -> None:
            absent = frozenset(range(len(order.keys)))
            try:
                if order.runs:
                    self.store.place(order.keys, order.runs)
                absent = self.store.exists(order.keys, order.deadline_s)
            finally:
                with self._changed:
                    if epoch != self._epoch:
                        absent = frozenset(range(len(order.keys)))
                    self._reports[order.order_id] = OrderReport(1, absent, 0, 0.0)

        self._add(self._lookups, (order, task))

    def reclaim(self, segment: int, survivors: Sequence[PageKey]) -> None:
        """Queue the reclaiming of a proposed segment. ``take_gone`` returns the pages that were
        lost with the segment."""

        def task() -> None:
            try:
                gone = self.store.reclaim(segment, survivors)
                with self._changed:
                    self._gone += gone
            finally:
                self._proposal = self.store.proposal()

        self._add(self._tasks, task)

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Queue the forgetting of pages; see ``PageStore.drop``."""
        self._add(self._tasks, lambda: self.store.drop(keys))

    def replace_store(self, make: Callable[[], PageStore]) -> None:
        """Clear the store, fail its orders, and continue with another store, after a cache
        reset."""
        with self._changed:
            self._epoch += 1
            stale: list[StoreOrder] = [order for _, _, order in self._later]
            stale += [lookup for lookup, _ in self._lookups]
            stale += [flight.order for flight in (*self._promotions, *self._demotions)]
            for order in stale:
                self._report(order, frozenset(range(len(order.keys))), 0.0)
            self._lookups.clear()
            self._later.clear()
            self._promotions.clear()
            self._demotions.clear()
            self._tasks.clear()
            self._proposal = None

        def task() -> None:
            try:
                self.store.clear()
            finally:  # pages left on a failing disk have keys that no request uses any more
                self.store.close()
                self.store = make()
                self._proposal = None

        self._add(self._tasks, task)

    def take_reports(self) -> dict[OrderId, OrderReport]:
        """Return the reports since the last call."""
        with self._changed:
            reports, self._reports = self._reports, {}
        return reports

    def take_gone(self) -> list[PageKey]:
        """Return the pages that were lost with their segments since the last call."""
        with self._changed:
            gone, self._gone = self._gone, []
        return gone

    @property
    def proposal(self) -> Proposal | None:
        """Segment that should be reclaimed, with its pages, among which the scheduler half chooses
        the survivors; None if no segment should be reclaimed."""
        return self._proposal

    def wait_idle(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until all due work is done. Returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout)

    def close(
        self,
        last: Sequence[tuple[PageKey, int]] = (),
        budget_s: float = 0.0,
        *,
        discard: bool = False,
    ) -> int:
        """Stop the thread, write the last pages, close the store. Idempotent.

        A store that hangs is abandoned, and its thread ends with the process.

        Args:
            last: pages to write, as key and place, most important first.
            budget_s: time for writing these pages, seconds.
            discard: True to clear the store first, because no engine will look for its pages again.

        Returns:
            Number of the last pages that are durable; 0 if the thread was already closed, or if the
            store hangs.
        """
        deadline = self._clock() + budget_s
        with self._changed:
            if self._closing:
                return 0
            self._closing = True
            self._changed.notify_all()
        self._thread.join(HUNG_S)
        if self._thread.is_alive():
            logger.error(
                "the store did not respond within %g s at shutdown, so pages that exist only in "
                "CPU memory are not written to it",
                HUNG_S,
            )
            return 0
        try:
            if discard:
                self.store.clear()
            return self._write_last(last, deadline)
        except Exception:
            logger.exception(
                "the store could not be emptied at shutdown, although no later engine can use its "
                "pages"
            )
            return 0
        finally:
            self.store.close()

    # -- the thread -------------------------------------------------------------------

    @property
    def _group(self) -> int:
        """Return the number of pages in a group, limited by the store's ``group_bytes``."""
        most, wanted = group_pages(self._page_bytes), self.store.group_bytes
        return most if wanted is None else max(1, min(most, wanted // self._page_bytes))

    def _add(self, queue: deque[_T], item: _T) -> None:
        with self._changed:
            queue.append(item)
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        due = bool(self._later) and self._later[0][0] <= self._clock()
        waiting = self._lookups or self._promotions or self._tasks or self._demotions
        return not (due or self._busy or waiting)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception as error:
                self.failures += 1
                said = f"{type(error).__name__}: {error}"
                if said not in self._logged and len(self._logged) < MOST_LOGGED:
                    self._logged.add(said)
                    logger.exception(
                        "an operation of a lower tier failed; the engine continues. Each "
                        "error is logged once"
                    )
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Task | None:
        """Wait until some work is due, and return a function that does it. Returns None when the
        thread is to stop."""
        with self._changed:
            while not self._closing:
                now = self._clock()
                while self._later and self._later[0][0] <= now:
                    order = heapq.heappop(self._later)[2]
                    up = isinstance(order, PromoteOrder)
                    queue = self._promotions if up else self._demotions
                    queue.append(_Flight(order, self._epoch))
                if work := self._pick():
                    self._busy = True
                    return work
                self._changed.wait(self._until_due(now))
        return None

    def _until_due(self, now: float) -> float | None:
        """Return the time until the next work is due, seconds; None if no work is queued."""
        seconds = [self._later[0][0] - now] if self._later else []
        if self._demotions:
            seconds.append(self._rest_until - time.monotonic())
        return min(seconds, default=None)

    def _pick(self) -> Task | None:
        if self._lookups:
            return self._lookups.popleft()[1]
        if self._promotions and not (self._tasks and self._promoted_last):
            self._promoted_last = True
            return partial(self._go_on, self._promotions.popleft(), self._promotions)
        self._promoted_last = False
        if self._tasks:
            return self._tasks.popleft()
        if self._demotions and time.monotonic() >= self._rest_until:
            return partial(self._go_on, self._demotions.popleft(), self._demotions)
        return None

    def _go_on(self, flight: _Flight, queue: deque[_Flight]) -> None:
        """Move one group, and put the rest of the order back at the head of its queue.

        The order ends with the first group of which no page was moved, because the store is slow or
        full, or lacks the other pages as well. Some stores are offered the group again for a while.
        """
        order, start, up = flight.order, flight.done, queue is self._promotions
        whole = up and self.store.group_bytes is None
        flight.done = stop = len(order.keys) if whole else start + self._group
        pages = list(zip(order.keys[start:stop], order.slots[start:stop], strict=True))
        bad, asked, began = frozenset(range(len(pages))), int(up), time.perf_counter()
        try:
            if isinstance(order, PromoteOrder):
                bad = self.store.get([(key, self._slots[slot]) for key, slot in pages])
            else:
                if order.runs:
                    self.store.place(order.keys[start:stop], order.runs[start:stop])
                bad, asked = self._put(pages)
                self._rest_until = time.monotonic() + self.store.rest_s
        finally:
            # Pages missing here, or a page that caused an exception, are no evidence about the
            # store.
            nothing = asked and len(bad) == len(pages)
            if nothing and not up and self._tries_again():
                flight.done = stop = start
            elif nothing:
                stop = len(order.keys)
                flight.failed.update(range(start, stop))
            else:
                flight.failed |= {start + i for i in bad}
                if len(bad) < len(pages):
                    self._patience.renew()
            flight.seconds += time.perf_counter() - began
            with self._changed:
                if flight.epoch != self._epoch:
                    self._report(order, frozenset(range(len(order.keys))), 0.0)
                elif stop < len(order.keys):
                    queue.appendleft(flight)
                else:
                    self._report(order, frozenset(flight.failed), flight.seconds)
        if not up and flight.epoch == self._epoch:
            self._proposal = self.store.proposal()

    def _tries_again(self) -> bool:
        """Decide whether a group is offered again to a store that accepted none of its pages. If
        so, schedules the pause before the next attempt."""
        retry_s, now = self.store.retry_s, time.monotonic()
        if retry_s is None or not self._patience.lasts(now):
            return False
        self._rest_until = now + retry_s
        return True

    def _put(self, pages: Sequence[tuple[PageKey, int]]) -> tuple[frozenset[int], int]:
        """Store pages. Compressed pages are stored without encoding them again, if the store can do
        so.

        Args:
            pages: keys and places; a place is a slot or, below 0, a place in a bundle.

        Returns:
            The indices of the pages that are not stored, and the number of pages passed to the
                store.
        """
        raw = [(key, self._slots[place]) if place >= 0 else None for key, place in pages]
        failed = put_present(self.store.put, raw)
        coded = [self._cold(key, place) if place < 0 else None for key, place in pages]
        cold = [
            (key, page) if page is not None else None
            for (key, _), page in zip(pages, coded, strict=True)
        ]
        failed &= put_present(self.store.put_coded, cold)
        return failed, 2 * len(pages) - raw.count(None) - cold.count(None)

    def _write_last(self, last: Sequence[tuple[PageKey, int]], deadline: float) -> int:
        """Write as many pages as time allows; return the number of durable pages. Never raises.

        A group that has started is finished, so each group is sized to take at most half of the
        remaining time at the speed of the previous group.

        Args:
            last: pages as key and place, most important first.
            deadline: time on this thread's clock.
        """
        step = least = min(self._group, max(1, LEAST_BYTES // self._page_bytes))
        written = start = 0
        try:
            while start < len(last) and (began := self._clock()) < deadline:
                group = last[start : start + step]
                start += len(group)
                failed, asked = self._put(group)
                written += len(group) - len(failed)
                if not asked:  # their bundles are missing, which is no evidence about the store
                    continue
                if len(failed) == len(group):
                    break
                now = self._clock()
                room = asked * (deadline - now) / (2 * max(now - began, 1e-6))
                step = max(least, int(min(room, self._group)))
        except Exception:
            logger.exception("not all of the last pages could be written to the store at shutdown")
        return written

    def _report(self, order: StoreOrder, failed: frozenset[int], seconds: float) -> None:
        nbytes = (len(order.keys) - len(failed)) * int(self._slots.shape[1])
        self._reports[order.order_id] = OrderReport(1, failed, nbytes, seconds)
