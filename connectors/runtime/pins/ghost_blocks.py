"""Ghosts: blocks that pins would hold in an engine that is only observed. The engine's own are left
to it.

A ghost is named by what it holds, as the engine may give the block to somebody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from tiered_kv.connectors.runtime.base import Block, BlockPool, EngineFacts
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.page_group import CONTEXT, KvKind

from .boundary_blocks import BoundaryBlocks
from .pin_table import PinTable

COUNTED_S = 1e-4
"""Seconds per ghost before those are counted again that the engine has in use: to look at one takes
a microsecond."""


class Name(NamedTuple):
    """Name of a ghost: the page group, and the hash of the block that it stands for."""

    group: int
    block_hash: bytes


@dataclass(slots=True, eq=False)
class Ghost:
    """A block that a pin would hold. ``block_id`` is below 0: no block of the engine has it."""

    block_id: int
    name: Name
    ref_cnt: int = 0
    is_null: bool = False

    @property
    def block_hash(self) -> object | None:
        return self.name


class GhostPool:
    """The engine's blocks as they would be: a ``BlockPool`` that changes nothing of the engine's.

    Args:
        real: the engine's blocks.
        clock: monotonic seconds.
    """

    def __init__(self, real: BlockPool, clock: Callable[[], float]) -> None:
        self.blocks: Sequence[Block] = real.blocks
        self.tables: Sequence[Mapping[str, Sequence[Block]]] = real.tables
        self.watermark = real.watermark
        self.blocks_of = real.blocks_of
        self._real = real
        self._clock = clock
        self._held: dict[Name, Ghost] = {}
        self._ids = count(-1, -1)
        self._in_use = 0  # ghosts whose block the engine has in use
        self._counted_until = float("-inf")

    def ghost(self, group: int, block_hash: bytes) -> Ghost:
        """The ghost of what a block holds."""
        name = Name(group, block_hash)
        return self._held.get(name) or Ghost(next(self._ids), name)

    def hold(self, blocks: Sequence[Block]) -> None:
        """Take a reference on each ghost; blocks of the engine are left alone."""
        for ghost in _ghosts(blocks):
            ghost.ref_cnt += 1
            self._held[ghost.name] = ghost

    def release(self, blocks: Iterable[Block]) -> None:
        """Give a reference on each ghost back."""
        for ghost in _ghosts(blocks):
            ghost.ref_cnt -= 1
            if not ghost.ref_cnt:
                del self._held[ghost.name]

    def forget(self, block_ids: Iterable[int]) -> None:
        """Do nothing: what the engine finds is its own affair."""

    def cached(self, block_hash: bytes, group: int) -> Block | None:
        """The block with that hash, a ghost's too."""
        return self._held.get(Name(group, block_hash)) or self._real.cached(block_hash, group)

    def num_free(self) -> int:
        """Blocks that would be free beside the pins."""
        return max(0, self._room())

    def num_cached(self) -> int:
        """Blocks that the engine can find."""
        return self._real.num_cached()

    @property
    def short(self) -> bool:
        """True if requests have blocks that pins would hold: these would have given way."""
        return self._room() < 0

    def _room(self) -> int:
        now = self._clock()
        if self._held and now >= self._counted_until:
            found = (self._real.cached(name.block_hash, name.group) for name in self._held)
            self._in_use = sum(block is not None and block.ref_cnt > 0 for block in found)
            self._counted_until = now + COUNTED_S * len(self._held)
        return self._real.num_free() - max(0, len(self._held) - self._in_use)


class GhostPins(PinTable):
    """Pins of ghosts, over a ``GhostPool``."""

    _pool: GhostPool

    def expire(self, now: float) -> int:
        """Release pins whose time is up, and those whose blocks requests have taken: the engine
        asks for no block of a ghost, so such a pin is found here."""
        return super().expire(now) + self.make_room(lambda: not self._pool.short)


class GhostBoundaries(BoundaryBlocks):
    """The blocks that pins would take over, as ghosts.

    Args:
        pool: the engine's blocks as they would be.
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
        """Ghosts of the blocks with which the engine would find the turn's context again."""
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
        """Blocks of a group; None if some group lacks its own."""
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
