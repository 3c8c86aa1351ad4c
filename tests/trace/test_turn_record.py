"""A record is a short line whatever a client sends, and is read back with the same meaning."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import HEADER, record, records, texts
from tiered_kv.json_fields import cut, size
from tiered_kv.trace.trace_header import SCHEMA, TraceHeader
from tiered_kv.trace.turn_record import (
    MAX_BYTES,
    GapStory,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
)


def read(line: str) -> TurnRecord:
    return TurnRecord.from_json(json.loads(line))


@given(records)
def test_any_record_fits_and_reads_as_it_was_written(one: TurnRecord) -> None:
    line = one.to_line()
    assert len(line.encode("ascii")) < MAX_BYTES
    assert "\n" not in line
    again = read(line)
    assert again.to_line() == line, "what was cut and rounded once stays so"
    assert (again.turn, again.tokens, again.gap.end) == (one.turn, one.tokens, one.gap.end)
    assert again.pin.end == one.pin.end
    assert again.times.end_s == pytest.approx(one.times.end_s, rel=1e-4, abs=1e-6)
    assert again.arrived == pytest.approx(one.arrived, abs=1e-3)
    assert (again.times.admitted_s is None) == (one.times.admitted_s is None)


def test_a_usual_record_is_written_in_full() -> None:
    one = record(
        7,
        job="0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11",
        request="chatcmpl-0199c7a45b7e7d31a7c23f1f0c6d2b11-0-0123abcd",
        finish="FINISHED_STOPPED",
        tool=("bash", "pytest <path>", "pytest -x <path>"),
        times=TurnTimes(0.5, 0.25, 0.75, 0.75, 1.5, 9.125),
        decision=PricedDecision("pin", "fast", 60.0, 0.5, 4.5, 7.0, 0.5, 0.25, 0.547, 0.002),
        pin=PinStory(128, 3.25, PinEnd.RETURNED),
        gap=GapStory(StoryEnd.RETURNED, 3.25, True, 0.5, 0.125),
    )
    assert read(one.to_line()) == one


@given(texts, texts)
def test_distinct_strings_are_distinct_after_truncation(one: str, other: str) -> None:
    assert size(cut(one, 32)) <= 32
    assert cut(cut(one, 32), 32) == cut(one, 32)
    assert (cut(one, 32) == cut(other, 32)) == (one == other)


@given(st.text(max_size=512), records)
def test_a_job_has_one_name_in_all_its_records(job: str, other: TurnRecord) -> None:
    few, many = record(job=job), replace(other, job=job)
    assert read(few.to_line()).job == read(many.to_line()).job


def test_a_time_that_never_came_differs_from_time_zero() -> None:
    never, at_once = record(), record(times=TurnTimes(admitted_s=0.0))
    assert read(never.to_line()).times.admitted_s is None
    assert read(at_once.to_line()).times.admitted_s == 0.0


def test_invalid_numbers_are_left_out() -> None:
    odd = record(decision=PricedDecision("cpu", benefit_s=float("nan"), q90_s=float("inf")))
    assert read(odd.to_line()).decision == PricedDecision("cpu")


def test_fields_of_later_versions_are_ignored() -> None:
    found = json.loads(record().to_line())
    found |= {"weather": {"rain": [1]}, "tokens": {"prompt": 5, "imagined": 3}}
    assert TurnRecord.from_json(found).tokens.prompt == 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "a list is not an object"),
        ("{}", "missing fields: turn, request, arrived"),
        ('{"turn": 1, "request": "r"}', "missing fields: arrived"),
        ('{"turn": "1"}', "turn: '1' is not a whole number"),
        ('{"turn": true}', "turn: True is not a whole number"),
        ('{"arrived": NaN}', "arrived: nan is above"),
        ('{"arrived": 1' + "0" * 400 + "}", "arrived: 1000.* is above"),
        ('{"turn": 1' + "0" * 30 + "}", "turn: 1000.* is above"),
        ('{"job": 3}', "job: 3 is not a string"),
        ('{"tool": "ls"}', "tool: 'ls' is not a list"),
        ('{"gap": {"in_vram": 1}}', "gap: in_vram: 1 is neither true nor false"),
        ('{"gap": {"end": "lost"}}', "gap: end: 'lost' is not one of returned, over"),
        ('{"decision": {"tiers_s": 3}}', "decision: tiers_s: 3 is not an object"),
    ],
)
def test_an_invalid_record_is_refused_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(line)


@given(texts, texts, st.dictionaries(texts, st.integers(0, 2**63 - 1), max_size=9))
def test_a_header_fits_and_reads_as_it_was_written(
    model: str, policy: str, tiers: dict[str, int]
) -> None:
    one = replace(
        HEADER,
        version=model,
        model=model,
        policy=policy,
        tiers_bytes=tiers,
        page_bytes=2**50,
        groups=("window",) * 20,
        job_order=True,
        admission="auto",
        eviction=policy,
    )
    line = one.to_line()
    assert len(line) < MAX_BYTES
    found = json.loads(line)
    assert found["schema"] == SCHEMA
    assert TraceHeader.from_json(found).to_line() == line


def test_a_usual_header_is_written_in_full() -> None:
    assert TraceHeader.from_json(json.loads(HEADER.to_line())) == HEADER
