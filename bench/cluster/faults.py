"""Second turns on another replica while the store has a fault, compared with a replica without a
store."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.output import Tick
from tiered_kv.bench.servers.load import read_clock
from tiered_kv.testing.valkey import ValkeyServer
from tiered_kv.trace.trace_reader import TraceReader

from .replicas import Replica

DELAY_S, BYTES_PER_S = 0.2, 1_000_000
PIECE, SLOW_PIECE = 64 << 10, 16 << 10
LONG = 1_000
"""Minimum length of a piece in which a byte is changed, in bytes. In a piece of this length, the
byte belongs to a value and not to the protocol's framing."""
ANSWER, ADDED = 8, 40
RECOVERY_S = 150.0
LOOKUPS_S, SLACK_S = 0.1, 0.02
"""Maximum wait for the store's answers (twice 50 ms), and the tolerance, seconds."""
TRACED_S = 10.0
POLL_S, BUSY_SHARE, MOST_BUSY_S = 0.3, 0.1, 60.0
"""A replica is idle if it used less than this fraction of a core for ``POLL_S`` seconds. vLLM's
worker spins for a second after each step, and steps continue until all store operations have
finished."""


class Link(Enum):
    """Quality of the link to the store."""

    GOOD = "good"
    SLOW = "slow"
    """A link with 200 ms of delay and 1 MB/s."""
    FLIPS = "flips"
    """One byte of every long piece of data from the store is changed."""


