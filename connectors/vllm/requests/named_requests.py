"""Requests of vLLM that never run: they are made to name a context, as vLLM would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tiered_kv.connectors.runtime.base import MakeRequest

from .vllm_request import VllmRequest


def request_maker(vllm_config: Any) -> MakeRequest:
    """A maker of such requests for an engine. It belongs into the process of the engine core, where
    vLLM has chosen what its first block hash follows."""
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def make(token_ids: Sequence[int], salt: str | None, hash_tokens: int) -> VllmRequest:
        return VllmRequest(
            Request(
                request_id="tiered-kv-named",
                prompt_token_ids=list(token_ids),
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                cache_salt=salt,
                block_hasher=get_request_block_hasher(hash_tokens, hash_function),
            )
        )

    return make
