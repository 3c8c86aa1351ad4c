"""KV that can be checked: the KV of each token is a function of all KV before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

CELL = 8
"""Size of a token's KV, bytes."""
VOCABULARY = 1000

Cells = NDArray[np.uint8]


class WrongKV(AssertionError):
    """The model attended to bytes that are not the KV of its context."""


def extend(cells: bytearray, tokens: Iterable[int]) -> None:
    """Append the KV of tokens to ``cells``, which contains the KV of the context before these
    tokens."""
    attended = xxhash.xxh64(bytes(cells))
    for token in tokens:
        cell = attended.copy()
        cell.update(token.to_bytes(4, "little"))
        digest = cell.digest()
        cells += digest
        attended.update(digest)


def kv(tokens: Iterable[int]) -> Cells:
    """Return the KV of a context, uint8 ``[tokens, CELL]``."""
    cells = bytearray()
    extend(cells, tokens)
    return np.frombuffer(bytes(cells), dtype=np.uint8).reshape(-1, CELL)


def sample(cells: Cells) -> int:
    """Return the token that follows a context with this KV, uint8 ``[tokens, CELL]``."""
    return xxhash.xxh64_intdigest(cells.tobytes()) % VOCABULARY


def text(tokens: int, seed: int) -> list[int]:
    """Return token ids that share no block with the ids of another seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(1, VOCABULARY, tokens)]


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the model's answer of ``max_tokens`` tokens to a prompt, computed without any
    engine."""
    cells, answer = bytearray(), list[int]()
    extend(cells, prompt)
    for _ in range(max_tokens):
        answer.append(sample(np.frombuffer(bytes(cells), dtype=np.uint8)))
        extend(cells, answer[-1:])
    return answer
