"""The model, which writes each token's KV into pages, attends to pages, and checks their
content.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiered_kv.testing.checked_kv import CELL, Cells, WrongKV, extend, sample

LAYERS = 2
SHIFT = 101
"""``l * SHIFT`` is added to the bytes of layer ``l``, so that no two layers have equal contents."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request's part in a forward pass.

    Attributes:
        tokens: the request's tokens, up to the last one to compute.
        table: ids of the request's blocks.
        start: number of tokens whose KV is already in the blocks.
        samples: True if a token is sampled.
    """

    request_id: str
    tokens: Sequence[int]
    table: Sequence[int]
    start: int
    samples: bool


class PagedModel:
    """The forward pass over paged KV.

    Args:
        blocks, block_size: size of the pool, in blocks and tokens per block.
        device: torch device of the KV cache.

    Attributes:
        cache: KV, uint8 ``[LAYERS, blocks, block_size, CELL]``.
    """

    def __init__(self, blocks: int, block_size: int, device: str) -> None:
        self.cache = torch.zeros(
            (LAYERS, blocks, block_size, CELL), dtype=torch.uint8, device=device
        )
        self._size = block_size
        self._right: dict[str, bytearray] = {}  # KV of each request, computed only from its tokens

    def forward(self, batch: Sequence[Work], bad: Collection[int] = ()) -> dict[str, int]:
        """Compute a batch. Returns the sampled tokens by request id.

        Args:
            bad: blocks without valid KV. Requests that use such a block compute garbage, unchecked.

        Raises:
            WrongKV: a request attended to KV of another context.
        """
        sampled = {}
        for work in batch:
            cells = bytearray(self._read(work, work.start)[0].tobytes())
            extend(cells, work.tokens[work.start :])
            self._write(work, np.frombuffer(bytes(cells), dtype=np.uint8).reshape(-1, CELL))
            seen = self._read(work, len(work.tokens))
            if not set(bad) & set(work.table):
                self._check(work, seen)
            if work.samples:
                sampled[work.request_id] = sample(seen[0])
        return sampled

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self._right.pop(request_id, None)

    def _read(self, work: Work, tokens: int) -> Cells:
        """Return the KV of a request's first tokens, uint8 ``[LAYERS, tokens, CELL]``, with the
        layers' shifts subtracted.
        """
        blocks = torch.tensor(work.table[: -(-tokens // self._size)], device=self.cache.device)
        seen: Cells = self.cache[:, blocks.long()].cpu().numpy()
        return seen.reshape(LAYERS, -1, CELL)[:, :tokens] - _shifts()

    def _write(self, work: Work, cells: Cells) -> None:
        at = range(work.start, len(cells))
        device = self.cache.device
        blocks = torch.tensor([work.table[i // self._size] for i in at], device=device)
        offsets = torch.tensor([i % self._size for i in at], device=device)
        fresh = torch.from_numpy(cells[None, work.start :] + _shifts())
        self.cache[:, blocks, offsets] = fresh.to(device)

    def _check(self, work: Work, seen: Cells) -> None:
        right = self._right.setdefault(work.request_id, bytearray())
        extend(right, work.tokens[len(right) // CELL :])
        n = len(work.tokens)
        whole = np.frombuffer(bytes(right), dtype=np.uint8).reshape(-1, CELL)[:n]
        wrong = np.flatnonzero((seen != whole).any(axis=(0, 2)))
        if len(wrong):
            raise WrongKV(
                f"{work.request_id}: wrong KV for {len(wrong)} of {n} tokens, first at token "
                f"{wrong[0]}"
            )


def _shifts() -> Cells:
    """Return the bytes added to each layer's cells, uint8 ``[LAYERS, 1, 1]``, modulo 256."""
    return (np.arange(LAYERS) * SHIFT).astype(np.uint8)[:, None, None]
