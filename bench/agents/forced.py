"""A logits processor that forces recorded answers. It runs inside vLLM.

    --logits-processors tiered_kv.bench.agents.forced:ForcedTokens

A request whose ``vllm_xargs`` contain ``{"forced_tokens": [id, ...]}`` is answered with these ids.
After the last id, the model generates its own tokens. The model runs as usual; only the sampled
tokens change. vLLM computes raw logprobs before any processor runs (``--logprobs-mode
raw_logprobs``, its default), so the logprobs of forced tokens are the model's own.

vLLM's V1 model runner defines the interface. ``forcing`` has the flags and the environment of the
server.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from .forcing import XARG


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that forces the output tokens of requests that have a token list.

    The position in the list is the length of the request's output, which vLLM tracks, so preempted
    requests resume correctly. A list with an id outside the vocabulary is ignored.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._forced: dict[int, tuple[list[int], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Validate a new request. On an error, vLLM answers with status 400.

        Raises:
            ValueError: ``forced_tokens`` is not a list of token ids.
        """
        said = (sampling_params.extra_args or {}).get(XARG)
        if said is not None and not _are_ids(said):
            raise ValueError(f"{XARG} must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, self._new)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set all logits in each forced row to minus infinity, in place, except the next forced
        token's.

        Args:
            logits: (requests, vocabulary), float32.
        """
        rows, ids = [], []
        for row, (forced, output) in self._forced.items():
            if len(output) < len(forced):
                rows.append(row)
                ids.append(forced[len(output)])
        if rows:
            logits[rows] = -torch.inf
            logits[rows, ids] = 0.0
        return logits

    def _new(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> tuple[list[int], list[int]] | None:
        forced: Any = (params.extra_args or {}).get(XARG)
        # The vocabulary is unknown to validate_params, and an error here would stop the engine, so
        # a list with an id outside the vocabulary is ignored.
        if not _are_ids(forced) or any(token >= self._vocabulary for token in forced):
            return None
        return forced, output


def _are_ids(said: Any) -> bool:
    return isinstance(said, list) and all(type(token) is int and token >= 0 for token in said)
