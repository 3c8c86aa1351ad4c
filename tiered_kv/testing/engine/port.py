"""Adapters that provide the engine's requests, blocks, fingerprints and sizes through the
interfaces that the runtime expects of an engine."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from tiered_kv.codecs.base import ElementType
from tiered_kv.connectors.runtime.base import EngineFacts, Sampling
from tiered_kv.keys import UPDATED, Fingerprint, PageKey
from tiered_kv.page_group import CONTEXT, PageGroup, Placement, page_layout
from tiered_kv.testing.checked_kv import CELL

from .blocks import Blocks
from .engine import EngineSize
from .model import LAYERS
from .requests import Outcome, Request, State


def read_facts(size: EngineSize) -> EngineFacts:
    """Return the engine's configuration, as both halves of the connector need it."""
    page = size.block_size * CELL
    layers = Placement(LAYERS, layer_stride=size.blocks * page, block_stride=page, offset=0)
    group = PageGroup(
        index=0,
        block_size=size.block_size,
        layout=page_layout([layers], size.blocks),
        element=ElementType.OPAQUE,
        arrangement="cells of a second engine",
    )
    return EngineFacts(
        ranks=1,
        block_size=size.block_size,
        hash_tokens=size.block_size,
        hit_tokens=size.block_size,
        num_blocks=size.blocks,
        placeholders=0,
        groups=(group,),
        publishes_events=size.events,
    )


def base_fingerprint(facts: EngineFacts) -> Fingerprint:
    """Return the fingerprint of the engine's only model."""
    return Fingerprint(
        model="checked",
        adapter="",
        dtype="uint8",
        cache_dtype="uint8",
        kv_scales="none",
        config={},
        group=0,
        block_size=facts.block_size,
        layout=facts.groups[0].describe(),
        ranks=facts.ranks,
        hash_algorithm="sha256 chain",
        generation="",
    )


class OneModel:
    """Fingerprints of an engine without adapters."""

    def __init__(self, base: Fingerprint) -> None:
        self._base = base
        self._digest = base.digest()

    def base(self, group: int) -> Fingerprint:
        return self._base

    def of(self, adapter: object | None, group: int) -> bytes | None:
        return self._digest

    def group_of(self, key: PageKey) -> int | None:
        return CONTEXT

    def next_generation(self) -> None:
        self._base = replace(self._base, generation=secrets.token_hex(8))
        self._digest = self._base.digest()

    def forget_weights(self) -> None:
        self._base = replace(self._base, model=f"{UPDATED}{secrets.token_hex(8)}")
        self.next_generation()

    def close(self) -> None:
        pass


class PortPool:
    """Implements ``BlockPool``, the interface through which the runtime uses an engine's block
    pool.

    Args:
        pool: the engine's own block pool.
    """

    watermark = 0

    def __init__(self, pool: Blocks) -> None:
        self._pool = pool
        self.blocks: Sequence[Any] = pool.blocks
        self.tables: Sequence[Mapping[str, Sequence[Any]]] = (pool.tables,)
        self.num_free = pool.num_free
        self.num_cached = pool.num_cached
        self.forget = pool.forget

    def hold(self, blocks: Sequence[Any]) -> None:
        self._pool.hold(blocks)

    def release(self, blocks: Iterable[Any]) -> None:
        self._pool.release(blocks)

    def blocks_of(self, request_id: str) -> Sequence[Any]:
        return self._pool.tables.get(request_id, ())

    def hash_prefix(self, request: Any, tokens: int) -> None:
        pass

    def hashed_blocks_of(self, request_id: str) -> list[Any]:
        return [block for block in self.blocks_of(request_id) if block.block_hash is not None]

    def cached_prefix(self, hashes: Sequence[bytes], group: int) -> int:
        return sum(1 for _ in takewhile(lambda one: self._pool.cached(one) is not None, hashes))

    def num_in_use(self, hashes: Sequence[bytes], group: int) -> int:
        found = map(self._pool.cached, hashes)
        return sum(block is not None and block.ref_cnt > 0 for block in found)

    def cached(self, block_hash: bytes, group: int) -> Any | None:
        return self._pool.cached(block_hash)


class PortRequest:
    """Implements ``Request``, the interface through which the runtime reads an engine's request.

    Args:
        request: the engine's own request.
    """

    adapter: object | None = None
    text_only = True
    reads_cache = True
    streams_input = False
    text_cut = False
    shared_tokens = 0
    num_in_flight_tokens = 0
    priority = 0

    def __init__(self, request: Request) -> None:
        self._request = request
        self.request_id = request.request_id
        self.cache_salt = request.salt
        self.prompt_token_ids: Sequence[int] | None = request.prompt
        self.num_prompt_tokens = len(request.prompt)
        self.arrival_time = request.arrived_at

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self._request.output

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self._request.tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return self._request.hashes

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self._request.tokens)

    @property
    def num_computed_tokens(self) -> int:
        return self._request.computed

    @property
    def num_preemptions(self) -> int:
        return self._request.preemptions

    @property
    def waits_for_kv(self) -> bool:
        return self._request.state is State.LOADING

    @property
    def ready(self) -> bool:
        return self._request.state is State.WAITING

    @property
    def finished(self) -> bool:
        return self._request.state is State.ENDED

    @property
    def answered(self) -> bool:
        return self._request.outcome in (Outcome.LENGTH, Outcome.STOP)

    @property
    def outcome(self) -> str:
        return self._request.outcome.name if self._request.outcome else ""

    @property
    def sampling(self) -> Sampling:
        return Sampling()

    def end_after_next_token(self) -> None:
        self._request.max_tokens = min(self._request.max_tokens, len(self._request.output) + 1)

    def extra_key(self, token: int) -> object:
        return self.cache_salt

    def extra_keys(self, start: int, block_size: int, blocks: int) -> Sequence[object] | None:
        if self.cache_salt is None or start:
            return None
        return [(self.cache_salt,), *[None] * (blocks - 1)]


def named_request(tokens: Sequence[int], salt: str | None, hash_tokens: int) -> PortRequest:
    """Return a request that never runs and only identifies a context."""
    request = Request("named", list(tokens), 1, 0.0, salt=salt)
    request.append(request.prompt, hash_tokens)
    return PortRequest(request)
