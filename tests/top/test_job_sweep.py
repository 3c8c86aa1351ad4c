"""A long job list is read page by page, while jobs start and end."""

from __future__ import annotations

import pytest

from tests.top.made import job
from tiered_kv.status import Cursor, JobPage, JobStatus
from tiered_kv.top import watch
from tiered_kv.top.watch import FIRST_PAGES, JobSweep


class Server:
    """A server with jobs, which returns pages of ten.

    Attributes:
        asked: number of pages returned.
    """

    def __init__(self, *numbers: int, engines: int = 1) -> None:
        self.jobs = {
            Cursor(rank, number): job(number, engine=rank)
            for rank in range(engines)
            for number in numbers
        }
        self.asked = 0

    def page(self, after: Cursor) -> JobPage:
        self.asked += 1
        rest = [at for at in sorted(self.jobs) if at > after]
        more = rest[9] if len(rest) >= 10 else None
        return JobPage(1.0, len(self.jobs), tuple(self.jobs[at] for at in rest[:10]), more)


def numbers(jobs: tuple[JobStatus, ...]) -> list[int]:
    return [one.number for one in jobs]


def test_a_short_list_is_complete_after_one_poll() -> None:
    for count in (0, 3, 10):
        sweep = JobSweep(Server(*range(1, count + 1)).page)
        sweep.go_on()
        assert sweep.whole
        assert numbers(sweep.jobs()) == list(range(1, count + 1))


def test_a_long_list_continues_where_the_last_poll_ended() -> None:
    server = Server(*range(1, 10 * FIRST_PAGES + 16))
    sweep = JobSweep(server.page)
    whole, asked = list[bool](), list[int]()
    for _ in range(3):
        sweep.go_on()
        whole.append(sweep.whole)
        asked.append(server.asked)
    assert whole == [False, False, True]
    assert asked == [FIRST_PAGES, FIRST_PAGES + 1, FIRST_PAGES + 2], "a page each"
    assert numbers(sweep.jobs()) == list(range(1, 10 * FIRST_PAGES + 16))


def test_new_and_ended_jobs_are_noticed_within_a_round() -> None:
    server = Server(*range(1, 36), engines=2)
    sweep = JobSweep(server.page)
    sweep.go_on()
    for at in [at for at in server.jobs if at.number % 3 == 0]:
        del server.jobs[at]
    server.jobs[Cursor(0, 99)] = job(99)
    for _ in range(8):
        sweep.go_on()
    assert sweep.jobs() == tuple(server.jobs[at] for at in sorted(server.jobs))


def test_a_restarted_server_leaves_no_old_jobs() -> None:
    old, new = Server(*range(1, 36)), Server(1, 2)
    now = old
    sweep = JobSweep(lambda after: now.page(after))
    sweep.go_on()
    now = new
    for _ in range(2):
        sweep.go_on()
    assert numbers(sweep.jobs()) == [1, 2]


def test_a_list_whose_cursor_goes_backwards_ends() -> None:
    sweep = JobSweep(lambda after: JobPage(1.0, 1, (job(5),), Cursor(0, 0)))
    for _ in range(3):
        sweep.go_on()
        assert numbers(sweep.jobs()) == [5]


def test_of_too_many_jobs_the_first_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_JOBS", 30)
    server = Server(*range(1, 100))
    sweep = JobSweep(server.page)
    for _ in range(20):
        sweep.go_on()
        assert 30 <= len(sweep.jobs()) <= 100
    assert not sweep.whole
