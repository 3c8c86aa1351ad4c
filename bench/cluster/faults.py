"""Second turns elsewhere while the store has trouble, beside a replica that has no store at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tiered_kv.bench.servers.load import read_clock
from tiered_kv.testing.valkey import ValkeyServer
from tiered_kv.trace.trace_reader import TraceReader

from .proxy import Link, Proxy
from .replicas import Replica
from .turns import Answer, ask, shared_pages

ANSWER = 8
ADDED = 40
RECOVERY_S = 150.0
LOOKUPS_S = 0.1
"""Longest wait for answers of the store: twice 50 ms."""
SLACK_S = 0.02
TOLD_S = 10.0
LOOK_S, BUSY_SHARE, MOST_BUSY_S = 0.3, 0.1, 60.0
"""A replica is at rest if it used less than this share of a core in so many seconds. vLLM's worker
spins for a second after each step, and steps go on until all orders are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The store and the way to it."""

    server: ValkeyServer
    proxy: Proxy


Fault = Callable[[Store], None]


def _stop(store: Store) -> None:
    store.server.pause()


def _slow(store: Store) -> None:
    store.proxy.link = Link.SLOW


def _flip(store: Store) -> None:
    store.proxy.link = Link.FLIPS


def _fill(store: Store) -> None:
    store.server.talk(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
    store.server.talk(b"CONFIG", b"SET", b"maxmemory", b"1mb")


def _empty(store: Store) -> None:
    store.server.kill()
    store.server.start()


def _kill(store: Store) -> None:
    store.server.kill()


FAULTS: dict[str, Fault] = {
    "flipping": _flip,
    "slow": _slow,
    "stopped": _stop,
    "full": _fill,
    "restarted empty": _empty,
    "killed": _kill,
}
"""Faults of the store, which begin after the first turns and before the second ones."""


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

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def suffer(
    fault: str,
    store: Store,
    replicas: Sequence[Replica],
    prompts: Sequence[Sequence[int]],
    tell: Callable[[str], None] = lambda _: None,
) -> Trouble:
    """Ask first turns while all is well, then second ones in trouble; and mend it.

    Args:
        replicas: the one with the first turns, the one with the second ones, and one without a
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
    """Wait until nothing goes on behind an answer: the other replica has the same core.

    Raises:
        TimeoutError: the replica does not rest.
    """
    pid = replica.server.pid
    until = time.monotonic() + MOST_BUSY_S
    while pid is not None and time.monotonic() < until:
        before = read_clock(pid)
        time.sleep(LOOK_S)
        now = read_clock(pid)
        if before is None or now is None:
            return
        if now.own - before.own < BUSY_SHARE * (now.wall - before.wall):
            return
    raise TimeoutError(f"a replica without requests was busy for {MOST_BUSY_S:g} s")


def _waits(replica: Replica, fault: str, jobs: int) -> list[float]:
    """Seconds that each turn waited for pages, by the trace, once it tells of all jobs."""
    until = time.monotonic() + TOLD_S
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
    tell: Callable[[str], None] = lambda _: None,
) -> float:
    """Have the store work again, and wait until the second replica uses it; gives the seconds.

    Args:
        prompts: contexts to try it with; some are used up.

    Raises:
        TimeoutError: it does not.
    """
    store.server.go_on()
    store.proxy.link = Link.GOOD
    try:
        store.server.talk(b"PING")
    except OSError:
        store.server.start()
    store.server.talk(b"CONFIG", b"SET", b"maxmemory", b"0")
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
