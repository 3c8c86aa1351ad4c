"""A server that speaks OpenAI's API, for tests of those who ask: words are its tokens, and it
remembers every prompt, as a prefix cache without limits would."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class StubServer:
    """A server that keeps what it was asked.

    Attributes:
        takes_s: time of an answer.
        refuses: words that it answers 400 to, if a prompt has one.
        tells: its answers have cached tokens, and it has a page of metrics.
    """

    url: str = ""
    longest: int | None = 2_000
    takes_s: float = 0.0
    refuses: str | None = None
    tells: bool = True
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    asked: int = 0
    hits: int = 0
    _now: int = 0
    _seen: list[list[str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prompts(self) -> list[str]:
        return [prompt_of(body) for body in self.bodies]

    def answer(self, body: Body, headers: dict[str, str]) -> tuple[int, Body | list[Body]]:
        words = prompt_of(body).split()
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            cached = max((common(words, seen) for seen in self._seen), default=0)
            self._seen.append(words)
            self.asked += len(words)
            self.hits += cached
        time.sleep(self.takes_s)
        with self._lock:
            self._now -= 1
        if self.refuses is not None and self.refuses in words:
            return 400, {"error": {"message": "this prompt is refused", "code": 400}}
        return 200, self._chunks(body, len(words), cached)

    def _chunks(self, body: Body, prompt: int, cached: int) -> list[Body]:
        chat = "messages" in body
        base = {
            "id": "x",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 0,
            "model": body["model"],
        }
        said = []
        for _ in range(body["max_tokens"]):
            choice: Body = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": "yes "}} if chat else {"text": "yes "}
            said.append({**base, "choices": [choice]})
        usage: Body = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "total_tokens": prompt + body["max_tokens"],
        }
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return [*said, {**base, "choices": [], "usage": usage}]

    def page(self) -> str:
        return (
            "# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.asked}\n'
            "# TYPE vllm:prefix_cache_hits counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}\n'
        )


def prompt_of(body: Body) -> str:
    if "messages" in body:
        return " ".join(message["content"] for message in body["messages"])
    return str(body["prompt"])


def common(one: list[str], other: list[str]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


@contextmanager
def running(server: StubServer) -> Iterator[StubServer]:
    """Serve on loopback; gone when the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                model = {"id": "stub", "object": "model", "max_model_len": server.longest}
                self._send(200, json.dumps({"data": [model]}).encode())
            elif self.path == "/metrics" and server.tells:
                self._send(200, server.page().encode())
            else:
                self._send(404, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): said for name, said in self.headers.items()}
            status, said = server.answer(body, headers)
            if isinstance(said, dict):
                self._send(status, json.dumps(said).encode())
                return
            events = [f"data: {json.dumps(one)}\n\n" for one in said]
            self._send(status, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")

        def _send(self, status: int, said: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    with Listening(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{listening.server_port}"
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
