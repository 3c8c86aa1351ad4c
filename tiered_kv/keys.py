"""Keys of pages: equal for two pages only if the pages have the same bytes.

A page's key is ``fingerprint ‖ block hash``. vLLM's block hash covers the tokens, the LoRA name,
multimodal inputs and the cache salt. The fingerprint covers everything else, so that pages of
another model, dtype or generation are never found under this key.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import NewType, cast

PageKey = NewType("PageKey", bytes)
"""Identity of a page on all ranks: 16 bytes of fingerprint, then the block hash."""

FORMAT_VERSION = 2
"""Version of the page format. Increase it when a page's bytes, or the coverage of its key,
change."""

UNIDENTIFIED = "unidentified-"
"""Prefix of the digest of a model without files; the rest is random."""

UPDATED = f"{UNIDENTIFIED}updated-"
"""Prefix of the digest of a model whose weights may have changed since its files were loaded."""

DIGEST_BYTES = 16
"""Size of a fingerprint's digest, bytes."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that determines a page's bytes and is not in its block hash.

    Attributes:
        model: digest of the model's files (see ``tiered_kv.digests``).
        adapter: digest of the LoRA adapter's files; empty without one.
        dtype: compute dtype of the model, for example ``bfloat16``.
        cache_dtype: dtype of stored K and V, for example ``auto`` or ``fp8``.
        kv_scales: source of the scales of a quantized cache.
        config: the model's configuration as loaded, overrides included.
        group: index of the pages' KV cache group in the engine.
        block_size: number of tokens per page.
        layout: description of a page's byte regions and their contents.
        ranks: number of tensor-parallel ranks that a page is divided among.
        hash_algorithm: vLLM's block hash function and its seed.
        generation: empty at first; a unique value after a cache reset, so that an engine that was
            reset the same number of times cannot find the pages.
    """

    model: str
    adapter: str
    dtype: str
    cache_dtype: str
    kv_scales: str
    config: Mapping[str, object]
    group: int
    block_size: int
    layout: str
    ranks: int
    hash_algorithm: str
    generation: str

    @property
    def lasting(self) -> bool:
        """True if an engine that is started later can have the same fingerprint."""
        return not (self.generation or self.model.startswith(UNIDENTIFIED))

    def digest(self) -> bytes:
        """Return 16 bytes, which differ if any field differs."""
        fields = {"format": FORMAT_VERSION, **asdict(self)}
        text = json.dumps(fields, sort_keys=True, default=str)
        return sha256(text.encode()).digest()[:DIGEST_BYTES]


def page_keys(fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[PageKey]:
    """Build the keys of full blocks from vLLM's hashes."""
    return cast("list[PageKey]", [fingerprint + block_hash for block_hash in block_hashes])


def rekeyed(key: PageKey, fingerprint: bytes) -> PageKey:
    """Return the key that a page with the same block hash has under another fingerprint."""
    return PageKey(fingerprint + key[DIGEST_BYTES:])


def tail_key(parent: bytes, tokens: Sequence[int], extra: object) -> PageKey:
    """Build the key of a partial tail block, which vLLM does not hash.

    Args:
        parent: key of the page before the tail block; the fingerprint if there is no such page.
        tokens: tokens whose KV the block holds, fewer than a block.
        extra: vLLM's extra keys of those tokens (LoRA, multimodal, salt).
    """
    digest = sha256(b"tail")
    digest.update(parent)
    digest.update(array("q", tokens).tobytes())
    digest.update(repr(extra).encode())
    return PageKey(parent[:DIGEST_BYTES] + digest.digest())
