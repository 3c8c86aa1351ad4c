"""Small web servers that run in the test's process, for tests of clients of a running server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tiered_kv.doctor.running_server import REQUESTS
from tiered_kv.metric_families import FAMILIES, PART_OF, PREFIX, SERIES, MetricType
from tiered_kv.metrics import COUNTERS, GAUGES, WOULD_HAVE_SAVED

Write = Callable[[bytes], object]
Page = Callable[[Write, threading.Event], None]
"""Function that writes the body of a page. The event is set when the server is about to stop."""


def text(body: str) -> Page:
    """Return a page with this body."""

    def page(write: Write, ends: threading.Event) -> None:
        write(body.encode())

    return page


@contextmanager
def serve(pages: Mapping[str, Page]) -> Iterator[str]:
    """Serve these pages on loopback. Other paths get 404.

    Yields:
        The server's address.
    """
    ends = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (page := pages.get(self.path)) is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            # The client may have closed the connection.
            with suppress(BrokenPipeError, ConnectionResetError):
                page(self.wfile.write, ends)

        def log_message(self, *words: object) -> None:
            """Suppress request logging."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # closing the server then waits for its threads
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ends.set()
            server.shutdown()
            thread.join()


def metrics(requests: int = 10, **values: float) -> str:
    """Return the metrics page of a vLLM server with the connector and these counter values, by
    event name."""
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    answered = REQUESTS.removesuffix("_total")
    Counter(answered, "Answered.", labels, registry=registry).labels("m", "0").inc(requests)
    assert values.keys() <= COUNTERS.keys() | GAUGES.keys() | WOULD_HAVE_SAVED.keys()
    for part, whole in PART_OF.items():
        values[whole] = values.get(whole, 0) - values.get(part, 0)
    kinds = {MetricType.COUNTER: Counter, MetricType.GAUGE: Gauge}
    made = {
        name: kinds[one.kind](PREFIX + name, one.text, (*labels, *one.labels), registry=registry)
        for name, one in FAMILIES.items()
        if one.kind in kinds
    }
    for event, series in SERIES.items():
        if series.family in made and (event in values or event not in WOULD_HAVE_SAVED):
            bound = made[series.family].labels("m", "0", *series.labels.values())
            bound.inc(values.get(event, 0))
    return generate_latest(registry).decode()
