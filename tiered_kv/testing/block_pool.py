"""A ``BlockPool`` of the port, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class FakeBlock:
    """A block of VRAM. ``block_hash`` is None unless it is full and can be found again."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


class FakeBlockPool:
    """Reference counts and a free queue like vLLM's, but strict.

    A block whose last reference goes joins the free queue: at the end if it is hashed
    (its KV may be found again), at the front if not. A block that is touched leaves the
    queue. vLLM lets a count go below zero; this pool raises instead.

    Args:
        num_blocks: all blocks; block 0 is the null block, as in vLLM, and never free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FakeBlock(i) for i in range(num_blocks)]
        self.blocks[0].is_null = True
        self.tables: list[dict[str, list[FakeBlock]]] = [{}]
        self.watermark = 0
        self._free = self.blocks[1:]

    @property
    def free_order(self) -> list[int]:
        """Ids of the free blocks, the one to be reused next first."""
        return [block.block_id for block in self._free]

    def num_free(self) -> int:
        return len(self._free)

    def num_cached(self) -> int:
        return len({block.block_hash for block in self.blocks if block.block_hash is not None})

    def allocate(self, hashes: Sequence[bytes | None]) -> list[FakeBlock]:
        """Take a block from the front of the queue for each hash: vLLM's ``get_new_blocks``.

        Raises:
            ValueError: not enough free blocks.
        """
        if len(hashes) > len(self._free):
            raise ValueError(f"{len(hashes)} blocks wanted, {len(self._free)} are free")
        taken, self._free = self._free[: len(hashes)], self._free[len(hashes) :]
        for block, block_hash in zip(taken, hashes, strict=True):
            block.ref_cnt, block.block_hash = 1, block_hash
        return taken

    def hold(self, blocks: Sequence[Any]) -> None:
        """One reference more on each; a free block leaves the queue."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self._free.remove(block)
            block.ref_cnt += 1

    def release(self, blocks: Iterable[Any]) -> None:
        """One reference less on each, those to be reused first in front.

        Raises:
            ValueError: a block has no reference to give back.
        """
        reuse_first: list[FakeBlock] = []
        reuse_last: list[FakeBlock] = []
        for block in blocks:
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (reuse_first if block.block_hash is None else reuse_last).append(block)
        self._free = [*reuse_first, *self._free, *reuse_last]

    def forget(self, block_ids: Iterable[int]) -> None:
        """The blocks are not found any more."""
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def blocks_of(self, request_id: str) -> Sequence[FakeBlock]:
        """The blocks of a request."""
        return self.tables[0].get(request_id, ())

    def cached(self, block_hash: bytes, group: int) -> FakeBlock | None:
        """The block with that hash."""
        return next((one for one in self.blocks if one.block_hash == block_hash), None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the unreferenced blocks are free, once each."""
        unused = [b.block_id for b in self.blocks if b.ref_cnt == 0 and not b.is_null]
        assert sorted(self.free_order) == unused, "free queue and reference counts disagree"
