"""A tier that other engines write to is not queried for a while after repeated late answers, or
after a damaged page."""

from __future__ import annotations

from tiered_kv.connectors.runtime.lower_tiers.demotion import (
    FIRST_DOUBT_S,
    LONGEST_DOUBT_S,
    ONE_STALL_S,
    Doubt,
)


def test_one_stall_of_the_machine_does_not_suspend_queries() -> None:
    doubt = Doubt()
    for late_s in (0.0, 0.01, ONE_STALL_S / 2):  # turns that waited concurrently
        doubt.late(100.0 + late_s)
    assert not doubt.rules(101.0)
    doubt.worked()
    doubt.late(200.0)
    assert not doubt.rules(200.0)


def test_a_tier_that_is_late_again_is_doubted_and_longer_each_time() -> None:
    doubt, now, doubted = Doubt(), 100.0, list[float]()
    doubt.late(now)
    now += ONE_STALL_S
    for _ in range(7):
        doubt.late(now)
        began = now
        while doubt.rules(now):
            now += 0.25
        doubted.append(now - began)
    assert doubted[:3] == [FIRST_DOUBT_S, 2 * FIRST_DOUBT_S, 4 * FIRST_DOUBT_S]
    assert doubted[-1] == LONGEST_DOUBT_S
    doubt.worked()
    doubt.late(now)
    assert not doubt.rules(now), "it starts over"


def test_damaged_pages_are_an_immediate_reason() -> None:
    doubt = Doubt()
    doubt.failed(100.0)
    doubt.failed(100.1)  # reported by turns that waited concurrently
    assert doubt.rules(100.0 + FIRST_DOUBT_S / 2)
    assert not doubt.rules(100.0 + FIRST_DOUBT_S)
