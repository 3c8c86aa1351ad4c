"""A stub of a server with OpenAI's routes, for tests of clients. The stub remembers every prompt,
like an unlimited prefix cache. It counts the words of a text prompt as tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tiered_kv.bench.agents.forcing import XARG

Body = dict[str, Any]
OWN = 99
"""Token that the stub generates if no tokens are forced."""


@dataclass
class StubServer:
    """A stub server that records its requests.

    Attributes:
        takes_s: seconds until a request is answered.
        refuses: a word. A prompt that contains it is answered with status 400.
        tells: whether answers report cached tokens, and the server has a metrics page.
        lacks: names of fields that are omitted from answers.
        breaks_off: whether the server closes the connection in the middle of an answer.
        obeys: whether the server answers with the tokens that the request forces.
        until: an event that is awaited before a request is answered.
        waits: an event that is set when a request starts to wait for ``until``.
    """

    url: str = ""
    longest: int | None = 2_000
    takes_s: float = 0.0
    refuses: str | None = None
    tells: bool = True
    lacks: tuple[str, ...] = ()
    breaks_off: bool = False
    obeys: bool = True
    until: threading.Event | None = None
    waits: threading.Event = field(default_factory=threading.Event)
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
        if self.until is not None:
            self.waits.set()
            self.until.wait()
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
        forced = (body.get("vllm_xargs") or {}).get(XARG) if self.obeys else None
        for token in forced or [OWN] * body["max_tokens"]:
            choice: Body = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": "yes "}} if chat else {"text": "yes "}
            if body.get("return_token_ids"):
                # The text is empty, as when a token ends in the middle of a character.
                choice |= {"token_ids": [token], "text": ""}
            if "logprobs" in body:
                choice["logprobs"] = {"token_logprobs": [-token / 10], "tokens": ["?"]}
            said.append({**base, "choices": [choice]})
        usage: Body = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "total_tokens": prompt + body["max_tokens"],
        }
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        chunks = [*said, {**base, "choices": [], "usage": usage}]
        for name in self.lacks:
            for chunk in (*chunks, *(choice for one in said for choice in one["choices"])):
                chunk.pop(name, None)
        return chunks

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
    prompt = body["prompt"]
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def whole(chunks: list[Body]) -> Body:
    """Merge the chunks of a streamed answer into one body."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    logprobs = [one for choice in choices for one in choice["logprobs"]["token_logprobs"]]
    text = "".join(choice["text"] for choice in choices)
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": "length"}
    report = {"prompt_tokens": 9, "remote_tokens": 6}
    return {
        **chunks[-1],
        "choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}],
        "kv_transfer_params": {"tiered_kv": report},
    }


def common(one: list[str], other: list[str]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


@contextmanager
def running(server: StubServer) -> Iterator[StubServer]:
    """Serve on the loopback interface until the block ends."""

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
            if server.breaks_off:
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                self.wfile.write(events[0].encode())
                self.close_connection = True
                return
            if not body.get("stream"):
                self._send(status, json.dumps(whole(said)).encode())
                return
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
