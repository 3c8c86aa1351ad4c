"""Answers of the routes, recorded from schedulers of real engines, and a server that gives them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.gaps.waiting import CONTEXT, FAST, LONG, reader, waiting_rig
from tests.vllm.routes.test_core_method import call, core_of
from tests.vllm.routes.test_endpoints import serve
from tiered_kv.connectors.vllm import plugin
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.top.fetch.route_client import PAGE

HOSTILE = "\x1b[31mred\x1b[2J\r\n[bold]x[/] \u202e \u05e9 🎉 " + "y" * 300
"""Name of one of the jobs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of HTTP."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Answers = dict[str, Answer]
"""Answers by path and query."""


class Engines:
    """An engine client's way to the cores of rigs, through vLLM's own messages."""

    def __init__(self, *rigs: Rig) -> None:
        plugin.register()
        self._cores = [core_of(rig) for rig in rigs]

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        return [json.dumps(call(core, question)) for core in self._cores]


def record(monkeypatch: pytest.MonkeyPatch, *rigs: Rig) -> Answers:
    """Record the status and all pages of jobs, as they are now."""
    _, ask = serve(monkeypatch, Engines(*rigs))
    found, after = dict[str, Answer](), "0.0"
    paths = ["/tiered_kv/status"]
    while paths:
        path = paths.pop()
        got = ask(path)
        assert got.status_code == 200, got.text
        found[path] = Answer(got.text)
        after = got.json().get("next", "0.0")
        if after is not None:
            paths.append(f"/tiered_kv/jobs?limit={PAGE}&after={after}")
    return found


def busy_rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """An engine with a job in VRAM, one on its way to SSD, one that runs, and one of a hostile
    name."""
    rig = waiting_rig(make_rig, tmp_path)
    for name, tool in (("pinned", FAST), ("away", LONG)):
        rig.ask(f"{name} 1", CONTEXT, params={"job_id": name})
        reader(rig).says(f"{name} 1", tool)
        rig.step()
    rig.ask("hostile 1", text(40, seed=3), params={"job_id": HOSTILE})
    rig.add("running 1", text(60, seed=4), max_tokens=30, params={"job_id": "running"})
    for _ in range(4):
        rig.step()
    return rig


class RouteServer:
    """A web server with these answers, which may be changed.

    Attributes:
        answers: by path and query; others are not found.
        tokens: values of ``Authorization`` that came.
        asked: set when somebody has asked; a test clears it.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.tokens: list[str | None] = []
        self.asked = threading.Event()
        self.url = ""

    @contextmanager
    def running(self, port: int = 0) -> Iterator[RouteServer]:
        """Serve on that port, or on one that is free."""
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.tokens.append(self.headers.get("Authorization"))
                answer = told.answers.get(self.path, Answer("", 404))
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
