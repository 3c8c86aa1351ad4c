"""A turn waits for a valuable pin if another request will free blocks."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.pins.pressure import (
    SAVES_PATIENCE_S,
    needs_one_more,
    waiter_started_at,
    worth_waiting_for_saves,
)
from tiered_kv.orders import RestoreMode

STARTED_AT = 7.0


@pytest.mark.parametrize(
    ("preempted", "somebody_runs", "in_job_order", "new", "waits"),
    [
        (False, True, True, False, True),
        (False, True, False, False, False),  # an older job may be queued behind it
        (False, True, False, True, True),
        (True, True, True, True, False),  # a preempted request precedes all others
        (False, False, True, True, False),  # no other request would free blocks
    ],
    ids=["in job order", "in any other", "a new job", "preempted", "nothing runs"],
)
def test_which_turns_wait(
    preempted: bool, somebody_runs: bool, in_job_order: bool, new: bool, waits: bool
) -> None:
    found = waiter_started_at(
        STARTED_AT,
        goes_first=preempted,
        somebody_runs=somebody_runs,
        in_job_order=in_job_order,
        new=new,
    )
    assert found == (STARTED_AT if waits else None)


def test_a_dead_worker_is_not_awaited() -> None:
    assert worth_waiting_for_saves(SAVES_PATIENCE_S / 2)
    assert not worth_waiting_for_saves(SAVES_PATIENCE_S)


def test_pins_are_released_one_by_one_for_an_async_restore_refused_despite_free_blocks() -> None:
    assert needs_one_more(RestoreMode.ASYNC, refused=True, released=0)
    assert not needs_one_more(RestoreMode.ASYNC, refused=True, released=2), "it may do now"
    assert not needs_one_more(RestoreMode.ASYNC, refused=False, released=0)
    assert not needs_one_more(RestoreMode.SYNC, refused=True, released=0)
    assert not needs_one_more(None, refused=True, released=0)


def test_pins_are_released_one_by_one_if_nothing_runs_and_windows_need_more_than_reported() -> None:
    assert needs_one_more(None, refused=True, released=0, stuck=True)
    assert not needs_one_more(None, refused=True, released=1, stuck=True)
    assert not needs_one_more(None, refused=False, released=0, stuck=True)
