"""Second turns on another replica while the store has a fault, compared with a replica without a
store."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

import numpy as np

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.servers.load import read_clock
from tiered_kv.testing.valkey import ValkeyServer
from tiered_kv.trace.trace_reader import TraceReader

from .replicas import Replica
from .turns import ask, shared_pages

DELAY_S = 0.2
BYTES_PER_S = 1_000_000
PIECE = 64 << 10
SLOW_PIECE = 16 << 10
LONG = 1_000
"""Length of a piece in which a byte is flipped: in values, not in their framing."""
ANSWER = 8
ADDED = 40
RECOVERY_S = 150.0
LOOKUPS_S = 0.1
"""Longest wait for answers of the store: twice 50 ms."""
SLACK_S = 0.02
TRACED_S = 10.0
POLL_S, BUSY_SHARE, MOST_BUSY_S = 0.3, 0.1, 60.0
"""A replica is at rest if it used less than this fraction of a core for ``POLL_S`` seconds. vLLM's
worker spins for a second after each step, and steps continue until all orders have finished."""


class Link(Enum):
    """Quality of the link."""

    GOOD = "good"
    SLOW = "slow"
    """200 ms later, at 1 MB/s."""
    FLIPS = "flips"
    """One byte of every long piece from the store is changed."""


class Proxy:
    """A port that leads to another one until the block ends.

    Attributes:
        port: port on which it listens.
        link: quality of the link from now on.
    """

    def __init__(self, target: int) -> None:
        self.link = Link.GOOD
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        for end in [self._listener, *self._ends]:
            _shut(end)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                back = socket.create_connection(("127.0.0.1", self._target), 1.0)
                back.settimeout(None)
            except OSError:
                client.close()
                continue
            for end in (client, back):  # or small pieces wait 40 ms for an acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends |= {client, back}
            self._start(self._carry, client, back, False)
            self._start(self._carry, back, client, True)

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(SLOW_PIECE if self.link is Link.SLOW else PIECE):
                if self.link is Link.SLOW:
                    time.sleep((0.0 if answers else DELAY_S) + len(data) / BYTES_PER_S)
                elif self.link is Link.FLIPS and answers and len(data) >= LONG:
                    at = len(data) // 2
                    data = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
                target.sendall(data)
        for end in (source, target):
            _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The store and the path to it."""

    server: ValkeyServer
    proxy: Proxy

    def link(self, link: Link) -> None:
        """Change the link."""
        self.proxy.link = link

    def fill(self) -> None:
        """Leave no memory for values."""
        self.server.talk(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        self.server.talk(b"CONFIG", b"SET", b"maxmemory", b"1mb")

    def restart(self) -> None:
        """Kill it and start it again."""
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
"""Faults of the store, which start after the first turns and before the second ones."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Figures of one fault.

    Attributes:
        right: all answers are those of the replica without a store.
        remote_tokens: tokens of prompts that came from the store nonetheless.
        longest_wait_ms: longest time that a turn waited for the store.
        in_time: none waited longer than it may: for answers 100 ms, for pages as long as computing
            takes, and 20 ms.
        p95_ratio: P95 of first tokens over that without a store.
        p50_ratio: the same of medians.
        noise: P95 of first tokens without a store over their median. All of them compute as much,
            so this is the machine's part, and 1 on a quiet one.
        first_ms, alone_ms: the first tokens themselves, with a store and without.
    """

    right: bool
    remote_tokens: int
    longest_wait_ms: float
    in_time: bool
    p95_ratio: float
    p50_ratio: float
    noise: float
    first_ms: list[int]
    alone_ms: list[int]


def suffer(
    fault: str,
    store: Store,
    replicas: Sequence[Replica],
    prompts: Sequence[Sequence[int]],
    tell: Callable[[str], None],
) -> Trouble:
    """Send first turns while the store works, then second ones while it has the fault.

    Args:
        replicas: the one for the first turns, the one for the second ones, and one without a
            store, on the same core as the second.
    """
    first, second, alone = replicas
    longer = [[*prompt, *prompt[50 : 50 + ADDED]] for prompt in prompts]
    for at, prompt in enumerate(prompts):
        tell(f"{fault}: first turns")
        ask(first.client, f"{fault} {at}", prompt)
    shared_pages(first.client)
    for replica in replicas:
        _rest(replica)
    FAULTS[fault](store)
    ours: list[Answer] = []
    theirs: list[Answer] = []
    right = True
    for at, prompt in enumerate(longer):
        tell(f"{fault}: second turns")
        pair = [(second, ours), (alone, theirs)]
        for replica, answers in pair if at % 2 == 0 else pair[::-1]:
            answers.append(ask(replica.client, f"{fault} {at}", prompt))
            _rest(replica)
    for at, prompt in enumerate(longer):
        tell(f"{fault}: answers compared")
        both = [
            ask(replica.client, f"{fault} {at}", prompt, answer=ANSWER).tokens
            for replica in (second, alone)
        ]
        right = right and both[0] == both[1]
    ms = [[one.ms for one in answers] for answers in (ours, theirs)]
    ratios = [float(np.quantile(ms[0], q) / np.quantile(ms[1], q)) for q in (0.95, 0.5)]
    waits = _waits(second, fault, len(prompts))
    most_s = LOOKUPS_S + max(ms[1]) / 1e3 + SLACK_S
    return Trouble(
        right=right,
        remote_tokens=sum(one.sources.get("remote_tokens", 0) for one in ours),
        longest_wait_ms=1e3 * max(waits, default=math.nan),
        in_time=len(waits) >= len(prompts) and max(waits) <= most_s,
        p95_ratio=ratios[0],
        p50_ratio=ratios[1],
        noise=float(np.quantile(ms[1], 0.95) / np.median(ms[1])),
        first_ms=[round(one) for one in ms[0]],
        alone_ms=[round(one) for one in ms[1]],
    )


def _rest(replica: Replica) -> None:
    """Wait until the work after an answer is done, since the other replica has the same core.

    Raises:
        TimeoutError: the replica stays busy.
    """
    pid = replica.server.pid
    until = time.monotonic() + MOST_BUSY_S
    while pid is not None and time.monotonic() < until:
        before = read_clock(pid)
        time.sleep(POLL_S)
        now = read_clock(pid)
        if before is None or now is None:
            return
        if now.own - before.own < BUSY_SHARE * (now.wall - before.wall):
            return
    raise TimeoutError(f"a replica without requests was busy for {MOST_BUSY_S:g} s")


def _waits(replica: Replica, fault: str, jobs: int) -> list[float]:
    """Seconds that each turn waited for pages, by the trace, once all jobs are in it."""
    until = time.monotonic() + TRACED_S
    while True:
        found = [
            turn.times.pages_s
            for turn in TraceReader(replica.trace)
            if turn.job is not None and turn.job.startswith(f"{fault} ")
        ]
        if len(found) >= jobs or time.monotonic() > until:
            return found
        time.sleep(0.1)


def mend(
    store: Store,
    first: Replica,
    second: Replica,
    prompts: Sequence[Sequence[int]],
    tell: Callable[[str], None],
) -> float:
    """Repair the store, and wait until the second replica uses it; returns the seconds.

    Args:
        prompts: contexts to try it with, each once.

    Raises:
        TimeoutError: it is not used.
    """
    store.mend()
    began = time.monotonic()
    for at, prompt in enumerate(prompts):
        tell("the store works again")
        job = f"mended {began} {at}"
        ask(first.client, job, prompt)
        shared_pages(first.client)
        found = ask(second.client, job, [*prompt, *prompt[50 : 50 + ADDED]])
        if found.sources.get("remote_tokens", 0):
            return time.monotonic() - began
        if time.monotonic() - began > RECOVERY_S:
            break
        time.sleep(1.0)
    raise TimeoutError("the store works again, and is not used")
