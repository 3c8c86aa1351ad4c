"""Calls are told by their answers, and tokens by the spells in which they came."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tiered_kv.bench.routes import HOSTILE, Spell, between_tokens, call_many, held_by, p95


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server that answers everything alike; its port, and the paths that were asked for."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def test_calls_are_counted_by_what_they_should_get() -> None:
    rounds = 3
    with answering(404) as (port, asked):
        found = call_many(port, HOSTILE, rounds * len(HOSTILE), 0.0)
    refused = rounds * sum(wanted == 404 for _, _, wanted in HOSTILE)
    assert found == {"refused": refused, "wrong": rounds * len(HOSTILE) - refused}
    wanted = Counter(f"{method} /{path}" for method, path, _ in HOSTILE)
    assert Counter(asked) == {call: rounds * count for call, count in wanted.items()}


def test_a_server_that_limits_calls_is_right_to() -> None:
    with answering(429) as (port, _):
        assert call_many(port, HOSTILE, 10, 0.0) == {"limited": 10}


def test_times_between_tokens_are_those_of_one_answer_in_one_spell() -> None:
    answers = [[0.0, 1.0, 2.5, 6.0], [2.0, 2.25], []]
    assert between_tokens(answers, [Spell(0.0, 3.0)]) == [1.0, 1.5, 0.25]
    assert between_tokens(answers, [Spell(0.0, 1.0), Spell(2.0, 7.0)]) == [1.0, 3.5, 0.25]
    assert between_tokens(answers, [Spell(3.0, 5.0)]) == []
    assert p95([float(at) for at in range(101)]) == pytest.approx(95.0)


def test_threads_and_descriptors_of_a_group_are_counted() -> None:
    group = os.getpgid(0)
    before = held_by(group)[os.getpid()]
    read, write = os.pipe()
    try:
        assert held_by(group)[os.getpid()] == (before[0], before[1] + 2)
    finally:
        os.close(read)
        os.close(write)
