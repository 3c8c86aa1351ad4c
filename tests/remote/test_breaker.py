"""A failing server is not called for a while, and then tried again."""

from __future__ import annotations

from tiered_kv.remote.address import server_of
from tiered_kv.remote.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_COMPLAINTS,
    PATIENCE_S,
    REMINDER_S,
    Breaker,
    Complaint,
    Patience,
)


def test_pauses_grow_until_a_call_works() -> None:
    breaker, now, pauses = Breaker(), 100.0, list[float]()
    for _ in range(9):
        assert breaker.lets_through(now)
        breaker.failed(now)
        began = now
        while not breaker.lets_through(now):
            now += 0.25
        pauses.append(now - began)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    breaker.worked()
    assert breaker.lets_through(now)
    breaker.failed(now)
    assert breaker.lets_through(now + FIRST_PAUSE_S)


def test_a_store_is_waited_for_until_patience_runs_out() -> None:
    patience = Patience()
    assert patience.lasts(100.0)
    assert patience.lasts(100.0 + 0.9 * PATIENCE_S)
    assert not patience.lasts(100.0 + PATIENCE_S)
    assert not patience.lasts(1000.0), "a store that is down is not waited for again"
    patience.renew()
    assert patience.lasts(1000.0)


def test_lasting_or_recurring_failures_are_logged_once() -> None:
    complaint, now = Complaint(), 100.0
    assert not complaint.ends(), "there was none"
    assert complaint.begins("full", now)
    assert not complaint.begins("full", now + 1)
    assert complaint.begins("read-only", now + 2), "another one"
    assert complaint.ends()
    assert not complaint.ends()
    for second in range(100):
        assert not complaint.begins("full", now + 3 + second)
        assert not complaint.ends()
    assert complaint.begins("full", now + REMINDER_S)
    said = [complaint.begins(f"error {number}", now + REMINDER_S) for number in range(99)]
    assert said == [True] * (MOST_COMPLAINTS - 2) + [False] * (99 - MOST_COMPLAINTS + 2)


def test_a_removed_server_moves_only_its_own_runs() -> None:
    servers = [b"a:1", b"b:1", b"c:1"]
    runs = [b"run %d" % number for number in range(900)]
    before = [servers[server_of(run, servers)] for run in runs]
    assert all(200 < before.count(one) < 400 for one in servers), "about a third each"
    left = [b"a:1", b"c:1"]
    for run, server in zip(runs, before, strict=True):
        if server != b"b:1":
            assert left[server_of(run, left)] == server
    assert server_of(b"run", [b"a:1"]) == 0
