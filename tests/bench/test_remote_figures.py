"""Figures of bench.remote: what the scheduler's thread is timed with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tiered_kv.bench.remote import TimedRig
from tiered_kv.testing.valkey import ValkeyServer


def test_the_store_is_asked_for_each_request_and_answers(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server, closing(TimedRig(server.url, tmp_path)) as rig:
        times = [rig.ask(number) for number in range(3)]
    assert rig.lookups == 3
    assert all(0 < one.asked_ms < one.whole_ms for one in times)
