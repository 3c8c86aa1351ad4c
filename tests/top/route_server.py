"""A web server in this process with answers of the routes."""

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
    """An answer of HTTP."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Answers = dict[str, Answer]
"""Answers by path and query."""
Work = Callable[[dict[str, Any]], Answer]
"""Answers a body, and may do something before."""


class RouteServer:
    """A web server with these answers, which may be changed.

    Attributes:
        answers: by path and query; others are not found.
        work: what answers bodies that are posted, by path.
        posted: paths and bodies that were posted.
        tokens: values of ``Authorization`` that came.
        asked: set when somebody has asked; a test clears it.
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
        """Serve on that port, or on one that is free."""
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
                """Say nothing."""

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            server.daemon_threads = False  # so that leaving waits for them
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def refusal(status: int, message: str) -> Answer:
    """An answer as the routes refuse."""
    return Answer(json.dumps({"error": {"message": message, "code": status}}), status)
