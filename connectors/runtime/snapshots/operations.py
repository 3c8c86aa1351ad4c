"""Operations that take longer than a step. Each is a generator that yields its waits.

All operations run on the scheduler's thread. Between two steps, an operation runs until it has to
wait.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tiered_kv.json_fields import JsonObject
from tiered_kv.snapshot.manifest import SnapshotError

logger = logging.getLogger(__name__)

_Done = TypeVar("_Done")
LONGEST_WAIT_S = 300.0
"""Default limit of a wait for files or copies, seconds."""
OUTCOMES_KEPT = 256
"""Number of finished operations whose outcome is kept."""
MOST_AT_ONCE = 64
"""Maximum number of concurrent operations."""


class Wait(NamedTuple):
    """A wait that an operation yields.

    Attributes:
        doing: description of what the operation waits for.
        over: returns True once the wait has finished.
        limit_s: maximum duration of the wait, seconds.
    """

    doing: str
    over: Callable[[], bool]
    limit_s: float = LONGEST_WAIT_S


Steps: TypeAlias = Generator[Wait, None, JsonObject]
"""An operation. It returns its result, or raises ``SnapshotError`` with a message for the user."""


def file_work(doing: str, future: Future[_Done]) -> Generator[Wait, None, _Done]:
    """Wait for file work, and return its result. If the operation ends first, work that has not
    started is cancelled."""
    try:
        yield Wait(doing, future.done)
        return future.result()
    finally:
        future.cancel()


@dataclass(slots=True)
class _Operation:
    steps: Steps
    wait: Wait | None = None
    since: float = 0.0
    result: JsonObject | None = None
    why: str | None = None

    @property
    def under_way(self) -> bool:
        return self.result is None and self.why is None


class Operations:
    """The operations of an engine, by number.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = count(1)
        self._all: OrderedDict[int, _Operation] = OrderedDict()
        self._live: dict[int, _Operation] = {}

    @property
    def under_way(self) -> bool:
        """True while an operation is unfinished."""
        return bool(self._live)

    @property
    def full(self) -> bool:
        """True if no further operation may start now."""
        return len(self._live) >= MOST_AT_ONCE

    def begin(self, steps: Steps) -> int:
        """Start an operation. Returns its number."""
        number, operation = next(self._numbers), _Operation(steps)
        self._all[number] = self._live[number] = operation
        self._go_on(number, operation)
        over = [one for one, found in self._all.items() if not found.under_way]
        for old in over[: max(0, len(over) - OUTCOMES_KEPT)]:
            del self._all[old]
        return number

    def poll(self) -> None:
        """Check the wait of each operation, which also holds the pages that have arrived, and fail
        operations that have waited too long. No operation continues."""
        for number, operation in [*self._live.items()]:
            self._is_over(number, operation)

    def advance(self) -> None:
        """Continue every operation whose wait has finished."""
        for number, operation in [*self._live.items()]:
            if self._is_over(number, operation):
                self._go_on(number, operation)

    def _is_over(self, number: int, operation: _Operation) -> bool:
        """Return True if an operation's wait has finished. An operation that has waited too long,
        or whose wait's ``over`` raises, fails."""
        wait = operation.wait
        if wait is None:
            return True
        try:
            if wait.over():
                return True
        except Exception:
            self._fail(number, operation)
            return False
        if self._clock() - operation.since > wait.limit_s:
            self._end(number, operation, why=f"It took too long: {wait.doing}. Try again.")
        return False

    def _go_on(self, number: int, operation: _Operation) -> None:
        try:
            while True:
                wait = next(operation.steps)
                if not wait.over():
                    operation.wait, operation.since = wait, self._clock()
                    return
        except StopIteration as done:
            operation.result, operation.wait = done.value, None
            del self._live[number]
        except SnapshotError as error:
            self._end(number, operation, why=str(error))
        except Exception:
            self._fail(number, operation)

    def _fail(self, number: int, operation: _Operation) -> None:
        logger.exception("a snapshot operation failed")
        self._end(number, operation, why="The operation failed: see the engine's log.")

    def _end(self, number: int, operation: _Operation, why: str) -> None:
        operation.why, operation.wait = why, None  # the wait references everything that was held
        del self._live[number]
        try:
            operation.steps.close()
        except Exception:
            logger.exception("the cleanup of a snapshot operation failed")

    def end_all(self, why: str) -> None:
        """Fail every unfinished operation."""
        for number, operation in [*self._live.items()]:
            self._end(number, operation, why)

    def outcome(self, number: int) -> dict[str, Any]:
        """Return the state of an operation, as JSON."""
        operation = self._all.get(number)
        if operation is None:
            return {"state": "failed", "why": "The outcome of this operation is no longer stored."}
        if operation.why is not None:
            return {"state": "failed", "why": operation.why}
        if operation.result is not None:
            return {"state": "done", "result": operation.result.to_json()}
        return {"state": "running", "doing": operation.wait.doing if operation.wait else ""}
