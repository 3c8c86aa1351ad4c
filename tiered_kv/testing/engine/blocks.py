"""VRAM blocks with reference counts. Cached blocks are found by hash, and the least recently used
blocks are reused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(slots=True, eq=False)
class Block:
    """A block of VRAM. ``block_hash`` is None unless requests can find the block by its hash."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None

    @property
    def is_null(self) -> bool:
        return False


class Blocks:
    """The block pool.

    Args:
        count: number of blocks, all allocatable.

    Attributes:
        tables: blocks of each request, in the order of the request's tokens.
    """

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.tables: dict[str, list[Block]] = {}
        self._free = OrderedDict((block.block_id, block) for block in self.blocks)
        self._found: dict[bytes, Block] = {}

    @property
    def free_order(self) -> list[int]:
        """Ids of the blocks without references, in order of reuse."""
        return list(self._free)

    def num_free(self) -> int:
        """Return the number of blocks without references."""
        return len(self._free)

    def num_cached(self) -> int:
        """Return the number of hashes under which blocks can be found."""
        return len(self._found)

    def take(self, count: int) -> list[Block]:
        """Allocate ``count`` free blocks, the least recently used first, and remove their hashes.
        At least ``count`` blocks must be free."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        self.forget(block.block_id for block in taken)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            block.ref_cnt += 1
            self._free.pop(block.block_id, None)

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block. Blocks without references are reused in the given
        order, after the blocks that no request can find.
        """
        unfindable = []
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} is freed twice"
            if not block.ref_cnt:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    unfindable.append(block.block_id)
        for block_id in reversed(unfindable):
            self._free.move_to_end(block_id, last=False)

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Make a block findable by its hash, unless the block already has a hash, or another block
        with this hash is already findable.
        """
        if block.block_hash is None and block_hash not in self._found:
            block.block_hash = block_hash
            self._found[block_hash] = block

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove the hashes of blocks, so that no request can find the blocks."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                del self._found[block.block_hash]
                block.block_hash = None

    def cached(self, block_hash: bytes) -> Block | None:
        """Return the block with that hash, or None."""
        return self._found.get(block_hash)

    def prefix(self, hashes: Sequence[bytes]) -> list[Block]:
        """Return the blocks with these hashes, up to the first missing block."""
        found = []
        for block_hash in hashes:
            block = self._found.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def check_integrity(self) -> None:
        """Assert that the free list contains every unreferenced block once, and no other block."""
        unused = [block.block_id for block in self.blocks if not block.ref_cnt]
        assert sorted(self._free) == unused, "free blocks and reference counts disagree"


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a full block, computed from the block's tokens and the previous block's
    hash.
    """
    return sha256(before + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()
