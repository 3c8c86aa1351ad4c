"""Transfer speed of pages to and from a remote store, compared with the link alone.

    python -m bench.remote --json

A Valkey server on loopback stores pages of 256 KiB of random bytes, with the codec ``raw``. They
are written and read in the same way as by the connector's I/O thread, one context at a time, and
checked. ``get`` and ``put`` are the store's speed, divided by the speed of one TCP stream between
two Python processes that carries the same pages from and to the same memory, as medians over
rounds. ``lookups_per_s``: lookup rate for 100,000 keys, half of which exist. ``scheduler_ms``:
additional time of the scheduler's thread for a request of 3,000 tokens, with a remote store that is
queried and written. ``asked_ms``: the part of ``scheduler_ms`` until the request has its blocks,
after the store's answer.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, Tick, benchmark, run_benchmark
from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import StoreSite
from tiered_kv.storage.remote_pages import RemotePages
from tiered_kv.storage.remote_tier import make_store
from tiered_kv.testing.valkey import ValkeyServer

PAGE_BYTES = 256 << 10
PAGES, CONTEXT_PAGES = 512, 64
ROUNDS = 25
LOOKUPS = 100_000
REQUESTS, WARM_UP = 40, 10
STEP_TOKENS, STEP_S, ANSWER_S = 256, 0.02, 0.003
"""Tokens and duration of a step on the engine's clock, and the real time after each step for the
thread that queries the store, seconds."""
HOOKS = ("on_arrived", "match", "on_allocated", "build_orders", "on_reports", "on_finished")
CONTEXT_TOKENS = 3_000
FINGERPRINT = bytes(range(16))
PAGE_FORMAT = PageFormat(ElementType.OPAQUE, PAGE_BYTES, 16)


def _key(number: int) -> PageKey:
    return PageKey(FINGERPRINT + number.to_bytes(32, "big"))


def _echo(connection: socket.socket) -> None:
    """Serve the other end of the stream: receive the announced number of pages, then send them
    back.
    """
    kept: list[memoryview] = []
    with connection:
        while head := connection.recv(8, socket.MSG_WAITALL):
            count = int.from_bytes(head)
            kept += [memoryview(bytearray(PAGE_BYTES)) for _ in range(count - len(kept))]
            for page in kept[:count]:
                _receive(connection, page)
            connection.sendall(b"k")
            for page in kept[:count]:
                connection.sendall(page)


def _receive(connection: socket.socket, page: memoryview) -> None:
    done = 0
    while done < len(page):
        done += connection.recv_into(page[done:])


@contextmanager
def stream() -> Iterator[socket.socket]:
    """Open a TCP connection to another process on loopback, which sends received pages back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    child = multiprocessing.get_context("spawn").Process(target=_echo, args=(other,))
    with other:
        child.start()
    try:
        with connection:
            yield connection
    finally:
        child.join()


def time_stream(
    connection: socket.socket, pages: Sequence[Bytes], slots: Sequence[Bytes]
) -> tuple[float, float]:
    """Return the seconds to send and to receive the pages. Received pages are written to the slots,
    which hold one context at a time.

    Raises:
        RuntimeError: a received page differs.
    """
    began = time.perf_counter()
    connection.sendall(len(pages).to_bytes(8))
    for page in pages:
        connection.sendall(page.data)
    connection.recv(1, socket.MSG_WAITALL)
    put_s, get_s = time.perf_counter() - began, 0.0
    for start in range(0, len(pages), CONTEXT_PAGES):
        some = pages[start : start + CONTEXT_PAGES]
        began = time.perf_counter()
        for slot, _ in zip(slots, some, strict=False):
            _receive(connection, slot.data)
        get_s += time.perf_counter() - began
        _check(slots, some)
    return put_s, get_s


def time_store(
    store: RemotePages, keys: Sequence[PageKey], pages: Sequence[Bytes], slots: Sequence[Bytes]
) -> tuple[float, float]:
    """Return the seconds to write and to read the pages. Pages are read into the slots, which hold
    one context at a time.

    Raises:
        RuntimeError: a page was not stored, or differs when it is read.
    """
    contexts = [slice(at, at + CONTEXT_PAGES) for at in range(0, len(keys), CONTEXT_PAGES)]
    seconds = [0.0, 0.0]
    for way, move in enumerate((store.put, store.get)):
        for context in contexts:
            some = pages[context]
            named = list(zip(keys[context], slots if way else some, strict=False))
            began = time.perf_counter()
            failed = move(named)
            seconds[way] += time.perf_counter() - began
            if failed:
                raise RuntimeError(f"{len(failed)} pages were not {('stored', 'found')[way]}")
            if way:
                _check(slots, some)
    return seconds[0], seconds[1]


def _check(slots: Sequence[Bytes], pages: Sequence[Bytes]) -> None:
    if not all(map(np.array_equal, slots, pages)):
        raise RuntimeError("a page read back differs from the page written")


