"""A model runner that checks the KV it attends to.

Like vLLM's it knows of requests only what the scheduler's outputs say, and what it sampled itself:
so it may run ahead of the scheduler, as it does under asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered_kv.testing.checked_kv import CELL, Cells, WrongKV, kv, sample


@dataclass(slots=True)
class _Request:
    prompt: int
    tokens: list[int]
    blocks: list[int]
    computed: int


class CheckingRunner:
    """Writes each token's KV, and reads back whatever is attended to.

    Args:
        cells: the KV cache, uint8 ``[blocks, block_size, CELL]``.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._size = cells.shape[1]
        self._requests: dict[str, _Request] = {}

    def update(self, output: Any) -> None:
        """Take in what vLLM's SchedulerOutput says of requests."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            self._requests[new.req_id] = _Request(
                len(prompt), prompt, list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            one, fresh = self._requests[request_id], cached.new_block_ids[i]
            one.computed = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                one.blocks = list(fresh[0])
                one.tokens = list(cached.all_token_ids[request_id])
                continue
            del one.tokens[one.prompt + cached.num_output_tokens[i] :]  # it was not taken
            one.blocks += fresh[0] if fresh is not None else ()

    def forward(self, scheduled: dict[str, int], bad: Collection[int]) -> dict[str, list[int]]:
        """One forward pass.

        Args:
            scheduled: tokens to compute, by request.
            bad: blocks that are known to hold nothing; who has one is not checked.

        Returns:
            The token that each request samples, if it does.

        Raises:
            WrongKV: some of what a request attends to is not its context's.
        """
        # Requests of a batch attend to blocks that others of it fill: write all, then read.
        work = []
        for request_id, count in scheduled.items():
            one = self._requests[request_id]
            stop = one.computed + count
            cells = kv(one.tokens[:stop])
            for position in range(one.computed, stop):
                block = one.blocks[position // self._size]
                self._cells[block, position % self._size] = cells[position]
            work.append((request_id, one, cells))
        sampled: dict[str, list[int]] = {}
        for request_id, one, cells in work:
            if not set(bad) & set(one.blocks):
                self._check(request_id, one.blocks, cells)
            sampled[request_id] = []
            if len(cells) >= len(one.tokens):
                sampled[request_id].append(sample(cells))
                one.tokens.append(sample(cells))
        return sampled

    def _check(self, request_id: str, blocks: Sequence[int], cells: Cells) -> None:
        n = len(cells)
        seen = self._cells[blocks[: -(-n // self._size)]].reshape(-1, CELL)[:n]
        wrong = np.flatnonzero((seen != cells).any(axis=1))
        if len(wrong):
            raise WrongKV(f"{request_id}: {len(wrong)} of {n} tokens, first at {wrong[0]}")
