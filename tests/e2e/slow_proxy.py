"""A proxy that slows down a server by a factor."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


@contextmanager
def slow_proxy(url: str, factor: float) -> Iterator[str]:
    """Forward requests to ``url``, including streams. Yields the proxy's address.

    Args:
        factor: factor by which the time from a request to each part of its answer grows.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers["Content-Length"])))

        def _forward(self, body: bytes) -> None:
            began = time.monotonic()
            kept = ("content-type", "authorization", "x-session-id")
            headers = {name: value for name, value in self.headers.items() if name.lower() in kept}
            with (
                httpx.Client(timeout=600, trust_env=False) as client,
                client.stream(
                    self.command, f"{url}{self.path}", content=body, headers=headers
                ) as answer,
            ):
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("content-type", ""))
                self.end_headers()
                parts = queue.SimpleQueue[tuple[float, bytes] | None]()

                def read() -> None:
                    for part in answer.iter_raw():
                        parts.put((time.monotonic() - began, part))
                    parts.put(None)

                reader = threading.Thread(target=read)
                reader.start()
                while (found := parts.get()) is not None:
                    after_s, part = found
                    time.sleep(max(0.0, began + factor * after_s - time.monotonic()))
                    self.wfile.write(part)
                reader.join()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

    with Listening(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()