def look_up(store: RemotePages, existing: Sequence[PageKey]) -> float:
    """Return the lookup rate, keys per second. Half of the keys exist.

    Raises:
        RuntimeError: an answer is wrong.
    """
    absent = (_key((1 << 40) + number) for number in range(LOOKUPS // 2))
    keys = list(chain.from_iterable(zip(cycle(existing), absent, strict=False)))
    began = time.perf_counter()
    found = store.exists(keys, 60.0)
    seconds = time.perf_counter() - began
    if found != frozenset(range(1, LOOKUPS, 2)):
        raise RuntimeError("a lookup returned a wrong answer")
    return len(keys) / seconds


class TimedRig:
    """An engine whose connector hooks are timed on the scheduler's thread.

    Args:
        url: address of the store; empty for no store.
        folder: folder for the engine's files.

    Attributes:
        lookups: number of queries to the store.
    """

    def __init__(self, url: str, folder: Path) -> None:
        from tiered_kv.testing.checked_kv import CELL
        from tiered_kv.testing.vllm.rig import Rig, RigOptions

        cpu_gib = 2 * CONTEXT_TOKENS * CELL / (1 << 30)
        remote = {"remote": url} if url else {}
        options = RigOptions(
            extra={"cpu_gib": cpu_gib, "codec": "raw", "admission": "off", **remote},
            blocks=4 * CONTEXT_TOKENS // 16,
            max_model_len=2 * CONTEXT_TOKENS,
            max_batched_tokens=STEP_TOKENS,
        )
        self._rig = Rig(folder / "model", options)
        self.lookups = 0
        self._spent_s = self._asked_s = 0.0
        for name in HOOKS:
            self._time(name)

    def _time(self, name: str) -> None:
        call = getattr(self._rig.half, name)

        def run(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                returned = call(*args, **named)
            finally:
                self._spent_s += time.thread_time() - began
            if name == "build_orders":
                self.lookups += sum(len(one.lookups) for one in returned.stores.values())
            if name == "on_allocated":
                self._asked_s = self._spent_s
            return returned

        setattr(self._rig.half, name, run)

    def ask(self, number: int) -> tuple[float, float]:
        """Run a request, and time the scheduler's thread.

        Returns:
            CPU time until blocks are allocated, including any query to the store, and total CPU
            time, including later work on the request's pages, in milliseconds.
        """
        from tiered_kv.testing.checked_kv import text

        rig, self._spent_s = self._rig, 0.0
        name = f"turn {number}"
        rig.add(name, text(CONTEXT_TOKENS, seed=number), params={"job_id": name})
        while rig.scheduler.has_requests() or rig.orders_under_way:
            rig.step()
            rig.wait_for_worker()
            time.sleep(ANSWER_S)  # for the thread that queries the store
            rig.now += STEP_S
        return 1e3 * self._asked_s, 1e3 * self._spent_s

    def close(self) -> None:
        """Stop the engine."""
        self._rig.close()


def on_thread(url: str, folder: Path) -> tuple[float, float]:
    """Return the additional CPU time of a request with a store (see ``TimedRig.ask``),
    milliseconds, as medians over pairs of requests with and without a store.

    Raises:
        RuntimeError: the store was not queried for each request.
    """
    with closing(TimedRig(url, folder)) as with_store, closing(TimedRig("", folder)) as without:
        pairs = [(with_store.ask(number), without.ask(number)) for number in range(REQUESTS)]
    if with_store.lookups != REQUESTS:
        raise RuntimeError(f"the store was queried {with_store.lookups} times, not {REQUESTS}")
    times = np.array(pairs[WARM_UP:])
    asked_ms, whole_ms = np.median(times[:, 0] - times[:, 1], axis=0)
    return float(asked_ms), float(whole_ms)


def measure(pages: int, rounds: int, tick: Tick) -> dict[str, float]:
    """Compare store and stream in each round, and time the scheduler's thread. Returns the figures
    that the module docstring explains, and the speeds of store and stream in MB/s.

    Args:
        pages: pages per round.
    """
    rng = np.random.default_rng(0)
    content = list(rng.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8))
    slots = list(np.zeros((min(pages, CONTEXT_PAGES), PAGE_BYTES), dtype=np.uint8))
    nbytes, times, keys = pages * PAGE_BYTES, list[tuple[float, ...]](), list[PageKey]()
    with (
        tempfile.TemporaryDirectory() as name,
        ValkeyServer(Path(name), most=f"{4 * nbytes >> 20}mb") as server,
        stream() as connection,
    ):
        site = StoreSite(FINGERPRINT, 0, 1, 0, True, PAGE_FORMAT, 1)
        connect = partial(make_store, server.address)
        with closing(RemotePages(connect, site, RawCodec(PAGE_FORMAT), from_table, 1e9)) as store:
            for number in range(rounds + 1):
                store.drop(keys)
                keys = [_key(number * pages + at) for at in range(pages)]
                link = time_stream(connection, content, slots)
                times.append((*link, *time_store(store, keys, content, slots)))
                tick("rounds")
            lookups = look_up(store, keys)
        tick("the scheduler's thread")
        asked_ms, scheduler_ms = on_thread(server.url, Path(name))
    speeds = nbytes / 1e6 / np.array(times[1:])  # the first round warms up
    stream_put, stream_get, put, get = map(float, np.median(speeds, axis=0))
    return {
        "put": float(np.median(speeds[:, 2] / speeds[:, 0])),
        "get": float(np.median(speeds[:, 3] / speeds[:, 1])),
        "put_mbs": put,
        "get_mbs": get,
        "stream_put_mbs": stream_put,
        "stream_get_mbs": stream_get,
        "lookups_per_s": lookups,
        "scheduler_ms": scheduler_ms,
        "asked_ms": asked_ms,
    }


def main(
    pages: Annotated[int, typer.Option(help="Pages per round.")] = PAGES,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = ROUNDS,
    as_json: AsJson = False,
) -> None:
    """Measure a remote store."""
    with benchmark("Pages in a remote store", rounds + 2, as_json=as_json) as run:
        run.result = measure(pages, rounds, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
