"""A model runner that checks the KV to which it attends.

Like vLLM's runner, it knows only the scheduler's outputs and its own samples, so it can run ahead
of the scheduler, as under asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.testing.checked_kv import CELL, Cells, extend, sample

from .group_kv import GroupKv, Pass, group_kv
from .groups import GroupPages


@dataclass(slots=True)
class _Request:
    prompt: int
    tokens: list[int]
    tables: list[list[int]]
    """Block ids by group. Blocks that have left a window stay in the list, as in vLLM's runners."""
    computed: int
    _cells: bytearray = field(default_factory=bytearray)

    def cells(self, stop: int) -> Cells:
        """Return the KV of the first ``stop`` tokens."""
        known = len(self._cells) // CELL
        extend(self._cells, self.tokens[known:stop])
        return np.frombuffer(bytes(self._cells[: stop * CELL]), dtype=np.uint8).reshape(-1, CELL)

    def keep(self, tokens: int) -> None:
        """Discard all tokens of a request after the first ``tokens``."""
        del self.tokens[tokens:]
        del self._cells[tokens * CELL :]


class CheckingRunner:
    """Writes the KV of each group, and checks all KV to which a request attends.

    Args:
        groups: geometry of the pages of each group.
        memory: the KV cache, uint8 ``[blocks, page bytes]``.
    """

    def __init__(self, groups: Sequence[GroupPages], memory: NDArray[np.uint8]) -> None:
        self.groups: Sequence[GroupKv] = [group_kv(pages, memory) for pages in groups]
        self._memory = memory
        self._requests: dict[str, _Request] = {}

    def update(self, output: Any) -> None:
        """Apply vLLM's SchedulerOutput to the requests and their blocks."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        if output.new_block_ids_to_zero:
            self._memory[output.new_block_ids_to_zero] = 0
        if output.kv_cache_block_copies:
            sources, targets = np.array(output.kv_cache_block_copies, dtype=np.intp).T
            self._memory[targets] = self._memory[sources]
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            tables = [list(blocks) for blocks in new.block_ids]
            self._requests[new.req_id] = _Request(
                len(prompt), prompt, tables, new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            one, fresh = self._requests[request_id], cached.new_block_ids[i]
            one.computed = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                one.tables = [list(blocks) for blocks in fresh]
                one.keep(0)
                one.tokens = list(cached.all_token_ids[request_id])
                continue
            one.keep(one.prompt + cached.num_output_tokens[i])  # the other tokens were rejected
            for table, blocks in zip(one.tables, fresh or (), strict=False):
                table += blocks
        without_blocks = chain(
            output.finished_req_ids, output.preempted_req_ids or (), cached.resumed_req_ids
        )
        for request_id in without_blocks:
            for group in self.groups:
                group.forget([request_id])
        for request_id, count in output.num_scheduled_tokens.items():
            one = self._requests[request_id]
            for group, table in zip(self.groups, one.tables, strict=True):
                group.carry(request_id, table, one.computed, one.computed + count)

    def forward(self, scheduled: dict[str, int], bad: Collection[int]) -> dict[str, list[int]]:
        """Run one forward pass.

        Args:
            scheduled: number of tokens to compute, by request.
            bad: blocks known to be invalid. Requests that use such a block are not checked.

        Returns:
            The sampled tokens by request: one token, or none if the pass does not reach the
            request's last token.

        Raises:
            WrongKV: a request attended to KV of another context.
        """
        stops = {name: self._requests[name].computed + n for name, n in scheduled.items()}
        passes = [
            (group, one) for name, stop in stops.items() for group, one in self._passes(name, stop)
        ]
        checked = [
            (group, one)
            for group, one in passes
            if not any(set(bad) & set(t) for t in self._requests[one.request_id].tables)
            and self.is_checked(one.request_id)
        ]
        # Requests of a batch attend to blocks that other requests of the batch fill, so all KV is
        # written before it is read. A state is read before it is overwritten, and never read by
        # another request in the pass that computes it.
        for group, one in checked:
            group.check_before(one)
        for group, one in passes:
            group.write(one)
        for group, one in checked:
            group.check_after(one)
        return {name: self._sampled(self._requests[name], stop) for name, stop in stops.items()}

    def model_kv(self, request_id: str, cells: Cells) -> Cells:
        """Return the KV that the model computes for a context whose correct KV is ``cells``."""
        return cells

    def is_checked(self, request_id: str) -> bool:
        """Return True if a request's KV must be the KV of its context."""
        return True

    def _passes(self, request_id: str, stop: int) -> Iterator[tuple[GroupKv, Pass]]:
        one = self._requests[request_id]
        cells = self.model_kv(request_id, one.cells(stop))
        for group, table in zip(self.groups, one.tables, strict=True):
            yield group, Pass(request_id, table, cells, one.computed)

    def _sampled(self, one: _Request, stop: int) -> list[int]:
        if stop < len(one.tokens):
            return []
        one.tokens.append(sample(one.cells(stop)))
        return one.tokens[-1:]
