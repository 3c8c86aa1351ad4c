"""Ghosts: stand-ins for the blocks that pins would hold in observe mode.

The engine's own blocks are not touched. A ghost is identified by the content of its block, because
the engine may reuse the block meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from tiered_kv.connectors.runtime.base import Block, BlockPool, EngineFacts, Request
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.page_group import CONTEXT, KvKind

from .boundary_blocks import BoundaryBlocks
from .pin_table import PinTable

COUNTED_S = 1e-4
"""Time per ghost for which the number of ghosts in use is cached, seconds. Checking a ghost takes a
microsecond."""


class Name(NamedTuple):
    """Identity of a ghost: the page group, and the hash of the block that it stands for."""

    group: int
    block_hash: bytes


@dataclass(slots=True, eq=False)
class Ghost:
    """A block that a pin would hold. Its ``block_id`` is negative, unlike the ids of the engine's
    blocks."""

    block_id: int
    name: Name
    ref_cnt: int = 0
    is_null: bool = False

    @property
    def block_hash(self) -> object | None:
        return self.name


class GhostPool:
    """A simulated ``BlockPool`` on top of the engine's pool, which it does not change.

    Args:
        real: the engine's blocks.
        clock: monotonic seconds.
    """

    def __init__(self, real: BlockPool, clock: Callable[[], float]) -> None:
        self.blocks: Sequence[Block] = real.blocks
        self.tables: Sequence[Mapping[str, Sequence[Block]]] = real.tables
        self.watermark = real.watermark
        self.blocks_of = real.blocks_of
        self.hashed_blocks_of = real.hashed_blocks_of
        self._real = real
        self._clock = clock
        self._held: dict[Name, Ghost] = {}
        self._ids = count(-1, -1)
        self._in_use = 0  # ghosts whose block is in use by the engine
        self._counted_until = float("-inf")

    def ghost(self, group: int, block_hash: bytes) -> Ghost:
        """Return the ghost for a block with that content."""
        name = Name(group, block_hash)
        return self._held.get(name) or Ghost(next(self._ids), name)

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each ghost. The engine's blocks are ignored."""
        for ghost in _ghosts(blocks):
            ghost.ref_cnt += 1
            self._held[ghost.name] = ghost

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each ghost."""
        for ghost in _ghosts(blocks):
            ghost.ref_cnt -= 1
            if not ghost.ref_cnt:
                del self._held[ghost.name]

    def hash_prefix(self, request: Request, tokens: int) -> None:
        """Do nothing, because nothing is restored."""

    def forget(self, block_ids: Iterable[int]) -> None:
        """Do nothing, because the engine's prefix cache is not changed."""

    def cached_prefix(self, hashes: Sequence[bytes], group: int) -> int:
        """Return the number of hashes before the first hash without a block or ghost."""
        return sum(1 for _ in takewhile(lambda one: self.cached(one, group) is not None, hashes))

    def num_in_use(self, hashes: Sequence[bytes], group: int) -> int:
        """Return the number of hashes whose block or ghost has a reference."""
        found = (self.cached(one, group) for one in hashes)
        return sum(block is not None and block.ref_cnt > 0 for block in found)

    def cached(self, block_hash: bytes, group: int) -> Block | None:
        """Return the block or ghost with that hash; None if there is none."""
        return self._held.get(Name(group, block_hash)) or self._real.cached(block_hash, group)

    def num_free(self) -> int:
        """Return the number of blocks that would be free if the pins were real."""
        return max(0, self._room())

    def num_cached(self) -> int:
        """Return the number of blocks in the engine's prefix cache."""
        return self._real.num_cached()

    @property
    def short(self) -> bool:
        """True if requests use blocks that pins would hold, so that some pins would have been
        released."""
        return self._room() < 0

    def _room(self) -> int:
        now = self._clock()
        if self._held and now >= self._counted_until:
            found = (self._real.cached(name.block_hash, name.group) for name in self._held)
            self._in_use = sum(block is not None and block.ref_cnt > 0 for block in found)
            self._counted_until = now + COUNTED_S * len(self._held)
        return self._real.num_free() - max(0, len(self._held) - self._in_use)


class GhostPins(PinTable):
    """Pins that hold ghosts of a ``GhostPool`` in place of blocks."""

    _pool: GhostPool

    def expire(self, now: float) -> int:
        """Release pins that are past their deadline, and pins whose blocks requests have taken. The
        engine never asks for a ghost's block, so taken blocks are detected here."""
        return super().expire(now) + self.make_room(lambda: not self._pool.short)


class GhostBoundaries(BoundaryBlocks):
    """Finds the boundary blocks that pins would take over, as ghosts.

    Args:
        pool: the simulated pool.
    """

    def __init__(self, facts: EngineFacts, pool: GhostPool) -> None:
        super().__init__(facts, pool)
        self._ghosts = pool
        full = KvKind.FULL
        groups = [
            (at, one.block_size, one.reach.kind is full) for at, one in enumerate(facts.groups)
        ]
        self._groups = groups or [(CONTEXT, facts.block_size, True)]

    def of(self, turn: Turn) -> list[Block]:
        """Return ghosts of the blocks in which the engine would find the turn's context again;
        empty unless all these blocks exist."""
        found = list[Block]()
        for at, size, _ in sorted(self._groups, key=lambda group: group[2]):
            wanted = self._wanted(turn, at)
            if wanted is None:
                return []
            stride, hashes = size // self._facts.hash_tokens, turn.request.block_hashes
            last = ((block + 1) * stride - 1 for block in wanted)
            found += [self._ghosts.ghost(at, hashes[i]) for i in last if i < len(hashes)]
        return found

    def _wanted(self, turn: Turn, group: int) -> range | None:
        """Return the blocks of a group that a pin would hold; None if blocks of some group at the
        boundary are missing."""
        if not self._narrow:
            table = self._pool.tables[group].get(turn.request_id, ())
            return range(sum(not one.is_null and one.block_hash is not None for one in table))
        boundary = self._boundaries.get(turn.request_id)
        if boundary is None or boundary.lacking:
            return None
        needed = self._facts.groups[group].needs(boundary.tokens)
        return range(needed.start, needed.stop)


def _ghosts(blocks: Iterable[Block]) -> Iterator[Ghost]:
    return (block for block in blocks if isinstance(block, Ghost))
