"""Answers of other server versions, or of other servers: each is read or reported as an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.top.made import server, shown
from tests.top.recorded import busy_rig, record
from tests.top.route_server import Answers
from tiered_kv.json_fields import JsonObject
from tiered_kv.status import Cursor, JobDecision, JobKv, JobPage, ServerStatus
from tiered_kv.top.route_client import RouteError, parse, read_answer

STATUS, JOBS = "/tiered_kv/status", "/tiered_kv/jobs?limit=1000&after=0.0"
MISSING = object()
ODD: tuple[Any, ...] = (None, -1, 10**30, 0.5, "\x1b[2J\u202e", [], {}, [{}])


@pytest.fixture
def answers(make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return record(monkeypatch, busy_rig(make_rig, tmp_path))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value. Only two of the many counters and gauges
    are included."""
    if path:
        yield path
    if isinstance(value, dict):
        names = list(value)[:2] if path and path[-1] in ("counters", "gauges") else list(value)
        for name in names:
            yield from places(value[name], (*path, name))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from places(one, (*path, at))


def odd_ones(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value in each of which one value is missing or replaced."""
    for path in places(value):
        for odd in (MISSING, *ODD):
            copy = found = deepcopy(value)
            for step in path[:-1]:
                found = found[step]
            if odd is MISSING:
                found.pop(path[-1])
            else:
                found[path[-1]] = odd
            yield copy


def check_sentence(error: RouteError) -> None:
    assert str(error).isprintable()
    assert "use the same version of tiered-kv as the server" in str(error)


def test_an_odd_answer_is_read_or_refused_and_never_shown_raw(answers: Answers) -> None:
    read, refused = 0, 0
    for said in odd_ones(parse(answers[STATUS].body)):
        try:
            status = read_answer(ServerStatus, said)
        except RouteError as error:
            check_sentence(error)
            refused += 1
            continue
        read += 1
        if status.engines:  # otherwise the client refuses it
            state = replace(server(), status=status)
            assert all(line.isprintable() for line in shown(state, 120, 40))
    for said in odd_ones(parse(answers[JOBS].body)):
        try:
            page = read_answer(JobPage, said)
        except RouteError as error:
            check_sentence(error)
            refused += 1
            continue
        read += 1
        assert all(line.isprintable() for line in shown(server(*page.jobs), 200, 24))
    assert read > 100
    assert refused > 1000


ENGINE, TIERS, JOB = ("engines", 0), ("engines", 0, "tiers"), ("jobs", 0)
NOT_SHOWN: dict[str, tuple[tuple[Any, ...], ...]] = {
    STATUS: (
        *((*ENGINE, name) for name in ("steps", "mode", "eviction", "admission", "gauges")),
        (*TIERS, 0, "block_tokens"),
        *((*TIERS, 1, name) for name in ("used_bytes", "compressed_share")),
        *((*TIERS, 2, name) for name in ("promoting_pages", "demoting_pages")),
        *((*ENGINE, "jobs", name) for name in ("begun", "held")),
        (*ENGINE, "queues", "orders_in_flight"),
        (*ENGINE, "decisions", "last"),
    ),
    JOBS: (
        *((name,) for name in ("now", "known")),
        *((*JOB, name) for name in ("salted", "began")),
        (*JOB, "decision", "ttl_s"),
    ),
}


@pytest.mark.parametrize(("path", "kind"), [(STATUS, ServerStatus), (JOBS, JobPage)])
def test_fields_that_are_not_shown_may_have_any_value(
    path: str, kind: type[ServerStatus | JobPage], answers: Answers
) -> None:
    def frame(said: object) -> list[str]:
        found = read_answer(kind, said)
        if isinstance(found, JobPage):
            return [*shown(server(*found.jobs), 200, 24), str(found.next)]
        return shown(replace(server(), status=found))

    said = parse(answers[path].body)
    usual = frame(said)
    for place in NOT_SHOWN[path]:
        for odd in (MISSING, *ODD):
            copy = found = deepcopy(said)
            for step in place[:-1]:
                found = found[step]
            del found[place[-1]]
            if odd is not MISSING:
                found[place[-1]] = odd
            assert frame(copy) == usual, (place, odd)


def test_fields_of_a_later_version_are_ignored(answers: Answers) -> None:
    for path, kind in ((STATUS, ServerStatus), (JOBS, JobPage)):
        said = parse(answers[path].body)
        more = deepcopy(said)
        for place in reversed(list(places(more))):
            found = more
            for step in place:
                found = found[step]
            if isinstance(found, dict) and place[-1] not in ("counters", "gauges", "transfers"):
                found["later"] = {"more": [1]}
        assert json.dumps(more) != json.dumps(said)
        assert read_answer(kind, more) == read_answer(kind, said)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '"a"', "[" * 10**5, "9" * 9000])
def test_an_invalid_answer_is_reported_in_one_sentence(text: str) -> None:
    kinds: tuple[type[JsonObject], ...] = (ServerStatus, JobPage)
    for kind in kinds:
        with pytest.raises(RouteError) as caught:
            read_answer(kind, parse(text))
        check_sentence(caught.value)


def test_the_message_names_the_field() -> None:
    kv = {"where": "vram", "pinned_blocks": 1, "until": None}
    for kind, said, words in (
        (JobKv, kv, "missing fields: back_at"),
        (JobKv, {**kv, "back_at": "soon"}, "back_at: 'soon' is not a number"),
        (JobDecision, {"tier": "pin", "ttl_s": 1.0}, "missing field: class"),
    ):
        with pytest.raises(RouteError) as caught:
            read_answer(kind, said)
        assert f"({words})" in str(caught.value)


def test_a_deeply_nested_answer_is_reported_in_one_sentence() -> None:
    """An answer that is nested too deeply for recursive Python code, but not for the JSON parser,
    is refused with one sentence."""
    for depth in (100, 300, 500, 900):
        said = {"version": json.loads("[" * depth + "]" * depth)}
        with pytest.raises(RouteError) as caught:
            read_answer(ServerStatus, said)
        check_sentence(caught.value)


def test_a_position_in_a_job_list_is_a_string() -> None:
    page = {"now": 1.0, "known": 0, "jobs": [], "next": "3.57"}
    assert JobPage.from_json(page).next == Cursor(3, 57)
    for wrong in ("3", "3.", "-1.2", "1.2.3", "٣.1", 3.57, ["3.57"]):
        with pytest.raises(ValueError, match="next"):
            JobPage.from_json({**page, "next": wrong})