@dataclass(slots=True)
class Proxy:
    """A loopback port that forwards to another port; see ``proxied``.

    Attributes:
        target: port to which it forwards.
        port: port on which it listens.
        link: current quality of the link.
    """

    target: int
    port: int = 0
    link: Link = Link.GOOD

    async def connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Forward both directions of a connection until one of them ends."""
        with suppress(OSError):
            there = asyncio.open_connection("127.0.0.1", self.target)
            back, to = await asyncio.wait_for(there, 1.0)
            ways = [self._carry(reader, to), self._carry(back, writer, answers=True)]
            await asyncio.gather(*ways, return_exceptions=True)
        writer.close()

    async def _carry(self, source: StreamReader, to: StreamWriter, answers: bool = False) -> None:
        with suppress(OSError):
            while data := await source.read(SLOW_PIECE if self.link is Link.SLOW else PIECE):
                if self.link is Link.SLOW:
                    await asyncio.sleep((0.0 if answers else DELAY_S) + len(data) / BYTES_PER_S)
                elif self.link is Link.FLIPS and answers and len(data) >= LONG:
                    at = len(data) // 2
                    data = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
                to.write(data)
                await to.drain()
        to.close()


@contextmanager
def proxied(target: int) -> Iterator[Proxy]:
    """Run a proxy for the port ``target`` on its own thread until the block ends."""
    proxy = Proxy(target)
    with asyncio.Runner() as runner:  # cancels open connections at the end
        loop = runner.get_loop()
        listening = runner.run(_listen(proxy))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield proxy
        finally:
            loop.call_soon_threadsafe(listening.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


async def _listen(proxy: Proxy) -> asyncio.Server:
    server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    proxy.port = int(server.sockets[0].getsockname()[1])
    return server


@dataclass(frozen=True, slots=True)
class Store:
    """A store, and the link between the store and its clients."""

    server: ValkeyServer
    proxy: Proxy

    def link(self, link: Link) -> None:
        """Set the quality of the link."""
        self.proxy.link = link

    def fill(self) -> None:
        """Lower the memory limit so that no new value fits."""
        self.server.talk(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        self.server.talk(b"CONFIG", b"SET", b"maxmemory", b"1mb")

    def restart(self) -> None:
        """Kill the server and start it again, empty."""
        self.server.kill()
        self.server.start()

    def mend(self) -> None:
        """Undo every fault."""
        self.server.go_on()
        self.link(Link.GOOD)
        try:
            self.server.talk(b"PING")
        except OSError:
            self.server.start()
        self.server.talk(b"CONFIG", b"SET", b"maxmemory", b"0")


FAULTS: dict[str, Callable[[Store], None]] = {
    "flipping": lambda store: store.link(Link.FLIPS),
    "slow": lambda store: store.link(Link.SLOW),
    "stopped": lambda store: store.server.pause(),
    "full": Store.fill,
    "restarted empty": Store.restart,
    "killed": lambda store: store.server.kill(),
}
"""Faults of the store. They start after the first turns and before the second turns."""


def longer(prompt: Sequence[int]) -> list[int]:
    """Return the prompt of the second turn, from the prompt of the first."""
    return [*prompt, *prompt[50 : 50 + ADDED]]


def suffer(
    fault: str,
    store: Store,
    replicas: Sequence[Replica],
    prompts: Sequence[Sequence[int]],
    tick: Tick,
) -> dict[str, Any]:
    """Send first turns while the store works, and second turns while it has the fault.

    Args:
        fault: name in ``FAULTS``.
        replicas: one for the first turns, one for the second turns, and one without a store that
            shares the second replica's core.
        prompts: prompts of the first turns.

    Returns:
        ``right``: True if all answers equal those of the replica without a store.
        ``remote_tokens``: prompt tokens that came from the store nonetheless.
        ``longest_wait_ms``: longest time that a turn waited for the store; NaN if the trace
            contains none of the turns.
        ``in_time``: True if the trace contains all turns, and none waited longer than 120 ms plus
            the longest time to compute a prompt.
        ``p95_ratio``, ``p50_ratio``: quantiles of times to first token, divided by the same
            quantiles without a store.
        ``noise``: P95 over median of the times to first token without a store. About 1 on a quiet
            machine, because all turns compute the same number of tokens.
        ``first_ms``, ``alone_ms``: time to first token of each second turn, with and without a
            store.
    """
    first, second, alone = replicas
    turns = {f"{fault} {at}": prompt for at, prompt in enumerate(prompts)}
    for job, prompt in turns.items():
        tick(f"{fault}: first turns")
        first.ask(job, prompt)
    first.shared_pages()
    for replica in replicas:
        _rest(replica)
    FAULTS[fault](store)
    ours, theirs = list[Answer](), list[Answer]()
    for at, (job, prompt) in enumerate(turns.items()):
        tick(f"{fault}: second turns")
        pair = [(second, ours), (alone, theirs)]
        for replica, answers in pair if at % 2 == 0 else pair[::-1]:
            answers.append(replica.ask(job, longer(prompt)))
            _rest(replica)
    right = True
    for job, prompt in turns.items():
        tick(f"{fault}: answers compared")
        here, there = (one.ask(job, longer(prompt), ANSWER) for one in (second, alone))
        right = right and here.tokens == there.tokens
    ms, alone_ms = ([one.ms for one in answers] for answers in (ours, theirs))
    p50, p95 = np.quantile(ms, (0.5, 0.95))
    alone_p50, alone_p95 = np.quantile(alone_ms, (0.5, 0.95))
    waited = waits(second, fault, len(prompts))
    most_s = LOOKUPS_S + max(alone_ms) / 1e3 + SLACK_S
    return {
        "right": right,
        "remote_tokens": sum(one.sources.get("remote_tokens", 0) for one in ours),
        "longest_wait_ms": 1e3 * max(waited, default=math.nan),
        "in_time": len(waited) >= len(prompts) and max(waited) <= most_s,
        "p95_ratio": float(p95 / alone_p95),
        "p50_ratio": float(p50 / alone_p50),
        "noise": float(alone_p95 / alone_p50),
        "first_ms": list(map(round, ms)),
        "alone_ms": list(map(round, alone_ms)),
    }


def _rest(replica: Replica) -> None:
    """Wait until the replica is idle, because the work after its answer would slow the replica that
    shares its core.

    Raises:
        TimeoutError: the replica stays busy.
    """
    pid = replica.server.pid or 0
    until = time.monotonic() + MOST_BUSY_S
    while time.monotonic() < until:
        before = read_clock(pid)
        time.sleep(POLL_S)
        now = read_clock(pid)
        if before is None or now is None:
            return
        if now.own - before.own < BUSY_SHARE * (now.wall - before.wall):
            return
    raise TimeoutError(f"a replica without requests was busy for {MOST_BUSY_S:g} s")


def waits(replica: Replica, fault: str, jobs: int) -> list[float]:
    """Return how long each turn waited for pages, in seconds, from the trace. Waits until the trace
    contains ``jobs`` turns, for at most ``TRACED_S`` seconds.
    """
    until = time.monotonic() + TRACED_S
    while True:
        turns = [(turn.job or "", turn.times.pages_s) for turn in TraceReader(replica.trace)]
        found = [pages_s for job, pages_s in turns if job.startswith(f"{fault} ")]
        if len(found) >= jobs or time.monotonic() > until:
            return found
        time.sleep(0.1)


def mend(
    store: Store,
    first: Replica,
    second: Replica,
    prompts: Sequence[Sequence[int]],
    tick: Tick,
) -> float:
    """Repair the store, and wait until the second replica reads from it. Returns the wait, seconds.

    Args:
        prompts: contexts for the trials, each used once.

    Raises:
        TimeoutError: the replica does not read from the repaired store.
    """
    store.mend()
    began = time.monotonic()
    for at, prompt in enumerate(prompts):
        tick("the store works again")
        job = f"mended {began} {at}"
        first.ask(job, prompt)
        first.shared_pages()
        found = second.ask(job, longer(prompt))
        if found.sources.get("remote_tokens", 0):
            return time.monotonic() - began
        if time.monotonic() - began > RECOVERY_S:
            break
        time.sleep(1.0)
    raise TimeoutError("the store is available again, but the replica does not read from it")
