"""The contract of a remote store: values by key, in a place that many machines share.

A store knows nothing of pages. It keeps values for as long as it likes, may lose any of them, and
may give back other bytes than were put: whoever reads a value checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

Parts: TypeAlias = Sequence["bytes | memoryview"]
"""A value in parts, which are sent one behind the other from where they lie."""


class RefusedError(Exception):
    """The store does not let us in; the message is its own."""


class Outcome(Enum):
    """Outcome of a call for one key."""

    HIT = "hit"
    """The value is there, or was read."""
    MISS = "miss"
    """There is no such value."""
    BAD = "bad"
    """A value that is none of ours: of another type, or longer than any."""
    STORED = "stored"
    REFUSED = "refused"
    """The store does not take the value: it is full or read-only, or we may not write."""
    LATE = "late"
    """The deadline came before an answer."""
    DOWN = "down"
    """The store cannot be reached, or does not let us in."""


class RemoteKey(NamedTuple):
    """A value's key.

    Attributes:
        run: keys of one run lie on one server.
    """

    name: bytes
    run: bytes


class Got(NamedTuple):
    """Result of reading one value.

    Attributes:
        at: index of its key.
        nbytes: length of the value, which begins the buffer.
    """

    at: int
    outcome: Outcome
    nbytes: int = 0


class RemoteStore(Protocol):
    """A way to the place, for one thread.

    No call outlives its deadline, a time of ``time.monotonic()``, by more than it takes to notice.
    None raises for trouble with the place: each key has an outcome.
    """

    def check(self, deadline: float) -> None:
        """Try to reach the store.

        Raises:
            RefusedError: the store does not let us in.
            Exception: it cannot be reached.
        """

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        """Look values up: HIT, MISS, LATE or DOWN for each."""

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        """Read values, one after the other, in any order, into the same buffer.

        A value is in the buffer until the next one is asked for. Nothing is written to the buffer
        once the iterator is closed.

        Args:
            buffer: as long as the longest value.
        """

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        """Store values: STORED, REFUSED, LATE or DOWN for each. Until it returns the parts do not
        change."""

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        """Delete values; False if some may still be there. Those that only others may delete are
        not found by this store any more."""

    def close(self) -> None:
        """Give up the connections. Idempotent; afterwards the place is down."""
