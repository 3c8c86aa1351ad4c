"""The job table assigns turns to jobs, and remembers a job while it may continue."""

from __future__ import annotations

import random

import pytest

from tiered_kv.connectors.runtime import job_table as jobs
from tiered_kv.connectors.runtime.job_table import JobTable, Responses
from tiered_kv.policies.base import JobKey

KEY = JobKey("salt", "job")


def test_turns_of_a_job_are_counted_from_its_birth() -> None:
    table = JobTable()
    job = table.turn_arrived(KEY, "r1", now=10.0, blocks=1)
    table.turn_ended(job, "r1", over=False)

    again = table.turn_arrived(KEY, "r2", now=20.0, blocks=1)

    assert again is job
    assert (again.turns, again.started_at, again.running) == (2, 10.0, {"r2"})
    assert len(table) == 1


def test_equal_names_under_other_salts_are_other_jobs() -> None:
    table = JobTable()
    mine = table.turn_arrived(JobKey("me", "job"), "r1", 0.0, blocks=1)
    yours = table.turn_arrived(JobKey("you", "job"), "r2", 1.0, blocks=1)
    assert mine is not yours
    assert (mine.turns, yours.turns) == (1, 1)


def test_a_finished_job_is_forgotten() -> None:
    table = JobTable()
    job = table.turn_arrived(KEY, "r1", 0.0, blocks=1)
    table.turn_ended(job, "r1", over=True)
    assert len(table) == 0

    reborn = table.turn_arrived(KEY, "r2", 50.0, blocks=1)
    assert (reborn.turns, reborn.started_at) == (1, 50.0)


def test_a_job_is_not_over_while_another_of_its_turns_runs() -> None:
    table = JobTable()
    job = table.turn_arrived(KEY, "r1", 0.0, blocks=1)
    table.turn_arrived(KEY, "r2", 1.0, blocks=1)
    assert job.running == {"r1", "r2"}

    table.turn_ended(job, "r1", over=True)
    assert len(table) == 1
    table.turn_ended(job, "r2", over=True)
    assert len(table) == 0


def test_a_turn_may_end_twice() -> None:
    table = JobTable()
    job = table.turn_arrived(KEY, "r1", 0.0, blocks=1)
    table.turn_ended(job, "r1", over=True)
    table.turn_ended(job, "r1", over=True)
    assert len(table) == 0


def test_the_least_recently_active_job_is_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "MAX_JOBS", 3)
    table = JobTable()
    for n in range(3):
        table.turn_arrived(JobKey("", f"job {n}"), f"r{n}", float(n), blocks=1)
    table.turn_arrived(JobKey("", "job 0"), "r3", 3.0, blocks=1)

    table.turn_arrived(JobKey("", "new"), "r4", 4.0, blocks=1)

    assert len(table) == 3
    assert table.turn_arrived(JobKey("", "job 0"), "r5", 5.0, blocks=1).turns == 3
    again = table.turn_arrived(JobKey("", "job 1"), "r6", 6.0, blocks=1)
    assert again.turns == 1, "it was forgotten"


def test_a_job_that_starts_again_is_the_youngest() -> None:
    table = JobTable()
    first = table.turn_arrived(JobKey("", "first"), "r1", 0.0, blocks=1)
    table.turn_arrived(JobKey("", "second"), "r2", 1.0, blocks=1)
    table.make_youngest(first, 2.0)
    oldest_first = sorted(table.after(0, 2), key=lambda job: job.started_at)
    assert [job.key.name for job in oldest_first] == ["second", "first"]


def test_a_lost_turn_does_not_count_as_running_forever() -> None:
    table = JobTable()
    job = table.turn_arrived(KEY, "r1", 0.0, blocks=1)
    table.turn_lost(job, "r1")
    assert not job.running
    assert len(table) == 1


def test_random_jobs_are_listed_in_order_of_arrival() -> None:
    table, chance, alive = JobTable(), random.Random(29), list[jobs.Job]()
    for at in range(2000):
        if alive and chance.random() < 0.45:
            over = alive.pop(chance.randrange(len(alive)))
            table.turn_ended(over, next(iter(over.running)), over=True)
        else:
            alive.append(table.turn_arrived(JobKey("", f"job {at}"), f"r{at}", 0.0, blocks=1))
        after, most = chance.randrange(at + 2), chance.randrange(1, 9)
        assert table.after(after, most) == [job for job in alive if job.number > after][:most]
    assert len(alive) > 100


# -- continued responses ----------------------------------------------------------------------


def test_a_response_continues_its_job_once() -> None:
    """A second request that follows the same response is a fork, which is another job."""
    responses = Responses()
    responses.answered(KEY, "resp_4f0c-1a2b3c4d")
    assert responses.take("other salt", "resp_4f0c") is None
    assert responses.take(KEY.salt, "resp_4f0c") == KEY
    assert responses.take(KEY.salt, "resp_4f0c") is None


def test_requests_of_other_endpoints_have_no_response() -> None:
    responses = Responses()
    responses.answered(KEY, "chatcmpl-4f0c-1a2b3c4d")
    assert len(responses) == 0


def test_the_oldest_responses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_JOBS", 3)
    responses = Responses()
    for number in range(10):
        responses.answered(KEY, f"resp_{number}-1a2b3c4d")
        assert len(responses) <= 3
    assert responses.take(KEY.salt, "resp_6") is None
    assert responses.take(KEY.salt, "resp_9") == KEY
