"""The growth of counters covers the last minute, and starts again from 0 when the server
restarts."""

from __future__ import annotations

from tests.top.made import NOW, engine
from tiered_kv.status import EngineStatus
from tiered_kv.top.server_state import Growth
from tiered_kv.top.watch import WINDOW_S, Flow


def at(seconds: float, turns: int) -> EngineStatus:
    return engine(now=NOW + seconds, counters={"turns": turns})


def test_the_growth_is_over_the_last_minute() -> None:
    flow = Flow()
    assert flow.add(at(0, 100)) is None
    assert flow.add(at(1, 103)) == Growth(1.0, {"turns": 3})
    for second in range(2, 200):
        grown = flow.add(at(second, 100 + 3 * second))
        assert grown == Growth(min(second, WINDOW_S), {"turns": 3 * min(second, int(WINDOW_S))})


def test_a_restarted_server_shows_no_negative_growth() -> None:
    flow = Flow()
    flow.add(at(0, 100))
    assert flow.add(at(5, 1)) is None
    assert flow.add(at(6, 4)) == Growth(1.0, {"turns": 3})


def test_a_stopped_clock_gives_no_growth() -> None:
    flow = Flow()
    flow.add(at(0, 1))
    assert flow.add(at(0, 2)) is None
