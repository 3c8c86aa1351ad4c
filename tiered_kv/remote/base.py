"""The contract of a remote store: values by key, in a store that many machines share.

A store has no notion of pages. It keeps values for any length of time, may lose any value, and may
return other bytes than were stored, so the reader of a value must check it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

Parts: TypeAlias = Sequence["bytes | memoryview"]
"""A value in parts, which are sent consecutively without copying."""


class RefusedError(Exception):
    """The store refuses access. The message is the store's own error."""


class Outcome(Enum):
    """Outcome of a call for one key."""

    HIT = "hit"
    """The value exists, or was read."""
    MISS = "miss"
    """There is no such value."""
    BAD = "bad"
    """The value was not written by this package: it has another type, or is too long."""
    STORED = "stored"
    REFUSED = "refused"
    """The store does not accept the value: it is full or read-only, or writing is not permitted."""
    LATE = "late"
    """The deadline passed before an answer arrived."""
    DOWN = "down"
    """The store cannot be reached, or refuses access."""


class RemoteKey(NamedTuple):
    """A value's key.

    Attributes:
        run: name of the run; keys of one run are stored on one server.
    """

    name: bytes
    run: bytes


class Got(NamedTuple):
    """Result of reading one value.

    Attributes:
        at: index of its key.
        nbytes: length of the value, which is at the start of the buffer, bytes.
    """

    at: int
    outcome: Outcome
    nbytes: int = 0


class RemoteStore(Protocol):
    """A connection to the store, for one thread.

    A deadline is a time of ``time.monotonic()``. Calls end as soon as they notice that their
    deadline has passed. They do not raise if the store fails, but report an outcome for each key.
    """

    def check(self, deadline: float) -> None:
        """Try to reach the store.

        Raises:
            RefusedError: the store refuses access.
            Exception: the store cannot be reached.
        """

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        """Look up values. Returns HIT, MISS, LATE or DOWN for each key."""

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        """Read values one after another, in any order, into the same buffer. Yields HIT, MISS, BAD,
        LATE or DOWN for each key.

        A value is in the buffer until the next value is requested. Nothing is written to the buffer
        once the iterator is closed.

        Args:
            buffer: memory at least as long as the longest value.
        """

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        """Store values. Returns STORED, REFUSED, LATE or DOWN for each value. The parts must not
        change until the call returns."""

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        """Delete values. Returns False if some values may still exist. Values that only another
        process can delete are no longer found by this store."""

    def close(self) -> None:
        """Close the connections. Idempotent. Later calls treat the store as down."""
