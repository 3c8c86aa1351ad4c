"""Faults of a store, and turns of a job on one replica or on any."""

from __future__ import annotations

import socket
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.bench.cluster import __main__ as cluster
from tiered_kv.bench.cluster.faults import FAULTS, Proxy, Store
from tiered_kv.testing.valkey import ValkeyServer

VALUE = b"x" * 2_000
SET = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$2000\r\n%s\r\n" % VALUE
QUIT = b"*1\r\n$4\r\nQUIT\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"


def answered(port: int, *requests: bytes) -> bytes:
    """Answers to requests that are sent together, until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b"".join(requests) + QUIT)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).removesuffix(b"+OK\r\n")


def test_each_fault_shows_and_is_mended(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server, Proxy(server.port) as proxy:
        store = Store(server=server, proxy=proxy)
        expected = b"+OK\r\n$2000\r\n" + VALUE + b"\r\n"
        seen = {}
        for name in ("flipping", "slow", "full", "restarted empty"):
            assert answered(proxy.port, SET, GET) == expected
            FAULTS[name](store)
            requests = [GET] if name == "restarted empty" else [SET, GET]
            seen[name] = answered(proxy.port, *requests)
            store.mend()
        FAULTS["killed"](store)
        with pytest.raises(OSError, match=r"\S"):
            server.talk(b"PING")
        store.mend()
        assert answered(proxy.port, SET, GET) == expected
    assert seen["flipping"].count(b"x") == len(VALUE) - 1
    assert seen["slow"] == expected
    assert seen["full"].startswith(b"-OOM")
    assert seen["restarted empty"] == b"$-1\r\n"


def test_jobs_stay_on_a_replica_or_move_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = defaultdict[str, list[tuple[str, int]]](list)

    def ask(client: str, job: str, prompt: list[int], answer: int) -> None:
        turns[job].append((client, len(prompt)))

    texts = [[at] * cluster.PLACED_TOKENS for at in range(100)]
    monkeypatch.setattr(cluster, "texts", lambda client, count, tokens: texts[:count])
    monkeypatch.setattr(cluster, "ask", ask)
    monkeypatch.setattr(cluster, "GAP_S", 0.0)
    servers: list[Any] = [SimpleNamespace(client=name) for name in ("first", "second")]

    found = cluster.place(servers, 2, 0, lambda what: None)

    assert len(turns) == 2 * 2 * cluster.PLACED_JOBS
    assert len(found["rounds"]) == 2
    for job, asked in turns.items():
        assert [length for _, length in asked] == [1_050, 1_200, 1_350, 1_500]
        assert job.startswith("random") or len({client for client, _ in asked}) == 1
    moved = [job for job, asked in turns.items() if len({client for client, _ in asked}) > 1]
    assert len(moved) > cluster.PLACED_JOBS
