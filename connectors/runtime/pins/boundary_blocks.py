"""Blocks at the end of each prompt that a request no longer needs, held until its turn ends.

The engine finds a prompt again at its last boundary. It needs all full-attention blocks before the
boundary, and the sliding-window blocks and recurrent states of the other groups at the boundary.
These window and state blocks leave the request's block table during decoding, so they are held from
the end of the prefill on, for the pin to take over.

Models whose groups all keep the whole context need no such blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.base import Block, BlockPool, EngineFacts
from tiered_kv.connectors.runtime.pages.saves import last_boundary
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.page_group import KvKind


@dataclass(slots=True)
class _Boundary:
    """The last boundary of a prompt.

    Attributes:
        tokens: number of tokens before the boundary.
        held: held blocks, by group.
        lacking: groups whose blocks are not held yet.
    """

    tokens: int
    lacking: set[int]
    held: dict[int, list[Block]] = field(default_factory=dict)


class BoundaryBlocks:
    """Holds the blocks at the prompt boundaries of live turns. Used on one thread.

    Args:
        pool: the engine's block pool.
    """

    def __init__(self, facts: EngineFacts, pool: BlockPool) -> None:
        self._facts = facts
        self._pool = pool
        self._narrow = [
            at for at, group in enumerate(facts.groups) if group.reach.kind is not KvKind.FULL
        ]
        self._boundaries: dict[str, _Boundary] = {}
        self._awaited: dict[str, Turn] = {}

    def watch(self, turn: Turn) -> None:
        """Hold the blocks at the turn's boundary as soon as they are computed."""
        if not self._narrow or turn.request_id in self._boundaries:
            return
        if tokens := last_boundary(turn.request, self._facts):
            self._boundaries[turn.request_id] = _Boundary(tokens, set(self._narrow))
            self._awaited[turn.request_id] = turn

    def step(self, scheduled: Mapping[str, int]) -> None:
        """Hold the boundary blocks that exist once this step has run.

        Args:
            scheduled: tokens that the step computes for each request.
        """
        if not self._awaited:  # the usual case; runs in every step
            return
        for request_id, turn in list(self._awaited.items()):
            computed = turn.request.num_computed_tokens
            boundary = self._boundaries[request_id]
            if turn.loading or computed + scheduled.get(request_id, 0) < boundary.tokens:
                continue
            for group in list(boundary.lacking):
                state = self._facts.groups[group].reach.kind is KvKind.STATE
                # The next token overwrites the state in its block. After that, the engine offers a
                # copy.
                if not state or computed == boundary.tokens:
                    self._hold(request_id, group, self._in_table(turn, group, boundary.tokens))
            del self._awaited[request_id]

    def _in_table(self, turn: Turn, group: int, tokens: int) -> Sequence[Block]:
        table = self._pool.tables[group].get(turn.request_id, ())
        needed = self._facts.groups[group].needs(tokens)
        # With a drafter the engine needs one more block, because KV depends on the next token.
        stop = needed.stop + (self._facts.groups[group].draft_tokens > 0)
        return table[needed.start : stop] if stop <= len(table) else ()

    def on_state(self, request_id: str, group: int, block_id: int, tokens: int) -> None:
        """Hold a recurrent state that the engine offers, if it is the state at the turn's
        boundary."""
        boundary = self._boundaries.get(request_id)
        if boundary is not None and tokens == boundary.tokens and group in boundary.lacking:
            self._hold(request_id, group, [self._pool.blocks[block_id]])

    def _hold(self, request_id: str, group: int, blocks: Sequence[Block]) -> None:
        boundary = self._boundaries[request_id]
        if any(block.is_null or block.block_hash is None for block in blocks):
            return
        self._pool.hold(blocks)
        boundary.held[group] = list(blocks)
        boundary.lacking.discard(group)

    def of(self, turn: Turn) -> list[Block]:
        """Return the blocks in which the engine finds the turn's context again; empty unless all
        these blocks are held.

        Full-attention blocks come last, in the order of the context.
        """
        if not self._narrow:
            return self._pool.hashed_blocks_of(turn.request_id)
        boundary = self._boundaries.get(turn.request_id)
        if boundary is None or boundary.lacking:
            return []
        found = [block for blocks in boundary.held.values() for block in blocks]
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is KvKind.FULL:
                blocks = self._in_table(turn, at, boundary.tokens)
                if not blocks or any(block.block_hash is None for block in blocks):
                    return []
                found += blocks
        return found

    def release(self, request_id: str) -> None:
        """Release the blocks that are held for a turn."""
        self._awaited.pop(request_id, None)
        boundary = self._boundaries.pop(request_id, None)
        if boundary is not None:
            self._give_back(boundary)

    def release_all(self) -> bool:
        """Release the blocks that are held for all turns, and hold no further blocks of these
        turns. Returns False if no blocks were held."""
        held = [boundary for boundary in self._boundaries.values() if boundary.held]
        for boundary in held:
            self._give_back(boundary)
            boundary.lacking = set(self._narrow)
        self._awaited.clear()
        return bool(held)

    def _give_back(self, boundary: _Boundary) -> None:
        for blocks in boundary.held.values():
            self._pool.release(reversed(blocks))
        boundary.held.clear()
