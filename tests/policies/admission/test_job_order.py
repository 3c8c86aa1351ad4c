"""Requests are admitted by job: started jobs before new ones, the oldest first."""

from __future__ import annotations

from tiered_kv.policies.admission.job_order import (
    QueuePosition,
    parked_rank,
    running_rank,
    waiting_rank,
)

OLD, YOUNG = QueuePosition(1.0, 9.0), QueuePosition(5.0, 6.0)


def test_started_jobs_are_admitted_before_new_ones() -> None:
    new, newer = QueuePosition(0.5, 2.0, new=True), QueuePosition(0.1, 3.0, new=True)
    assert sorted([newer, new, YOUNG, OLD], key=parked_rank) == [OLD, YOUNG, new, newer]


def test_jobs_that_hold_blocks_are_admitted_first() -> None:
    preempted, pinned = (
        QueuePosition(8.0, 8.0, preempted=True),
        QueuePosition(7.0, 7.0, has_kv=True),
    )
    order = sorted([OLD, YOUNG, pinned, preempted], key=waiting_rank)
    assert order == [preempted, pinned, OLD, YOUNG]


def test_the_victim_is_the_youngest_job_that_continues() -> None:
    last = QueuePosition(9.0, 9.0, is_last_step=True)
    assert max([OLD, last, YOUNG], key=running_rank) == YOUNG
    assert max([OLD, last], key=running_rank) == OLD


def test_if_seats_are_short_age_gives_a_bounded_precedence() -> None:
    waits, old, pinned = (
        QueuePosition(50.0, 100.0),
        QueuePosition(1.0, 109.0),
        QueuePosition(60.0, 108.0, has_kv=True),
    )
    late, preempted = QueuePosition(1.0, 170.0), QueuePosition(80.0, 80.0, preempted=True)
    overdue = QueuePosition(90.0, 90.0, overdue=True)
    crowd = [late, waits, old, pinned, overdue, preempted]
    order = sorted(crowd, key=lambda one: waiting_rank(one, seniority_s=60.0))
    assert order == [preempted, overdue, pinned, old, waits, late]
