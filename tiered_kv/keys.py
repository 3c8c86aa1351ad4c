"""Names of pages: what must be equal for two pages to hold the same bytes.

A page's key is ``fingerprint ‖ block hash``. vLLM's block hash covers the
tokens, the LoRA name, multimodal inputs and the cache salt; the fingerprint covers
what that hash leaves out, so that bytes of another model, dtype or generation can
never be found under the key of this one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import NewType, cast

PageKey = NewType("PageKey", bytes)
"""Identity of a page over all ranks: 16 bytes of fingerprint, then the block's hash."""

FORMAT_VERSION = 2
"""Raised whenever the bytes of a page, or what its key covers, change their meaning."""

UNIDENTIFIED = "unidentified-"
"""How the digest of a model without files begins; the rest is random."""

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a block hash leaves out.

    Attributes:
        model: digest of the model's files (see ``tiered_kv.digests``).
        adapter: digest of the LoRA adapter's files; empty without one.
        dtype: compute dtype of the model, for example ``bfloat16``.
        cache_dtype: dtype in which K and V are stored, for example ``auto`` or ``fp8``.
        kv_scales: where the scales of a quantised cache come from.
        config: the model's configuration as loaded, overrides included.
        group: the KV cache group the pages belong to.
        block_size: tokens of a page.
        layout: description of a page's byte regions, and of what lies where within them.
        ranks: number of tensor-parallel ranks a page is cut into.
        hash_algorithm: vLLM's block hash function and its seed.
        generation: empty; after a cache reset something that never was before, so that its
            pages are not taken for those of an engine that was reset as often.
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
        """Whether an engine started later can have the same fingerprint."""
        return not (self.generation or self.model.startswith(UNIDENTIFIED))

    def digest(self) -> bytes:
        """16 bytes that differ whenever a field does."""
        fields = {"format": FORMAT_VERSION, **asdict(self)}
        text = json.dumps(fields, sort_keys=True, default=str)
        return sha256(text.encode()).digest()[:_DIGEST_BYTES]


def page_keys(fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[PageKey]:
    """Keys of full blocks, from vLLM's hashes of them."""
    return cast("list[PageKey]", [fingerprint + block_hash for block_hash in block_hashes])


def tail_key(parent: bytes, tokens: Sequence[int], extra: object) -> PageKey:
    """Key of a partial tail block, which has no hash of vLLM's.

    Args:
        parent: key of the page before it, or the fingerprint if it is the first.
        tokens: the tokens whose KV the block holds, fewer than a block.
        extra: vLLM's extra keys of those tokens (LoRA, multimodal, salt).
    """
    digest = sha256(b"tail")
    digest.update(parent)
    digest.update(array("q", tokens).tobytes())
    digest.update(repr(extra).encode())
    return PageKey(parent[:_DIGEST_BYTES] + digest.digest())
