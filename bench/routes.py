"""Decoding of others while the connector's routes are called with what they must refuse.

    python -m bench.routes --json

A real server decodes for four clients without an end. Spells of calls and spells of rest take
turns. ``decode_ratio`` is the 95th percentile of the time between two tokens in the former over
that in the latter, ``control_ratio`` that of every other spell of rest over that of the others, and
``stock_ratio`` that of spells of as many calls that vLLM itself refuses: what HTTP alone costs.
Callers run at the lowest priority, so that what they take themselves is no part of it. ``refused``
calls got the answer that they should, ``limited`` ones were told to come back later; ``wrong`` must
be 0, and ``threads_more`` and ``files_more`` no more than the callers: what one of the server's
processes holds more of in the end.
"""

from __future__ import annotations

import http.client
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import numpy as np
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, progress, run_benchmark, show
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)

Call: TypeAlias = tuple[str, str, int]
"""A method, a path and the status that it must get."""
HOSTILE: Sequence[Call] = (
    ("GET", "tiered_kv/jobs?limit=0", 400),
    ("GET", f"tiered_kv/jobs?limit={'9' * 4000}", 400),
    ("GET", "tiered_kv/jobs?limit=%00", 400),
    ("GET", "tiered_kv/jobs?after=0", 400),
    ("GET", "tiered_kv/jobs?after=999999.999999999999999999", 200),
    ("GET", "tiered_kv/jobs?sort=cost", 400),
    ("GET", "tiered_kv/jobs/no-such-job", 404),
    ("GET", "tiered_kv/jobs/%0a%0d%1b%5b31mred", 404),
    ("GET", "tiered_kv/jobs/%ff%fe%00", 404),
    ("GET", f"tiered_kv/jobs/{'%F0%9F%8E%89' * 512}", 404),
    ("GET", f"tiered_kv/jobs/{'x' * 8000}", 404),
    ("GET", "tiered_kv/jobs/../../etc/passwd", 404),
    ("GET", "tiered_kv/nothing", 404),
    ("POST", "tiered_kv/status", 405),
    ("DELETE", "tiered_kv/jobs/j", 405),
    ("PUT", "tiered_kv/jobs", 405),
)
"""Hostile calls of our routes. All are refused but one, which gets an empty page."""
STOCK: Sequence[Call] = (("GET", "nothing", 404),)
"""A call that vLLM itself refuses: neither a route of its own nor one of ours."""
LIMITED = 429

SPELLS = 10
"""Spells of calls of either kind; one of rest goes before each, and one stands at the end."""
DECODING = 4
"""Clients whose answers are timed."""
ANSWER = 500
CALLERS = 8
"""Calls under way at the same time."""
TIMEOUT_S = 300.0


def send(port: int, method: str, path: str) -> int:
    """The status of a call by a client of its own, which sends the path as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, f"/{path}")
        return connection.getresponse().status
    finally:
        connection.close()


def held_by(group: int) -> dict[int, tuple[int, int]]:
    """Threads and descriptors of each process of a group."""
    found = {}
    for pid in group_members(group):
        try:
            threads, files = (
                sum(1 for _ in Path(f"/proc/{pid}/{name}").iterdir()) for name in ("task", "fd")
            )
        except (FileNotFoundError, PermissionError):
            continue  # it ended meanwhile
        found[pid] = (threads, files)
    return found


def call_many(port: int, kinds: Sequence[Call], calls: int, pace_s: float) -> Counter[str]:
    """Make calls of these kinds in turn, ``pace_s`` seconds apart but never more than ``CALLERS``
    at a time; how many were refused, limited or wrong."""
    began = time.monotonic()

    def one(at: int) -> str:
        time.sleep(max(0.0, began + at * pace_s - time.monotonic()))
        method, path, wanted = kinds[at % len(kinds)]
        got = send(port, method, path)
        return {wanted: "refused", LIMITED: "limited"}.get(got, "wrong")

    with ThreadPoolExecutor(CALLERS) as callers:
        return Counter(callers.map(one, range(calls)))


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of time, on the clock of ``time.perf_counter``."""

    began: float
    ended: float


@dataclass(slots=True)
class Calls:
    """Calls of some kinds.

    Attributes:
        outcomes: how many were refused, limited or wrong.
    """

    kinds: Sequence[Call]
    outcomes: Counter[str] = field(default_factory=Counter)
    spells: list[Spell] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return sum(self.outcomes.values()) / sum(one.ended - one.began for one in self.spells)


