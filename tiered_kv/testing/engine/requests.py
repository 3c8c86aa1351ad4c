"""Requests of the engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from .blocks import Block, chain


class State(Enum):
    """Stages of a request."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    ENDED = auto()


class Outcome(Enum):
    """Ways in which a request ends."""

    LENGTH = auto()
    STOP = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the answer to it.

    Attributes:
        tokens: prompt and answer.
        hashes: hashes of its full blocks so far.
        table: its blocks, first to last.
        computed: number of tokens whose KV is in the blocks.
        published: number of its full blocks that other requests can find.
        unwanted: True if the KV being loaded for it is no longer needed.
        params: the client's hints, unread.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    arrived_at: float
    params: object = None
    salt: str | None = None
    stop_ids: Collection[int] = ()
    state: State = State.WAITING
    outcome: Outcome | None = None
    tokens: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    table: list[Block] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    preemptions: int = 0
    unwanted: bool = False

    @property
    def output(self) -> list[int]:
        """Its answer so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def block_ids(self) -> list[int]:
        """Ids of its blocks."""
        return [block.block_id for block in self.table]

    def append(self, tokens: list[int], block_size: int) -> None:
        """Append tokens, and hash the blocks that they fill."""
        self.tokens += tokens
        for end in range((len(self.hashes) + 1) * block_size, len(self.tokens) + 1, block_size):
            before = self.hashes[-1] if self.hashes else repr(self.salt).encode()
            self.hashes.append(chain(before, self.tokens[end - block_size : end]))

    def verdict(self) -> Outcome | None:
        """The outcome after its last token; None if it continues."""
        if self.tokens[-1] in self.stop_ids:
            return Outcome.STOP
        return Outcome.LENGTH if len(self.output) >= self.max_tokens else None
