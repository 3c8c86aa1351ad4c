"""``bench.remote``: the plain byte stream that a store is compared with, and the times of
lookups."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from tiered_kv.bench.remote import PAGE_BYTES, TimedRig, stream, time_stream
from tiered_kv.testing.valkey import ValkeyServer


def test_the_stream_carries_pages_to_another_process_and_back() -> None:
    pages = list(np.random.default_rng(0).integers(0, 256, (3, PAGE_BYTES), dtype=np.uint8))
    slots = [np.zeros_like(page) for page in pages]
    with stream() as connection:
        for _ in range(2):
            assert all(seconds > 0 for seconds in time_stream(connection, pages, slots))
    assert np.array_equal(slots, pages)


def test_the_store_is_asked_for_each_request_and_answers(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server, closing(TimedRig(server.url, tmp_path)) as rig:
        times = [rig.ask(number) for number in range(3)]
    assert rig.lookups == 3
    assert all(0 < asked_ms < whole_ms for asked_ms, whole_ms in times)
