"""Speed of pages in a remote store, beside the link alone.

    python -m bench.remote --json

A Valkey server on loopback, pages of 256 KiB of random bytes, coded ``raw``, each with its record,
written and read as the I/O thread does, a context at a time, and checked. ``get`` and ``put`` are
medians over rounds of their speed over that of one TCP stream between two Python processes in the
same round, which carries the same pages from memory to memory. ``lookups_per_s``: keys looked up,
of 100,000 of which half are there. ``scheduler_ms``: time of the scheduler's thread that a request
of 3,000 tokens costs more with a remote store that is asked and written than without one;
``asked_ms``: its part until the answer is there.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, progress, run_benchmark, show
from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import StoreSite
from tiered_kv.storage.remote_pages import RemotePages
from tiered_kv.storage.remote_tier import make_store
from tiered_kv.testing.valkey import ValkeyServer

PAGE_BYTES = 256 << 10
PAGES = 512
CONTEXT_PAGES = 64
ROUNDS = 25
LOOKUPS = 100_000
REQUESTS = 40
STEP_TOKENS, STEP_S, ANSWER_S = 256, 0.02, 0.003
"""A step's tokens and seconds on the engine's clock, and the seconds that the store's thread really
has for each."""
HOOKS = ("on_arrived", "match", "on_allocated", "build_orders", "on_reports", "on_finished")
CONTEXT_TOKENS = 3_000
FINGERPRINT = bytes(range(16))
PAGE_FORMAT = PageFormat(ElementType.OPAQUE, PAGE_BYTES, 16)


def _key(number: int) -> PageKey:
    return PageKey(FINGERPRINT + number.to_bytes(32, "big"))


def _stream(port: int) -> None:
    """The other end of the stream: takes as many pages as it is told, then gives them back."""
    listener = socket.create_server(("127.0.0.1", port))
    connection, _ = listener.accept()
    kept: list[memoryview] = []
    with connection, listener:
        while head := connection.recv(8, socket.MSG_WAITALL):
            count = int.from_bytes(head, "little")
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
    """One TCP connection to another process on loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    child = multiprocessing.get_context("spawn").Process(target=_stream, args=(port,))
    child.start()
    try:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                if not child.is_alive():
                    raise RuntimeError("the other end of the stream has died") from None
                time.sleep(0.01)
        with connection:
            yield connection
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()


def time_stream(connection: socket.socket, pages: Sequence[Bytes]) -> tuple[float, float]:
    """Seconds to send the pages, and to receive them.

    Raises:
        RuntimeError: a page came back otherwise.
    """
    slots = [np.zeros_like(page) for page in pages[:CONTEXT_PAGES]]
    began = time.perf_counter()
    connection.sendall(len(pages).to_bytes(8, "little"))
    for page in pages:
        connection.sendall(page.data)
    connection.recv(1, socket.MSG_WAITALL)
    between = time.perf_counter()
    for at in range(len(pages)):
        _receive(connection, slots[at % len(slots)].data)
    ended = time.perf_counter()
    for at in range(len(pages) - len(slots), len(pages)):
        if not np.array_equal(slots[at % len(slots)], pages[at]):
            raise RuntimeError("a page did not come back")
    return between - began, ended - between


def time_store(
    store: RemotePages, keys: Sequence[PageKey], pages: Sequence[Bytes]
) -> tuple[float, float]:
    """Seconds to write the pages, and to read them.

    Raises:
        RuntimeError: a page was not stored, or came back otherwise.
    """
    slots = [np.zeros_like(page) for page in pages[:CONTEXT_PAGES]]
    put_s = get_s = 0.0
    for start in range(0, len(keys), CONTEXT_PAGES):
        some = list(zip(keys[start:], pages[start : start + CONTEXT_PAGES], strict=False))
        began = time.perf_counter()
        failed = store.put(some)
        put_s += time.perf_counter() - began
        if failed:
            raise RuntimeError(f"{len(failed)} pages were not stored")
    for start in range(0, len(keys), CONTEXT_PAGES):
        wanted = list(zip(keys[start : start + CONTEXT_PAGES], slots, strict=False))
        began = time.perf_counter()
        failed = store.get(wanted)
        get_s += time.perf_counter() - began
        right = (np.array_equal(slot, pages[start + at]) for at, (_, slot) in enumerate(wanted))
        if failed or not all(right):
            raise RuntimeError("a page did not come back")
    return put_s, get_s


