"""Steps in the trace: short lines in separate files, time-weighted means, and tracks for
Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import HEADER, counts, record, texts
from tiered_kv.trace import rotation
from tiered_kv.trace.rotation import files_of, steps_of
from tiered_kv.trace.steps.step_figures import COUNTS, Level, step_figures
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.steps.step_tracks import STEPS, StepReader, has_steps, step_events
from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.trace_writer import TraceWriter
from tiered_kv.trace.turn_record import MAX_BYTES

AT = 1.79e9

steps = st.builds(
    StepRecord,
    step=counts,
    at=st.floats(0, 1e11),
    replica=st.integers(0, 1000),
    **dict.fromkeys(COUNTS, counts),
    nbytes=st.dictionaries(texts, st.integers(0, 1 << 50), max_size=12),
    orders=st.dictionaries(texts, counts, max_size=12),
)


def step(number: int, at: float, **fields: Any) -> StepRecord:
    return StepRecord(step=number, at=AT + at, **fields)


@given(steps)
def test_any_step_fits_and_reads_as_it_was_written(one: StepRecord) -> None:
    line = one.to_line()
    assert len(line.encode("ascii")) < MAX_BYTES
    again = StepRecord.from_json(json.loads(line))
    assert again.to_line() == line
    plain: dict[str, Any] = {"nbytes": {}, "orders": {}, "at": 0.0}
    assert replace(again, **plain) == replace(one, **plain)
    assert again.at == pytest.approx(one.at, abs=1e-4)


def test_unknown_fields_of_later_versions_are_ignored_in_steps() -> None:
    found = json.loads(step(3, 0.0, running=2).to_line()) | {"weather": {"rain": [1]}}
    assert StepRecord.from_json(found) == step(3, 0.0, running=2)


def test_a_step_without_a_time_is_not_a_record() -> None:
    with pytest.raises(ValueError, match="missing fields: at"):
        StepRecord.from_json({"step": 1})


def test_steps_have_files_of_their_own_that_are_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = TraceWriter(path, HEADER)
    turns.write(record(1))
    turns.close()
    most = 2000
    file = TraceFile(steps_of(path), HEADER.to_line(), most)
    for number in range(1, 1001):
        file.append([step(number, number / 100, running=number % 7).to_line()])
    file.close()

    there = sorted(tmp_path.iterdir())
    of_steps = [one for one in files_of(steps_of(path)) if one.exists()]
    assert len(of_steps) == rotation.FILES
    assert there == sorted([path, *of_steps]), "no file more"
    assert all(one.stat().st_size <= most for one in of_steps)
    assert [one.request for one in TraceReader(path)] == ["r1"], "its readers see turns alone"

    reader = StepReader(path)
    numbers = [one.step for one in reader]
    assert numbers == list(range(numbers[0], 1001)), "the newest, without a gap"
    assert 1 < numbers[0] < 1000
    assert not reader.bad
    assert reader.headers[0] == HEADER


def test_a_trace_without_steps_has_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    TraceWriter(path, HEADER).close()
    assert not has_steps(path)
    TraceWriter(steps_of(path), HEADER).close()
    assert has_steps(path)


def test_a_step_counts_for_the_time_until_the_next_one() -> None:
    found = step_figures(
        [
            step(1, 0.0, running=10, free=4, prefill=100, nbytes={"cpu": 8}, orders={"save": 1}),
            step(2, 1.0, running=2, free=8, decode=2, nbytes={"cpu": 16}),
            step(3, 4.0, running=90, free=0, decode=1, nbytes={"cpu": 16, "ssd": 4}),
        ]
    )
    assert (found.steps, found.span_s) == (3, 4.0)
    assert (found.prefill_tokens, found.decode_tokens) == (100, 3)
    assert found.levels["running"] == Level(mean=(10 * 1 + 2 * 3) / 4, peak=90)
    assert found.levels["free"] == Level(mean=(4 * 1 + 8 * 3) / 4, peak=8)
    assert found.levels["nbytes.cpu"] == Level(mean=(8 * 1 + 16 * 3) / 4, peak=16)
    assert found.levels["nbytes.ssd"] == Level(mean=0.0, peak=4)
    assert found.levels["orders.save"] == Level(mean=0.25, peak=1)
    assert found.levels["waiting"] == Level(mean=0.0, peak=0)


def test_the_time_between_two_engines_counts_for_neither() -> None:
    first = [step(1, 0.0, running=1), step(2, 1.0, running=1)]
    second = [step(1, 1000.0, running=3), step(2, 1001.0)]
    found = step_figures([*first, *second])
    assert found.span_s == 2.0
    assert found.levels["running"].mean == 2.0


def test_replicas_are_distinguished() -> None:
    one = [step(1, 0.0, running=1), step(2, 2.0)]
    other = [step(5, 1.0, running=3, replica=1), step(6, 3.0, replica=1)]
    found = step_figures([one[0], other[0], one[1], other[1]])
    assert found.span_s == 4.0
    assert found.levels["running"] == Level(mean=2.0, peak=3)


def test_a_trace_without_steps_can_be_summed_up() -> None:
    assert step_figures([]).levels == {}
    assert step_figures([step(1, 0.0, running=3)]).levels["running"] == Level(0.0, 3)


def counters(records: Sequence[StepRecord]) -> list[tuple[int, str, float, dict[str, int]]]:
    return [
        (event["pid"], event["name"], event["ts"] / 1e6 - AT, event["args"])
        for event in step_events(records)
        if event["ph"] == "C"
    ]


def test_perfetto_draws_a_track_of_each_kind() -> None:
    found = counters(
        [
            step(1, 0.0, running=2, free=9, prefill=64, nbytes={"cpu": 8}, orders={"load": 1}),
            step(2, 0.5, running=1, waiting=3, replica=1),
        ]
    )
    first = {name: args for pid, name, at, args in found if pid == STEPS}
    assert first == {
        "requests": {"running": 2, "waiting": 0, "held": 0},
        "tokens of a step": {"prefill": 64, "decode": 0},
        "blocks": {"free": 9, "cached": 0, "pinned": 0},
        "bytes": {"cpu": 8},
        "orders": {"load": 1},
    }
    second = {name: (at, args) for pid, name, at, args in found if pid == STEPS + 1}
    assert second["requests"] == (0.5, {"running": 1, "waiting": 3, "held": 0})
    assert second["orders"][1] == {"load": 0}, "what is over goes down to 0"
    names = [
        event["args"]["name"]
        for event in step_events([step(1, 0.0), step(2, 1.0), step(1, 1.0, replica=1)])
        if event["ph"] == "M"
    ]
    assert names == ["steps of replica 0", "steps of replica 1"]


@given(st.lists(steps, max_size=5))
def test_any_steps_can_be_drawn_and_summed_up(some: list[StepRecord]) -> None:
    json.dumps(list(step_events(some)), allow_nan=False)
    found = step_figures(some)
    assert found.steps == len(some)
    assert all(level.mean <= level.peak * (1 + 1e-9) for level in found.levels.values())
