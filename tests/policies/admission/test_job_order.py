"""Requests are taken by their jobs: what is begun before what is new, the oldest first."""

from __future__ import annotations

import pytest

from tiered_kv.policies.admission.job_order import (
    Place,
    Room,
    fits,
    parked_rank,
    running_rank,
    waiting_rank,
)

OLD, YOUNG = Place(1.0, 9.0), Place(5.0, 6.0)


def test_jobs_that_have_started_are_let_in_before_new_ones() -> None:
    new, newer = Place(0.5, 2.0, new=True), Place(0.1, 3.0, new=True)
    assert sorted([newer, new, YOUNG, OLD], key=parked_rank) == [OLD, YOUNG, new, newer]


def test_those_that_hold_something_are_admitted_first() -> None:
    preempted, pinned = Place(8.0, 8.0, preempted=True), Place(7.0, 7.0, has_kv=True)
    order = sorted([OLD, YOUNG, pinned, preempted], key=waiting_rank)
    assert order == [preempted, pinned, OLD, YOUNG]


def test_the_victim_is_the_youngest_job_that_goes_on() -> None:
    last = Place(9.0, 9.0, is_last_step=True)
    assert max([OLD, last, YOUNG], key=running_rank) == YOUNG
    assert max([OLD, last], key=running_rank) == OLD


@pytest.mark.parametrize(
    ("cpu", "share", "peak", "anywhere", "has_room"),
    [
        (0, 1.0, 100, 500, True),
        (0, 1.0, 101, 101, False),
        (0, 0.5, 51, 51, False),
        (0, 1.25, 125, 125, True),
        (200, 1.0, 100, 200, True),
        (200, 1.0, 300, 200, True),  # CPU memory takes all of it
        (200, 1.0, 100, 201, False),
        (50, 1.0, 100, 100, True),  # CPU memory is the smaller one
        (50, 1.0, 100, 101, False),
        (200, 0.5, 300, 101, False),
        (200, 1.25, 300, 201, False),  # no more than there is
    ],
)
def test_what_fits(cpu: int, share: float, peak: float, anywhere: float, has_room: bool) -> None:
    assert fits(Room(vram=100, cpu=cpu, share=share), peak, anywhere) is has_room
