"""Reads the tool calls of finished turns, on a separate thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from tiered_kv.machine import leave_core
from tiered_kv.policies.base import ToolUse
from tiered_kv.policies.tools.calls import ToolCall, after_thinking, find_calls
from tiered_kv.policies.tools.tool_use import tool_use

logger = logging.getLogger(__name__)

THREAD_NAME = "tiered-kv-tools"
MAX_QUEUED = 256
MAX_TOKENS = 1_000
"""Number of tokens read from the end of an answer. Most tool calls are shorter."""
MAX_TOKENS_AGAIN = 8_000
"""Number of tokens read if the last ``MAX_TOKENS`` tokens contain no complete call, for example
because a call that writes a file starts earlier."""

UNREAD = ToolUse(path=("(unread)",))
"""Tool use of a turn whose answer could not be read."""

_END_OF_TURN = re.compile(
    r"(?:<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|user|observation)\|>"
    r"|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>)\s*\Z"
)


class ToolReader:
    """Extracts the tool use from the token ids of finished answers.

    ``read`` and ``take`` are called on one thread, the scheduler's. They neither block nor raise.

    Args:
        load_tokenizer: called once, on the reader's thread, when the thread starts.

    Attributes:
        answers: results that ``take`` will return; the scheduler checks in every step whether there
            are any.
        dropped: number of answers refused because ``MAX_QUEUED`` were waiting.
        errors: number of failures: there is no tokenizer, or it raised.
    """

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self.dropped = 0
        self.errors = 0
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._failed = False
        self._queue: queue.Queue[tuple[str, Sequence[int]] | None] = queue.Queue(MAX_QUEUED)
        self.answers: deque[tuple[str, ToolUse]] = deque()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        """Queue an answer. Returns False if too many answers are queued.

        Args:
            ticket: identifies the answer in the results of ``take``.
            token_ids: the end of the answer; the last ``MAX_TOKENS_AGAIN`` are used.
        """
        try:
            self._queue.put_nowait((ticket, tuple(token_ids[-MAX_TOKENS_AGAIN:])))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def take(self) -> list[tuple[str, ToolUse]]:
        """Return the ticket and the tool use of each answer read since the last call, in the order
        of ``read``."""
        if not self.answers:
            return []
        taken = []
        while self.answers:
            taken.append(self.answers.popleft())
        return taken

    def close(self) -> None:
        """Stop the thread. Queued answers are not read. Idempotent."""
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
        self._thread.join()

    def _run(self) -> None:
        leave_core()
        try:
            self._tokenizer = self._load_tokenizer()
        except Exception as error:
            self.errors += 1
            logger.warning(
                "tool calls cannot be read, because the tokenizer cannot be loaded: %s", error
            )
        while True:
            item = self._queue.get()
            if item is None:
                return
            ticket, token_ids = item
            self.answers.append((ticket, self._read(token_ids)))

    def _read(self, token_ids: Sequence[int]) -> ToolUse:
        if self._tokenizer is None:
            return UNREAD
        try:
            calls = self._calls(token_ids[-MAX_TOKENS:])
            if not calls and len(token_ids) > MAX_TOKENS:
                calls = self._calls(token_ids)
            return tool_use(calls)
        except Exception:
            self.errors += 1
            if not self._failed:
                self._failed = True
                logger.exception("the tool calls of an answer cannot be read (logged once)")
            return UNREAD

    def _calls(self, token_ids: Sequence[int]) -> Sequence[ToolCall]:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return find_calls(_END_OF_TURN.sub("", after_thinking(text)))


class ToolCalls(Protocol):
    """Reads the tool calls of answers, outside the scheduler's thread. No method blocks or raises.

    Attributes:
        answers: results that ``take`` will return; the scheduler checks in every step whether there
            are any.
        dropped: number of answers refused because too many were queued.
        errors: number of failures.
    """

    @property
    def answers(self) -> Collection[tuple[str, ToolUse]]: ...
    @property
    def dropped(self) -> int: ...
    @property
    def errors(self) -> int: ...

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        """Queue an answer. Returns False if it will not be read."""
        ...

    def take(self) -> Iterable[tuple[str, ToolUse]]:
        """Return the ticket and the tool use of each answer read since the last call, in the order
        of ``read``."""
        ...

    def close(self) -> None:
        """Stop reading. Idempotent."""
        ...


class NoTools:
    """Reads no answers, because the policy does not use tools, or answers cannot be decoded."""

    answers: Collection[tuple[str, ToolUse]] = ()
    dropped = 0
    errors = 0

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        return False

    def take(self) -> Iterable[tuple[str, ToolUse]]:
        return ()

    def close(self) -> None:
        pass
