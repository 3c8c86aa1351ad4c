"""Validation of saved pages: a thread hashes what has landed, and makes its slots valid.

It yields to everything else on the machine. A page that is overwritten before its turn comes is
not hashed. A page that it has not come to when the process is killed is not found again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.machine import CORES

from .lasting_memory import LastingMemory
from .memory_format import SlotHeader

logger = logging.getLogger(__name__)

NICE = 10
"""Niceness of the thread."""


@dataclass(frozen=True, slots=True)
class LandedPage:
    """A page whose bytes are in its slot.

    Attributes:
        nbytes: size of the page.
        saved: time at which the scheduler knew it whole on every rank, nanoseconds since 1970.
    """

    slot: int
    key: PageKey
    nbytes: int
    saved: int


class Validation:
    """The thread. All methods are called by the worker's thread.

    Args:
        memory: must not be closed before this.
    """

    def __init__(self, memory: LastingMemory) -> None:
        self._memory = memory
        self._queue: deque[tuple[LandedPage, int]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-validate", daemon=True)
        self._thread.start()

    def landed(self, pages: Iterable[LandedPage]) -> None:
        """Take pages that have landed and are known to be right on every rank. Their slots hold
        them still."""
        tickets = [(page, self._memory.ticket(page.slot)) for page in pages]
        with self._changed:
            self._queue.extend(tickets)
            self._changed.notify()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every page is done; False if that took more than so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout)

    def close(self, budget_s: float = 0.0) -> int:
        """End the thread. Idempotent.

        Args:
            budget_s: time for what waits, seconds.

        Returns:
            Number of pages that were not done.
        """
        self.wait_idle(budget_s)
        with self._changed:
            self._ending = True
            left = len(self._queue)
            self._queue.clear()
            self._changed.notify()
        self._thread.join()
        return left

    def _run(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, CORES)  # whatever core the engine's thread is bound to
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (one := self._next()) is not None:
            try:
                self._validate(*one)
            except Exception:  # a page that is not found again is no reason to stop
                logger.exception("a page in CPU memory cannot be validated")

    def _next(self) -> tuple[LandedPage, int] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._ending)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _validate(self, page: LandedPage, ticket: int) -> None:
        memory = self._memory
        if memory.ticket(page.slot) != ticket:
            return
        digest = memory.digest(page.slot, page.nbytes)
        header = SlotHeader(page.key, page.nbytes, page.saved, digest)
        memory.validate(page.slot, ticket, header)
