"""Injected store faults, and the placement of a job's turns on one replica or several."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.cluster import __main__ as cluster
from tiered_kv.bench.cluster.failover import changing
from tiered_kv.bench.cluster.faults import FAULTS, Store, proxied
from tiered_kv.bench.restore import logprob_distance
from tiered_kv.remote.address import parse_address
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.testing.conformance.remote import put_all, read_all, some_keys
from tiered_kv.testing.valkey import ValkeyCluster, ValkeyServer

VALUE = b"x" * 2_000
SET = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$2000\r\n%s\r\n" % VALUE
QUIT = b"*1\r\n$4\r\nQUIT\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"


def answered(port: int, *requests: bytes) -> bytes:
    """Send all requests in one piece, and return the answers received until the connection is
    closed."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b"".join(requests) + QUIT)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).removesuffix(b"+OK\r\n")


def test_each_fault_takes_effect_and_is_repaired(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server, proxied(server.port) as proxy:
        store = Store(server, proxy)
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


def test_a_cluster_fails_over_while_its_slots_move(tmp_path: Path) -> None:
    with ValkeyCluster(tmp_path) as servers:
        store, names = ValkeyStore(parse_address(servers.url())), some_keys(100)
        put_all(store, names, [key.name for key in names])
        servers.wait(servers.replicated)
        lost = servers.nodes[0]
        with changing(servers, lost) as changes:
            lost.kill()
            servers.wait(lambda: changes.promoted_at is not None)
            before = changes.moved
            servers.wait(lambda: changes.moved > before)
        servers.wait(servers.works)
        until, right = time.monotonic() + 60.0, {at: key.name for at, key in enumerate(names)}
        while read_all(store, names) != right:
            assert time.monotonic() < until
        store.close()


@dataclass
class Recorded:
    """A replica that records the turns it receives."""

    client: str
    turns: dict[str, list[tuple[str, int]]]

    def ask(self, job: str, prompt: list[int], _tokens: int) -> None:
        self.turns[job].append((self.client, len(prompt)))


def test_jobs_stay_on_a_replica_or_move_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = defaultdict[str, list[tuple[str, int]]](list)
    texts = [[at] * cluster.PLACED_TOKENS for at in range(100)]
    monkeypatch.setattr(cluster, "texts", lambda client, count, tokens: texts[:count])
    monkeypatch.setattr(cluster, "GAP_S", 0.0)
    servers: list[Any] = [Recorded(name, turns) for name in ("first", "second")]

    found = cluster.place(servers, 2, 0, lambda what: None)

    assert len(turns) == 2 * 2 * cluster.PLACED_JOBS
    assert len(found["rounds"]) == 2
    for job, asked in turns.items():
        assert [length for _, length in asked] == [1_050, 1_200, 1_350, 1_500]
        assert job.startswith("random") or len({client for client, _ in asked}) == 1
    moved = [job for job, asked in turns.items() if len({client for client, _ in asked}) > 1]
    assert len(moved) > cluster.PLACED_JOBS


def answer(*said: tuple[str, float]) -> Answer:
    words, logprobs = zip(*said, strict=True)
    return Answer(0.0, 1.0, 1.0, 8, len(words), tokens=tuple(map(hash, words)), logprobs=logprobs)


def test_two_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    here = answer(("the", -0.1), ("cat", -0.69), ("purrs", -0.2))
    there = answer(("the", -0.15), ("dog", -0.7), ("has", -4.0))
    assert logprob_distance(here, there) == pytest.approx(0.05)
    assert logprob_distance(here, answer(("fish", -2.1), ("swims", -9.0))) == 2.0
    assert logprob_distance(here, here) == 0.0
