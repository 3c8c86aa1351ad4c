"""A tier shared by many engines: real pages in a store that fails in every way its contract allows.

It is configured by ``TIERED_KV_TIERS=tests.runtime.pages.troubled_place:…``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.config import TierConfig
from tiered_kv.remote.base import Got, Outcome, Parts, RemoteKey
from tiered_kv.storage.base import PageStore, StoreSite
from tiered_kv.storage.remote_pages import NoPages, RemotePages
from tiered_kv.tiers import Knowledge, TierId, TierSpec

HOLD_S = 0.02
"""Seconds for which a call is delayed."""


@dataclass
class Place:
    """Values of all engines, and the current faults.

    Attributes:
        values: the stored values by name.
        answers: injected outcome of each key of the next calls; None for a correct answer.
        read_only: True if every write is refused.
        stored_late: True if writes that are reported as late are stored nevertheless.
        open: cleared to delay the next call.
        retry_s: as for ``RemotePages``.
        hits: number of values that were read completely.
    """

    values: dict[bytes, bytes] = field(default_factory=dict)
    answers: list[Outcome | None] = field(default_factory=list)
    read_only: bool = False
    stored_late: bool = False
    open: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    retry_s: float | None = None
    hits: int = 0

    def __post_init__(self) -> None:
        self.open.set()

    def befall(self, rng: random.Random) -> None:
        """Inject a random fault between two steps."""
        with self.lock:
            names = sorted(name for name, value in self.values.items() if value)
            some = rng.sample(names, min(len(names), rng.choice([1, 3, 1000])))
            match rng.randrange(9):
                case 0:  # evicted by other clients
                    for name in some:
                        del self.values[name]
                case 1:
                    for name in some:
                        changed = bytearray(self.values[name])
                        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                        self.values[name] = bytes(changed)
                case 2:  # the values of several pages are swapped
                    moved = [self.values[name] for name in some]
                    self.values.update(zip(some, moved[1:] + moved[:1], strict=True))
                case 3:
                    for name in some:
                        value = self.values[name]
                        self.values[name] = rng.choice([value[:-1], b"", value + b"x", value * 9])
                case 4:
                    self.read_only = not self.read_only
                case 5:
                    self.stored_late = not self.stored_late
                case 6:
                    self.open.clear()
                case _:
                    outcome = rng.choice([*Outcome])
                    self.answers += [outcome] * rng.choice([1, 3]) + [None] * rng.randrange(3)

    def recover(self) -> None:
        """End all faults. Damaged values stay damaged."""
        with self.lock:
            self.answers.clear()
            self.read_only = self.stored_late = False
            self.open.set()

    def next_answer(self, *possible: Outcome) -> Outcome | None:
        """Return the injected outcome of the next call, or None for a correct answer."""
        if not self.open.wait(HOLD_S):
            self.open.set()
        with self.lock:
            answer = self.answers.pop(0) if self.answers else None
        return answer if answer in possible else None


PLACE = Place()


def renew() -> Place:
    """Replace the global place with an empty one that has no faults, and return it."""
    global PLACE
    PLACE = Place()
    return PLACE


class Way:
    """One engine's connection to the place, which implements ``RemoteStore``."""

    def __init__(self) -> None:
        self._place = PLACE
        self._closed = False

    def check(self, deadline: float) -> None:
        """Does nothing, because the place can always be reached."""

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        answer = self._next(Outcome.HIT, Outcome.MISS, Outcome.LATE, Outcome.DOWN)
        with self._place.lock:
            there = [key.name in self._place.values for key in keys]
        return [answer or (Outcome.HIT if one else Outcome.MISS) for one in there]

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        for at, key in enumerate(keys):
            answer = self._next(Outcome.MISS, Outcome.BAD, Outcome.LATE, Outcome.DOWN)
            with self._place.lock:
                value = self._place.values.get(key.name)
            if answer is not None or value is None:
                yield Got(at, answer or Outcome.MISS)
            elif len(value) > len(buffer):
                yield Got(at, Outcome.BAD)
            else:
                buffer[: len(value)] = value
                self._place.hits += 1
                yield Got(at, Outcome.HIT, len(value))

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        found = []
        for key, parts in values:
            answer = self._next(Outcome.REFUSED, Outcome.LATE, Outcome.DOWN)
            with self._place.lock:
                if self._place.read_only:
                    answer = answer or Outcome.REFUSED
                if answer is None or (answer is Outcome.LATE and self._place.stored_late):
                    self._place.values[key.name] = b"".join(map(bytes, parts))
            found.append(answer or Outcome.STORED)
        return found

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        if self._closed:
            return False
        with self._place.lock:
            for key in keys:
                self._place.values.pop(key.name, None)
        return True

    def close(self) -> None:
        self._closed = True

    def _next(self, *possible: Outcome) -> Outcome | None:
        return Outcome.DOWN if self._closed else self._place.next_answer(*possible)


class OwnTier:
    """The faulty shared store, as a tier that receives the pages evicted from CPU memory."""

    spec = TierSpec(TierId("place"), Knowledge.ASKED)

    def __init__(self, config: TierConfig) -> None:
        self.bandwidth = 1e9
        self._codec = config.codec

    def open(self, site: StoreSite) -> PageStore:
        if not site.lasting:
            return NoPages()
        codec = parse(self._codec)(site.page_format)
        return RemotePages(Way, site, codec, from_table, self.bandwidth, PLACE.retry_s)


class SharedTier(OwnTier):
    """The faulty shared store, as a tier through which engines share contexts."""

    spec = TierSpec(TierId("place"), Knowledge.ASKED, shared=True, in_runs=True)