def look_up(store: RemotePages, there: Sequence[PageKey]) -> float:
    """Keys looked up a second.

    Raises:
        RuntimeError: an answer is wrong.
    """
    absent = [_key((1 << 40) + number) for number in range(LOOKUPS // 2)]
    keys = [
        key
        for pair in zip((list(there) * LOOKUPS)[: LOOKUPS // 2], absent, strict=True)
        for key in pair
    ]
    began = time.perf_counter()
    found = store.exists(keys, 60.0)
    seconds = time.perf_counter() - began
    if found != frozenset(range(1, LOOKUPS, 2)):
        raise RuntimeError("a look-up was answered wrongly")
    return len(keys) / seconds


@dataclass(frozen=True, slots=True)
class OnThread:
    """Time of the scheduler's thread that a request takes, milliseconds.

    Attributes:
        asked_ms: until its pages are asked for, and the answer is there, if anybody is asked.
        whole_ms: all of it, with what its pages take afterwards.
    """

    asked_ms: float
    whole_ms: float


class TimedRig:
    """An engine whose hooks are timed.

    Args:
        url: of the store; empty for none.

    Attributes:
        lookups: times that the store was asked.
    """

    def __init__(self, url: str, folder: Path) -> None:
        from tiered_kv.testing.checked_kv import CELL
        from tiered_kv.testing.vllm.rig import Rig, RigOptions

        block = 16
        slots = 2 * CONTEXT_TOKENS // block
        extra = {"cpu_gib": slots * block * CELL / (1 << 30), "codec": "raw", "admission": "off"}
        self._rig = Rig(
            folder / "model",
            RigOptions(
                extra={**extra, **({"remote": url} if url else {})},
                blocks=4 * CONTEXT_TOKENS // block,
                max_model_len=2 * CONTEXT_TOKENS,
                max_batched_tokens=STEP_TOKENS,
            ),
        )
        self.lookups = 0
        self._spent = self._at_allocation = 0.0
        for name in HOOKS:
            self._time(name)

    def _time(self, name: str) -> None:
        call = getattr(self._rig.half, name)

        def run(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                given = call(*args, **named)
            finally:
                self._spent += time.thread_time() - began
            if name == "build_orders":
                self.lookups += sum(len(one.lookups) for one in given.stores.values())
            if name == "on_allocated":
                self._at_allocation = self._spent
            return given

        setattr(self._rig.half, name, run)

    def ask(self, number: int) -> OnThread:
        """Time a request."""
        from tiered_kv.testing.checked_kv import text

        rig, self._spent = self._rig, 0.0
        name = f"turn {number}"
        rig.add(name, text(CONTEXT_TOKENS, seed=number), params={"job_id": name})
        while rig.scheduler.has_requests() or rig.orders_under_way:
            rig.step()
            rig.wait_for_worker()
            time.sleep(ANSWER_S)  # for the thread that asks
            rig.now += STEP_S
        return OnThread(1e3 * self._at_allocation, 1e3 * self._spent)

    def close(self) -> None:
        """End the engine."""
        self._rig.close()


def on_thread(url: str, folder: Path) -> OnThread:
    """Time of the scheduler's thread a request, with a store less without: medians of pairs.

    Raises:
        RuntimeError: the store was not asked for each of them.
    """
    with closing(TimedRig(url, folder)) as with_store, closing(TimedRig("", folder)) as without:
        pairs = [(with_store.ask(number), without.ask(number)) for number in range(REQUESTS)]
    if with_store.lookups != REQUESTS:
        raise RuntimeError(f"the store was asked {with_store.lookups} times, not {REQUESTS}")
    pairs = pairs[REQUESTS // 4 :]  # the first ones warm up
    return OnThread(
        statistics.median(one.asked_ms - other.asked_ms for one, other in pairs),
        statistics.median(one.whole_ms - other.whole_ms for one, other in pairs),
    )


def main(
    pages: Annotated[int, typer.Option(help="Pages of a round.")] = PAGES,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = ROUNDS,
    as_json: AsJson = False,
) -> None:
    """Measure pages in a remote store."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as name, progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("rounds", total=rounds)
        most = f"{4 * pages * PAGE_BYTES >> 20}mb"
        with ValkeyServer(Path(name), most=most) as server, stream() as connection:
            site = StoreSite(FINGERPRINT, 0, 1, 0, True, PAGE_FORMAT, 1)
            way = partial(make_store, server.address)
            store = RemotePages(way, site, RawCodec(PAGE_FORMAT), from_table, 1e9)
            nbytes = content.nbytes
            speeds: list[tuple[float, float, float, float]] = []
            keys: list[PageKey] = []
            for number in range(rounds + 1):
                store.drop(keys)
                keys = [_key(number * pages + at) for at in range(pages)]
                sent, received = time_stream(connection, list(content))
                put_s, get_s = time_store(store, keys, list(content))
                speeds.append((nbytes / sent, nbytes / received, nbytes / put_s, nbytes / get_s))
                bar.advance(task)
            lookups = look_up(store, keys)
            store.close()
            bar.update(task, description="the scheduler's thread")
            thread = on_thread(server.url, Path(name))
    measured = np.array(speeds[1:])  # the first one warms up
    stream_put, stream_get, put, get = (float(x) / 1e6 for x in np.median(measured, axis=0))
    result = {
        "put": float(np.median(measured[:, 2] / measured[:, 0])),
        "get": float(np.median(measured[:, 3] / measured[:, 1])),
        "put_mbs": put,
        "get_mbs": get,
        "stream_put_mbs": stream_put,
        "stream_get_mbs": stream_get,
        "lookups_per_s": lookups,
        "scheduler_ms": thread.whole_ms,
        "asked_ms": thread.asked_ms,
    }
    show("Pages in a remote store", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
