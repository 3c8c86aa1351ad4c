"""KV of one group, written and checked by the model.

A token's KV also depends on the group, so that KV of another group is detected as wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import CELL, Cells, WrongKV

from .groups import GroupPages

NULL = 0
"""Id of vLLM's null block, which stands for a missing block."""


class Pass(NamedTuple):
    """A forward pass of a request.

    Attributes:
        table: ids of the blocks of this group.
        cells: KV of all tokens up to the last one computed, uint8 ``[tokens, CELL]``.
        computed: number of tokens computed before this pass.
    """

    request_id: str
    table: Sequence[int]
    cells: Cells
    computed: int


class GroupKv(ABC):
    """KV of one group.

    Args:
        pages: geometry of the group's pages.
        memory: the whole KV cache, uint8 ``[blocks, page bytes]``.
    """

    def __init__(self, pages: GroupPages, memory: NDArray[np.uint8]) -> None:
        self.spec = pages.spec
        self.name = f"group {pages.index} ({pages.spec.kind.value})"
        self._pages = memory[:, : pages.used_bytes]
        # The first number is 0, so the KV of a single group is the cells themselves.
        first = pages.index * 1_000_000
        self._salt = np.array(
            [
                n and xxhash.xxh64_intdigest(n.to_bytes(8, "little"))
                for n in range(first, first + pages.token_bytes // CELL)
            ],
            dtype=np.uint64,
        )

    def __getitem__(self, block: int) -> Cells:
        """Return the KV bytes of a block, for reading or writing."""
        page: Cells = self._pages[block]
        return page

    @abstractmethod
    def carry(self, request_id: str, table: Sequence[int], computed: int, stop: int) -> None:
        """Prepare a pass over the tokens from ``computed`` to ``stop``: copy the state from which
        the pass continues to the block in which the pass expects it.
        """

    @abstractmethod
    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished or lost their blocks."""

    @abstractmethod
    def check_before(self, one: Pass) -> None:
        """Check the existing KV before the pass writes its own.

        Raises:
            WrongKV: the KV belongs to another context.
        """

    @abstractmethod
    def write(self, one: Pass) -> None:
        """Write the KV that the pass computes.

        Raises:
            WrongKV: the table has no block for this KV.
        """

    @abstractmethod
    def check_after(self, one: Pass) -> None:
        """Check the attended KV after all requests of the pass have written their KV.

        Raises:
            WrongKV: the KV belongs to another context.
        """

    @abstractmethod
    def put(self, table: Sequence[int], cells: Cells) -> None:
        """Write the KV of the group that a hit of these tokens needs, as a correct restore does:
        full blocks, and the available tokens of the last block.
        """

    @abstractmethod
    def lengths(self, table: Sequence[int], cells: Cells) -> list[int]:
        """Return the lengths, in tokens, at which a hit finds the KV that it needs."""

    def _expand(self, cells: Cells) -> Cells:
        """Return this group's KV of tokens, uint8 ``[tokens, bytes]``."""
        words = np.ascontiguousarray(cells).view(np.uint64)
        return (words ^ self._salt).view(np.uint8)


class AttentionKv(GroupKv):
    """KV of an attention group, with one entry for each token."""

    def __init__(self, pages: GroupPages, memory: NDArray[np.uint8]) -> None:
        super().__init__(pages, memory)
        self._size = pages.spec.block_size
        self._tokens = self._pages.reshape(len(memory), self._size, pages.token_bytes)
        assert np.shares_memory(self._tokens, memory)

    def carry(self, request_id: str, table: Sequence[int], computed: int, stop: int) -> None:
        """Do nothing, because the KV of a token stays in its block."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Do nothing, because no state is kept per request."""

    def check_before(self, one: Pass) -> None:
        """Do nothing, because a token may also attend to KV that the pass itself writes.
        ``check_after`` checks all attended KV.
        """

    def write(self, one: Pass) -> None:
        blocks, within = self._places(one, one.computed)
        self._tokens[blocks, within] = self._expand(one.cells[one.computed :])

    def check_after(self, one: Pass) -> None:
        first = self.spec.reach.skipped(one.computed)
        blocks, within = self._places(one, first)
        right = self._expand(one.cells[first:])
        wrong = np.flatnonzero((self._tokens[blocks, within] != right).any(axis=1))
        if len(wrong):
            raise WrongKV(
                f"{one.request_id}: {self.name}: wrong KV for {len(wrong)} of the {len(right)} "
                f"tokens checked (context: {len(one.cells)} tokens), first at token "
                f"{first + wrong[0]}"
            )

    def put(self, table: Sequence[int], cells: Cells) -> None:
        needed = self.spec.reach.blocks(len(cells), self._size)
        if needed:
            self.write(Pass("put", table, cells, needed.start * self._size))

    def lengths(self, table: Sequence[int], cells: Cells) -> list[int]:
        tokens = np.arange(min(len(cells), len(table) * self._size))
        blocks = np.array(table, dtype=np.intp)[tokens // self._size]
        right = self._tokens[blocks, tokens % self._size] == self._expand(cells[: len(tokens)])
        known = right.all(axis=1) & (blocks != NULL)
        skipped = self.spec.reach.skipped
        return [n for n in range(1, len(known) + 1) if known[skipped(n) : n].all()]

    def _places(self, one: Pass, first: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the block, and the index in the block, of each token from ``first`` on."""
        tokens = np.arange(first, len(one.cells))
        blocks = np.array(one.table, dtype=np.intp)[tokens // self._size]
        absent = np.flatnonzero(blocks == NULL)
        if len(absent):
            raise WrongKV(f"{one.request_id}: {self.name}: no block for token {first + absent[0]}")
        return blocks, tokens % self._size


class StateKv(GroupKv):
    """KV of a group with states: one state per request, after the request's last token, stored as
    in vLLM's mode "align".

    The state is in the block of the last token, where each pass advances it. If a pass ends in
    another block, the state is copied first, so that the old block keeps the state at its end.
    """

    def __init__(self, pages: GroupPages, memory: NDArray[np.uint8]) -> None:
        super().__init__(pages, memory)
        self._at: dict[str, int] = {}  # index of the block that has a running request's state

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._at.pop(request_id, None)

    def carry(self, request_id: str, table: Sequence[int], computed: int, stop: int) -> None:
        size = self.spec.block_size
        before = self._at.get(request_id, (computed - 1) // size)
        now = self._at[request_id] = (stop - 1) // size
        if before not in (-1, now):
            self._pages[table[now]] = self._pages[table[before]]

    def check_before(self, one: Pass) -> None:
        if not one.computed:  # a state starts empty, whatever the block holds
            return
        found, last = self._block(one), one.computed - 1
        if (found != self._expand(one.cells[last : last + 1])[0]).any():
            after = np.flatnonzero((self._expand(one.cells) == found).all(axis=1)) + 1
            holds = (
                f"the state after {after[0]} tokens"
                if len(after)
                else "a state that is not from this context"
            )
            raise WrongKV(
                f"{one.request_id}: {self.name}: expected the state after {one.computed} tokens, "
                f"but the block contains {holds}"
            )

    def write(self, one: Pass) -> None:
        self._block(one)[:] = self._expand(one.cells[-1:])[0]

    def check_after(self, one: Pass) -> None:
        """Do nothing, because later passes use only the state that ``write`` stores."""

    def put(self, table: Sequence[int], cells: Cells) -> None:
        block = table[(len(cells) - 1) // self.spec.block_size]
        if block == NULL:
            raise WrongKV(f"put: {self.name}: no block for token {len(cells) - 1}")
        self[block][:] = self._expand(cells[-1:])[0]

    def lengths(self, table: Sequence[int], cells: Cells) -> list[int]:
        size, states = self.spec.block_size, self._expand(cells)
        tokens = range(1, min(len(cells), len(table) * size) + 1)
        found = (self._pages[table[(n - 1) // size]] for n in tokens)
        right = [bool((page == states[n - 1]).all()) for n, page in zip(tokens, found, strict=True)]
        return [n for n in tokens if right[n - 1] and table[(n - 1) // size] != NULL]

    def _block(self, one: Pass) -> Cells:
        block = one.table[self._at[one.request_id]]
        if block == NULL:
            raise WrongKV(f"{one.request_id}: {self.name}: no block for token {len(one.cells) - 1}")
        return self[block]


def group_kv(pages: GroupPages, memory: NDArray[np.uint8]) -> GroupKv:
    """Return the KV of a group in this memory."""
    made = StateKv if pages.spec.kind is KvKind.STATE else AttentionKv
    return made(pages, memory)
