"""Layers that keep KV alike, and what a token or a state of them takes on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.kv_reach import KvKind, KvReach


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers of a model that keep KV alike.

    Attributes:
        words: what they are.
        layers: how many there are.
        token_bytes: bytes of a token's KV in one layer, on one rank; 0 for states.
        state_bytes: bytes of a state in one layer, on one rank; 0 for attention.
        pair_flops: operations of one (query, key) pair in one layer, over all ranks.
        sees: tokens that a query attends to at most; 0 if all that the reach has.
    """

    words: str
    reach: KvReach
    layers: int
    token_bytes: int = 0
    state_bytes: int = 0
    pair_flops: int = 0
    sees: int = 0

    @property
    def kind(self) -> KvKind:
        """Kind of KV."""
        return self.reach.kind
