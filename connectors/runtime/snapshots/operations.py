"""Operations that take longer than a step: each is a generator that yields what it waits for.

One thread, the scheduler's: an operation goes on between two steps, for as long as it has something
to do without waiting.
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
"""Longest wait of an operation for files or copies, seconds."""
OUTCOMES_KEPT = 256
"""Operations that are over and can be asked for."""
MOST_AT_ONCE = 64
"""Operations that are under way at once."""


class Wait(NamedTuple):
    """A wait of an operation.

    Attributes:
        doing: what goes on meanwhile, in words.
        over: tells whether it is over.
        limit_s: longest time that it may take, seconds.
    """

    doing: str
    over: Callable[[], bool]
    limit_s: float = LONGEST_WAIT_S


Steps: TypeAlias = Generator[Wait, None, JsonObject]
"""An operation. It returns its result, or raises ``SnapshotError`` with a sentence."""


def file_work(doing: str, future: Future[_Done]) -> Generator[Wait, None, _Done]:
    """Wait for work on files, and return its result. Work that has not started is cancelled if the
    operation ends meanwhile."""
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
        """True if an operation is not over."""
        return bool(self._live)

    @property
    def full(self) -> bool:
        """True if no more may begin now."""
        return len(self._live) >= MOST_AT_ONCE

    def begin(self, steps: Steps) -> int:
        """Begin an operation; returns its number."""
        number, operation = next(self._numbers), _Operation(steps)
        self._all[number] = self._live[number] = operation
        self._go_on(number, operation)
        over = [one for one, found in self._all.items() if not found.under_way]
        for old in over[: max(0, len(over) - OUTCOMES_KEPT)]:
            del self._all[old]
        return number

    def poll(self) -> None:
        """Let every operation hold what has arrived for it, without going on."""
        for number, operation in [*self._live.items()]:
            self._is_over(number, operation)

    def advance(self) -> None:
        """Go on with every operation whose wait is over."""
        for number, operation in [*self._live.items()]:
            if self._is_over(number, operation):
                self._go_on(number, operation)

    def _is_over(self, number: int, operation: _Operation) -> bool:
        """True if an operation's wait is over. An operation that waits for too long, or whose test
        fails, is ended."""
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
        logger.exception("an operation on a snapshot failed")
        self._end(number, operation, why="It failed; the engine's log says why.")

    def _end(self, number: int, operation: _Operation, why: str) -> None:
        operation.why, operation.wait = why, None  # the wait refers to all that was held
        del self._live[number]
        try:
            operation.steps.close()
        except Exception:
            logger.exception("an operation on a snapshot could not be undone")

    def end_all(self, why: str) -> None:
        """Have every operation fail that is under way."""
        for number, operation in [*self._live.items()]:
            self._end(number, operation, why)

    def outcome(self, number: int) -> dict[str, Any]:
        """State of an operation, as JSON."""
        operation = self._all.get(number)
        if operation is None:
            return {"state": "failed", "why": "Nothing is known of this operation any more."}
        if operation.why is not None:
            return {"state": "failed", "why": operation.why}
        if operation.result is not None:
            return {"state": "done", "result": operation.result.to_json()}
        return {"state": "running", "doing": operation.wait.doing if operation.wait else ""}
