"""Answers are read without trusting them: they are readings, or no answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiered_kv.top.fetch.answers import (
    MOST_CHARS,
    AnswerError,
    Cursor,
    harmless,
    read_jobs,
    read_refusal,
    read_status,
)

JOB: dict[str, Any] = {
    "id": "j",
    "engine": 0,
    "number": 1,
    "turn": 1,
    "state": "silent",
    "since": None,
    "context_tokens": 0,
    "kv": {"where": "nowhere", "pinned_blocks": 0, "until": None, "back_at": None},
    "forecast": None,
    "decision": None,
}


def page(**changes: Any) -> str:
    return json.dumps({"now": 1.0, "known": 1, "jobs": [{**JOB, **changes}], "next": None})


def test_a_page_is_read() -> None:
    (job,) = read_jobs(page(id="\x1b[2J")).jobs
    assert (job.name, job.expected_at, job.kind) == ("\\x1b[2J", None, None)
    said = {**json.loads(page()), "next": "3.57"}
    assert read_jobs(json.dumps(said)).next == Cursor(3, 57)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 7},
        {"number": "1"},
        {"number": 10**30},
        {"since": "now"},
        {"since": float("nan")},
        {"state": "flying"},
        {"kv": None},
        {"kv": {**JOB["kv"], "where": "moon"}},
        {"forecast": {"q50_s": 1.0}},
        {"decision": {"tier": 3}},
    ],
)
def test_what_is_no_job_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AnswerError):
        read_jobs(page(**changes))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"jobs": {}}', '{"jobs": [], "known": 1, "next": 3}', "9" * 9000],
)
def test_what_is_no_answer_is_refused(text: str) -> None:
    for read in (read_jobs, read_status):
        with pytest.raises(AnswerError):
            read(text)
    assert read_refusal(text) == ""


def test_texts_are_shown_and_do_nothing() -> None:
    assert harmless("ticket-4711 / ü 日本 🎉") == "ticket-4711 / ü 日本 🎉"
    assert harmless("\x00\x1b\x7f\x9b\n") == "\\x00\\x1b\\x7f\\x9b\\x0a"
    assert harmless("\u202ea\u05d0\u0300\u200b") == "\\u202ea\\u05d0\\u0300\\u200b"
    assert harmless("\ud800\U000e0001") == "\\ud800\\U000e0001"
    assert harmless("x" * MOST_CHARS) == "x" * MOST_CHARS
    assert harmless("\x1b" * 10**6) == "\\x1b" * MOST_CHARS + "…"
