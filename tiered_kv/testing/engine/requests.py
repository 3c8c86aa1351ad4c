"""Requests of the engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from .blocks import Block, chain


class State(Enum):
    """Stage of a request."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    ENDED = auto()


class Outcome(Enum):
    """Reason why a request ended."""

    LENGTH = auto()
    STOP = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the answer to it.

    Attributes:
        params: the client's hints, which the engine does not read.
        salt: requests share KV only under the same salt.
        tokens: prompt and answer.
        hashes: hashes of the request's full blocks so far.
        table: the request's blocks, in the order of its tokens.
        computed: number of tokens whose KV is in the blocks.
        published: number of full blocks that other requests can find.
        unwanted: True if the KV that is being loaded is no longer needed.
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
        """The answer so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def block_ids(self) -> list[int]:
        """Ids of the request's blocks."""
        return [block.block_id for block in self.table]

    def append(self, tokens: list[int], block_size: int) -> None:
        """Append tokens, and hash the blocks that they fill."""
        self.tokens += tokens
        for end in range((len(self.hashes) + 1) * block_size, len(self.tokens) + 1, block_size):
            before = self.hashes[-1] if self.hashes else repr(self.salt).encode()
            self.hashes.append(chain(before, self.tokens[end - block_size : end]))

    def verdict(self) -> Outcome | None:
        """Return the outcome after the last token; None if the request continues."""
        if self.tokens[-1] in self.stop_ids:
            return Outcome.STOP
        return Outcome.LENGTH if len(self.output) >= self.max_tokens else None