class Decoding:
    """Clients that have a server decode, answer after answer.

    Attributes:
        answers: times at which each answer's tokens came.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers: list[list[float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Decode as long as the block lasts.

        Raises:
            RuntimeError: an answer failed.
        """
        with ThreadPoolExecutor(DECODING) as pool:
            clients = [pool.submit(self._decode, at) for at in range(DECODING)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def _decode(self, at: int) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as client:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                times = list[float]()
                self.answers.append(times)
                body = {
                    "model": MODEL_NAME,
                    "prompt": [1_000 + 100 * at + number % 100] * 200,
                    "max_tokens": ANSWER,
                    "ignore_eos": True,
                    "stream": True,
                }
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        raise RuntimeError(f"an answer failed: {answer.read().decode()}")
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            times.append(time.perf_counter())
                        if self._stop.is_set():
                            return


def between_tokens(answers: Sequence[Sequence[float]], spells: Sequence[Spell]) -> list[float]:
    """Times between two tokens of an answer that both came in one of these spells, seconds."""
    return [
        other - one
        for times in answers
        for one, other in itertools.pairwise(times)
        if any(spell.began <= one and other <= spell.ended for spell in spells)
    ]


def p95(times: Sequence[float]) -> float:
    """The 95th percentile."""
    return float(np.quantile(times, 0.95))


def measure(model: Path, calls: int, rest_s: float, tell: Any) -> dict[str, float | int]:
    """Spells of calls beside decoding, and of rest.

    Args:
        calls: of each kind. rest_s: length of a spell, seconds.
    """
    with tempfile.TemporaryDirectory(prefix="routes-") as folder:
        options = ServerOptions(
            model=model,
            kv_blocks=400,
            max_model_len=1024,
            kv_transfer_config=CONNECTOR,
            env={"VLLM_PLUGINS": "tiered_kv"},  # it adds the routes
        )
        tell("starting the server")
        with (
            VllmServer(options, Path(folder) / "server.log") as server,
            ProcessPoolExecutor(1, initializer=os.nice, initargs=(19,)) as caller,
        ):
            tried = caller.submit(call_many, server.port, HOSTILE, len(HOSTILE), 0.0).result()
            if tried["wrong"]:
                raise RuntimeError(f"the server does not answer as it should: {dict(tried)}")
            decoding, rests = Decoding(server.url), list[Spell]()
            ours, stock = Calls(HOSTILE), Calls(STOCK)
            pace_s, each = rest_s * SPELLS / calls, calls // SPELLS
            with decoding.running():
                time.sleep(rest_s)  # every client is decoding by then
                before = held_by(server.pid or 0)
                for number in range(SPELLS):
                    tell(f"spell {number + 1} of {SPELLS}")
                    for kind in (ours, stock):
                        rests.append(_resting(rest_s))
                        began = time.perf_counter()
                        called: Future[Counter[str]] = caller.submit(
                            call_many, server.port, kind.kinds, each, pace_s
                        )
                        kind.outcomes += called.result()
                        kind.spells.append(Spell(began, time.perf_counter()))
                rests.append(_resting(rest_s))
                after = held_by(server.pid or 0)
            server.check()
    more = [
        [now - then for now, then in zip(after[process], before[process], strict=True)]
        for process in before
    ]
    resting = p95(between_tokens(decoding.answers, rests))
    outcomes = ours.outcomes
    return {
        "decode_ratio": p95(between_tokens(decoding.answers, ours.spells)) / resting,
        "stock_ratio": p95(between_tokens(decoding.answers, stock.spells)) / resting,
        "control_ratio": p95(between_tokens(decoding.answers, rests[::2]))
        / p95(between_tokens(decoding.answers, rests[1::2])),
        "decode_ms": 1e3 * resting,
        "calls": sum(outcomes.values()),
        **{name: outcomes[name] for name in ("refused", "limited", "wrong")},
        "calls_per_s": ours.per_s,
        "stock_calls_per_s": stock.per_s,
        "threads_more": max(threads for threads, _ in more),
        "files_more": max(files for _, files in more),
    }


def _resting(rest_s: float) -> Spell:
    began = time.perf_counter()
    time.sleep(rest_s)
    return Spell(began, time.perf_counter())


def main(
    calls: Annotated[int, typer.Option(min=SPELLS, help="Calls of each kind.")] = 10_000,
    rest: Annotated[float, typer.Option(min=0.1, help="Length of a spell, seconds.")] = 10.0,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure decoding beside calls that are refused."""
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("", total=SPELLS + 1)
        found = measure(
            model or small_model(),
            calls,
            rest,
            lambda what: bar.update(task, advance=1, description=what),
        )
    result = {**found, "dtype": str(machine_dtype())}
    show("Decoding beside hostile calls of the routes", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
