"""The contract of readers of tool calls, and the reader that reads none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from tiered_kv.policies.base import ToolUse


class ToolCalls(Protocol):
    """Reads the tool calls of answers, off the scheduler's thread. Nothing blocks or raises.

    Attributes:
        answers: the answers that ``take`` will give, to be looked at in every step.
        dropped: answers refused since too many were queued.
        errors: failures while reading.
    """

    @property
    def answers(self) -> Collection[tuple[str, ToolUse]]: ...
    @property
    def dropped(self) -> int: ...
    @property
    def errors(self) -> int: ...

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        """Queue an answer; False if it will not be read."""
        ...

    def take(self) -> Iterable[tuple[str, ToolUse]]:
        """Tool calls read since the last call, by ticket, in the order of ``read``."""
        ...

    def close(self) -> None:
        """Stop reading. Idempotent."""
        ...


class NoTools:
    """Reads nothing: the policy makes no use of tools, or answers cannot be decoded."""

    answers: Collection[tuple[str, ToolUse]] = ()
    dropped = 0
    errors = 0

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        return False

    def take(self) -> Iterable[tuple[str, ToolUse]]:
        return ()

    def close(self) -> None:
        pass
