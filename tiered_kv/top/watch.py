"""Polling of a server: its status, the recent growth of its counters, and its jobs, page by page.

Reporting a hundred jobs takes an engine a millisecond or two between steps. Therefore a long list
is not read completely in every poll: each poll reads the page that follows the previous poll's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from tiered_kv.status import Cursor, EngineStatus, JobPage, JobStatus

from .route_client import RouteClient, RouteError
from .safe_text import harmless
from .server_state import Growth, ServerState

FIRST_PAGES = 10
"""Maximum number of pages of jobs read in the first poll."""
MOST_JOBS = 70_000
"""Maximum number of jobs kept for all engines. An engine remembers 65,536 jobs. If a server lists
more jobs than the maximum, the first jobs are kept."""


class JobSweep:
    """The jobs seen in the latest pass over the server's list of jobs. Single-threaded.

    Args:
        page: requests the page after a cursor.

    Attributes:
        whole: True once all jobs have been seen.
    """

    def __init__(self, page: Callable[[Cursor], JobPage]) -> None:
        self.whole = False
        self._page = page
        self._jobs: dict[Cursor, JobStatus] = {}
        self._at = Cursor()

    def go_on(self) -> None:
        """Read the next page. The first call reads all pages, at most ``FIRST_PAGES``."""
        first = not self._jobs and not self.whole
        for _ in range(FIRST_PAGES if first else 1):
            if self._read() is None:
                break

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return the jobs, in list order."""
        return tuple(self._jobs[at] for at in sorted(self._jobs))

    def _read(self) -> Cursor | None:
        page = self._page(self._at)
        begin, end = self._at, page.next
        if end is not None and end <= begin:
            end = None  # otherwise the same pages would be read forever
        kept = {
            at: job
            for at, job in self._jobs.items()
            if at <= begin or (end is not None and at > end)
        }
        self._jobs = kept | {Cursor(job.engine, job.number): job for job in page.jobs}
        self.whole = self.whole or end is None
        self._at = end if end is not None and len(self._jobs) < MOST_JOBS else Cursor()
        return end


WINDOW_S = 60.0
"""Period over which growth is measured, seconds. It is shorter until the readings cover it."""


class Flow:
    """Readings of one engine's counters in the last minute. Single-threaded."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, reading: EngineStatus) -> Growth | None:
        """Add a reading. Returns the growth since the oldest reading of the last minute; None for
        the first reading, and for the first reading after the engine was restarted.
        """
        counters = reading.counters
        last = self._seen[-1][1] if self._seen else {}
        if any(total < last.get(name, 0) for name, total in counters.items()):
            self._seen.clear()  # the engine was restarted
        self._seen.append((reading.now, counters))
        while len(self._seen) > 2 and reading.now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if reading.now <= since:
            return None
        grown = {name: total - before.get(name, 0) for name, total in counters.items()}
        return Growth(reading.now - since, grown)


class Watch:
    """Polls a server repeatedly. Use from one thread at a time.

    Args:
        client: the server's routes.
    """

    def __init__(self, client: RouteClient) -> None:
        self._client = client
        self._sweep = JobSweep(client.jobs)
        self._flows: dict[int, Flow] = {}
        self._last: ServerState | None = None

    def look(self) -> ServerState:
        """Poll the server, and return its state.

        Raises:
            RouteError: polling failed.
        """
        status = self._client.status()
        self._sweep.go_on()
        found = {
            one.engine: self._flows.setdefault(one.engine, Flow()).add(one)
            for one in status.engines
        }
        self._last = ServerState(
            url=harmless(self._client.base),
            status=status,
            growth={engine: growth for engine, growth in found.items() if growth is not None},
            jobs=self._sweep.jobs(),
            whole=self._sweep.whole,
        )
        return self._last

    def look_again(self) -> ServerState:
        """Poll the server, and return its state. If polling fails, returns the last state with the
        problem.

        Raises:
            RouteError: polling failed, and there is no earlier state.
        """
        try:
            return self.look()
        except RouteError as error:
            if self._last is None:
                raise
            return replace(self._last, problem=str(error))
