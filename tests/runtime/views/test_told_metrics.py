"""An engine's metrics match what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.between_turns.waiting import CONTEXT, FAST, JOB, LONG, reader, waiting_rig
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.vllm.stats import TieredStats
from tiered_kv.metrics import COUNTERS, GAUGES, HISTOGRAMS, decision_event
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


@pytest.fixture
def told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything that the engine reports from now on: sums of counters, all observations, and the
    latest gauges."""
    return listen(rig, monkeypatch)


def listen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    heard, take = TieredStats({}), rig.half.stats.take

    def hear() -> dict[str, Any]:
        taken: dict[str, Any] = take()
        heard.aggregate(TieredStats(taken))
        return taken

    monkeypatch.setattr(rig.half.stats, "take", hear)
    data: dict[str, Any] = heard.data
    return data


def counted(rig: Rig, begin: str) -> dict[str, float]:
    """Return the nonzero counters whose names start with ``begin``."""
    totals = rig.half.stats.totals()
    return {name: count for name, count in totals.items() if name.startswith(begin) and count}


def read(rig: Rig, request: str, tool: object) -> None:
    reader(rig).says(request, tool)  # type: ignore[arg-type]
    rig.step()
    rig.wait_for_worker()
    rig.step()


def test_everything_reported_has_a_name(rig: Rig, told: dict[str, Any]) -> None:
    assert rig.half.stats.take().keys() == GAUGES.keys(), "the gauges of an engine that has begun"
    rig.ask("t1", CONTEXT, params=JOB)
    rig.wait_for_worker()
    rig.step()
    assert told.keys() >= GAUGES.keys() | {"turns", "pages_saved", "save_seconds"}
    assert told.keys() <= COUNTERS.keys() | GAUGES.keys() | HISTOGRAMS.keys()
    rig.half.stats.take()
    assert rig.half.stats.take() == {}, "nothing happened since"


def test_each_gap_has_one_final_decision(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    assert not counted(rig, "decided"), "the tool call is not read yet"
    read(rig, "t1", LONG)
    assert counted(rig, "decided") == {decision_event("store", "slow"): 1}
    rig.ask("t2", CONTEXT + expected(CONTEXT, 4) + text(40, seed=2), params=JOB)
    rig.ask("t3", CONTEXT, params={**JOB, "is_last_step": True})
    assert counted(rig, "decided") == {
        decision_event("store", "slow"): 1,
        decision_event("pin", "fast"): 1,
    }, "a gap that ends before its tool call is read; a last turn has none"


def test_pins_are_counted_by_how_they_ended(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    read(rig, "t1", FAST)
    rig.ask("t2", CONTEXT + expected(CONTEXT, 4) + text(40, seed=2), params=JOB)
    read(rig, "t2", LONG)
    rig.ask("late", text(100, seed=3), params={"job_id": "late"})
    rig.now += 60.0
    rig.step()
    rig.ask("last", text(100, seed=4), params={"job_id": "closed"})
    rig.close()
    ended = {"returned": 1, "revised": 1, "expired": 1, "closed": 1}
    assert counted(rig, "pins_ended") == {f"pins_ended_{end}": n for end, n in ended.items()}
    assert rig.count("pins") == 4


def test_a_gap_is_measured_by_its_forecast(rig: Rig, told: dict[str, Any]) -> None:
    """The forecast is uniform over a hundred seconds, so a gap of 25 seconds is half the median."""
    rig.ask("t1", CONTEXT, params=JOB)
    read(rig, "t1", FAST)
    rig.now += 25.0
    rig.ask("t2", CONTEXT + expected(CONTEXT, 4), params=JOB)
    assert told["gap_over_median"] == [pytest.approx(0.5, rel=0.1)]
    assert told["gap_over_p90"] == [pytest.approx(25 / 90, rel=0.1)]
    rig.close()
    rig.half.stats.take()
    assert len(told["gap_over_median"]) == 1, "the last gap ended with nobody's return"


def test_moved_pages_bytes_and_seconds_are_counted(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    read(rig, "t1", LONG)
    page = rig.half.facts.slot_bytes
    for pages, nbytes, seconds in (
        ("pages_saved", "bytes_saved", "save_seconds"),
        ("pages_demoted", "bytes_demoted", "demotion_seconds"),
    ):
        assert rig.count(pages) == 21
        assert rig.count(nbytes) == 21 * page
        assert rig.half.counters.totals[seconds] > 0
    gauges = rig.half.stats.gauges()
    assert gauges["cpu_bytes"] == gauges["cpu_bytes_whole"] == 21 * page
    assert gauges["ssd_bytes_whole"] == 21 * page
    assert gauges["ssd_bytes"] > 0
    assert (gauges["cpu_bytes_most"], gauges["ssd_bytes_most"]) == (200 * page, 1 << 30)


def test_waits_for_space_are_recorded_with_the_waiting_turns(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    told = listen(rig, monkeypatch)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    assert rig.half.stats.gauges()["jobs_waiting_for_room"] == 1
    rig.now += 7.0
    rig.run()
    assert told["hold_seconds"] == [pytest.approx(7.0, abs=1.0)], "of one of four"
    assert told["jobs_held"] == 1
    assert told["jobs_waiting_for_room"] == 0
