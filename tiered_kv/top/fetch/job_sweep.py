"""A sweep over the list of jobs: a page at a time, round after round.

An engine takes a millisecond between two steps to tell of a hundred jobs. So a long list is not
read anew for every frame: each frame reads one page, where the one before ended.
"""

from __future__ import annotations

from collections.abc import Callable

from tiered_kv.top.readings import JobReading

from .answers import Cursor, JobPage

FIRST_PAGES = 10
"""Pages that are read for the first frame, at most."""
MOST_JOBS = 70_000
"""Jobs of all engines that are kept: an engine remembers 65,536. Of more, the first."""


class JobSweep:
    """The jobs that were seen in the last round. One thread.

    Args:
        page: asks for the page after a job.

    Attributes:
        whole: True once all jobs have been seen.
    """

    def __init__(self, page: Callable[[Cursor], JobPage]) -> None:
        self.whole = False
        self._page = page
        self._jobs: dict[Cursor, JobReading] = {}
        self._at = Cursor()

    def go_on(self) -> None:
        """Read the next page; the first time, as many as there are up to ``FIRST_PAGES``."""
        first = not self._jobs and not self.whole
        for _ in range(FIRST_PAGES if first else 1):
            if self._read() is None:
                break

    def jobs(self) -> tuple[JobReading, ...]:
        """The jobs, in the order of the list."""
        return tuple(self._jobs[at] for at in sorted(self._jobs))

    def _read(self) -> Cursor | None:
        page = self._page(self._at)
        begin, end = self._at, page.next
        if end is not None and end <= begin:
            end = None  # it would be read for ever
        kept = {
            at: job
            for at, job in self._jobs.items()
            if at <= begin or (end is not None and at > end)
        }
        self._jobs = kept | {Cursor(job.engine, job.number): job for job in page.jobs}
        self.whole = self.whole or end is None
        self._at = end if end is not None and len(self._jobs) < MOST_JOBS else Cursor()
        return end
