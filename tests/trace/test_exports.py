"""Exports of a trace for Perfetto and in the format of Continuum's recorder."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import record, records
from tiered_kv.trace.perfetto import JOBS, perfetto_events
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.turn_record import (
    GapStory,
    PinEnd,
    PinStory,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)

AT = 1e9


def turn(number: int, at: float, **fields: Any) -> TurnRecord:
    """Return a turn of 4 s that is followed by a gap of 6 s. Its KV is pinned for the first 2 s of
    the gap."""
    usual: dict[str, Any] = {
        "turn": number,
        "request": f"r{number}",
        "arrived": AT + at,
        "tool": ("bash", "ls"),
        "times": TurnTimes(0, 0, 0.5, 1.0, 2.0, 4.0),
        "tokens": TurnTokens(100, 40, 20, 10, 30, 0, 50, 7),
        "pin": PinStory(8, 2.0, PinEnd.EXPIRED),
        "gap": GapStory(StoryEnd.RETURNED, 6.0),
    }
    return record(**{**usual, **fields})


def slices(*turns: TurnRecord) -> list[dict[str, Any]]:
    return [dict(event) for event in perfetto_events(turns) if event["ph"] == "X"]


def test_a_turn_and_its_gap_are_slices_of_its_jobs_track() -> None:
    found = [(one["name"], one["ts"] / 1e6 - AT, one["dur"] / 1e6) for one in slices(turn(1, 0.0))]
    assert found == [
        ("turn 1", 0.0, 4.0),
        ("waiting", 0.0, 0.5),
        ("restoring", 0.5, 0.5),
        ("prompt", 1.0, 1.0),
        ("answer", 2.0, 2.0),
        ("ls", 4.0, 6.0),
        ("pinned", 4.0, 2.0),
    ]


def test_each_job_has_a_track_and_another_one_for_concurrent_turns() -> None:
    turns = [
        turn(1, 0.0),
        turn(2, 10.0),
        turn(3, 11.0),
        turn(1, 0.0, job="other"),
        turn(1, 0.0, job="j", client="of another"),
    ]
    names = [
        event["args"]["name"]
        for event in perfetto_events(turns)
        if event["ph"] == "M" and "tid" in event
    ]
    assert Counter(names) == {"j": 3, "other": 1}
    tracks = [one["tid"] for one in slices(*turns[:3]) if one["name"].startswith("turn")]
    assert tracks[0] == tracks[1] != tracks[2]


def test_each_tier_has_a_counter_track() -> None:
    last: dict[str, Any] = {}
    most = 0
    for event in perfetto_events([turn(1, 0.0), turn(2, 10.0), turn(1, 4.5, job="other")]):
        if event["ph"] == "C":
            last[event["name"]] = event["args"]
            most = max(most, event["args"].get("blocks", 0))
    assert last == {
        "VRAM": {"tokens": 120},
        "CPU memory": {"tokens": 60},
        "SSD": {"tokens": 30},
        "computed": {"tokens": 90},
        "pinned blocks": {"blocks": 0},
    }
    assert most == 8, "the pins were held one after the other"


@given(st.lists(records, max_size=6))
def test_any_trace_can_be_exported(turns: list[TurnRecord]) -> None:
    found = Counter(one["name"].startswith("turn ") for one in slices(*turns))
    assert found[True] >= len(turns)
    assert all(event["pid"] != JOBS or "tid" in event for event in slices(*turns))
    jobs = recorder_events(turns)
    arrivals = sum("Request_arrival_time" in event for job in jobs.values() for event in job)
    assert arrivals == sum(one.job is not None for one in turns)


def test_exported_events_have_the_recorders_order_and_names() -> None:
    found = recorder_events([turn(2, 10.0), turn(1, 0.0), turn(1, 0.0, job=None)])
    assert list(found) == ["j"]
    assert found["j"][:5] == [
        {"Request_arrival_time": AT},
        {"waiting_to_running": AT + 0.5, "prompt_length": 100, "hit_length": 70},
        {"Request_departure_time": AT + 4},
        {"pinned_time": AT + 4},
        {"unpinned_time": AT + 6},
    ]
    assert found["j"][5] == {"Request_arrival_time": AT + 10}
