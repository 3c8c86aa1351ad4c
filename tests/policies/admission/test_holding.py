"""A turn is held back for a bounded time, and only while another turn can free space."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.admission.gate import (
    LOOK_EVERY_S,
    Room,
    fits,
    gives_too_little,
    is_settled,
    may_wait,
    overflow,
)

ROOM = Room(vram=100, cpu=200)
blocks = st.floats(0, 1000)


@pytest.mark.parametrize(
    ("waited_s", "idle", "waits"),
    [(0.0, False, True), (59.9, False, True), (60.0, False, False), (0.0, True, False)],
    ids=["came now", "patient", "for as long as it may", "nothing else runs"],
)
def test_how_long_a_turn_waits(waited_s: float, idle: bool, waits: bool) -> None:
    assert may_wait(waited_s, 60.0, idle=idle) is waits


def test_a_held_turn_is_reconsidered_after_a_change_or_an_interval() -> None:
    assert is_settled(0.0, changed=False)
    assert not is_settled(0.0, changed=True)
    assert not is_settled(LOOK_EVERY_S, changed=False)


@pytest.mark.parametrize(
    ("cpu", "share", "peak", "anywhere", "has_room"),
    [
        (0, 1.0, 100, 500, True),
        (0, 1.0, 101, 101, False),
        (0, 0.5, 51, 51, False),
        (0, 1.25, 125, 125, True),
        (200, 1.0, 100, 200, True),
        (200, 1.0, 300, 200, True),  # the whole context fits into CPU memory
        (200, 1.0, 100, 201, False),
        (50, 1.0, 100, 100, True),  # CPU memory is smaller than VRAM
        (50, 1.0, 100, 101, False),
        (200, 0.5, 300, 101, False),
        (200, 1.25, 300, 201, False),  # no more than the existing memory
    ],
)
def test_what_fits(cpu: int, share: float, peak: float, anywhere: float, has_room: bool) -> None:
    assert fits(Room(vram=100, cpu=cpu, share=share), peak, anywhere) is has_room


def test_contexts_that_fit_into_a_tier_below_hold_no_job_back() -> None:
    room = Room(vram=100, cpu=200, below=1000.0, share=0.5)
    assert fits(room, 300, 1000)
    assert not fits(room, 300, 1001), "that tier is also full"


@given(st.integers(1, 1000), st.integers(0, 1000), blocks, blocks, blocks)
def test_a_job_fits_wherever_a_larger_one_fits(
    vram: int, cpu: int, peak: float, more: float, elsewhere: float
) -> None:
    room = Room(vram, cpu)
    if fits(room, peak + more, peak + elsewhere + more):
        assert fits(room, peak, peak + elsewhere)
        # Without CPU memory, contexts of waiting jobs are not counted, since nothing keeps them.
        larger = Room(vram + 1, cpu + (cpu > 0))
        assert fits(larger, peak + more, peak + elsewhere + more)


def test_too_little_is_admitted_if_blocks_stay_free_while_a_job_is_held() -> None:
    assert not gives_too_little(free=20, need=10.0, loose=0.0)
    assert gives_too_little(free=21, need=10.0, loose=0.0)
    assert not gives_too_little(free=21, need=10.0, loose=1.0), "a job that is away comes back"


@given(st.integers(1, 1000), st.integers(0, 1000), blocks, blocks)
def test_a_job_that_does_not_fit_has_an_overflow(
    vram: int, cpu: int, peak: float, elsewhere: float
) -> None:
    room, anywhere = Room(vram, cpu), peak + elsewhere
    if not fits(room, peak, anywhere):
        assert overflow(room, peak, anywhere) > 0
    if not overflow(room, peak, anywhere):
        assert fits(room, peak, anywhere)
