"""A web server that runs in the test's process and returns given answers of the routes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Answers = dict[str, Answer]
"""Answers by path and query."""
Work = Callable[[dict[str, Any]], Answer]
"""A function that answers a posted body, and may have side effects."""


class RouteServer:
    """A web server with these answers, which a test may change.

    Attributes:
        answers: answers by path and query. Other paths get 404.
        work: functions that answer posted bodies, by path.
        posted: paths and bodies that were posted.
        tokens: received values of ``Authorization``.
        asked: set by every request; a test clears it.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.work: dict[str, Work] = {}
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.tokens: list[str | None] = []
        self.asked = threading.Event()
        self.url = ""

    @contextmanager
    def running(self, port: int = 0) -> Iterator[RouteServer]:
        """Serve on this port, or on a free one."""
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(told.answers.get(self.path, Answer("", 404)))

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.posted.append((self.path, body))
                work = told.work.get(self.path)
                self._say(Answer("", 404) if work is None else work(body))

            def _say(self, answer: Answer) -> None:
                told.tokens.append(self.headers.get("Authorization"))
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body.encode())
                told.asked.set()

            def log_message(self, *words: object) -> None:
                """Suppress request logging."""

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            server.daemon_threads = False  # closing the server then waits for its threads
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def refusal(status: int, message: str) -> Answer:
    """Return an error response in the format of the routes."""
    return Answer(json.dumps({"error": {"message": message, "code": status}}), status)
