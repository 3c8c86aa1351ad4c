"""Sampling parameters of vLLM, told as JSON, and whether they allow an exact continuation."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.base import Sampling

TOLD = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
)
"""Parameters that a snapshot has. What stop strings have seen is the answer so far."""
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_WITHOUT = {
    "structured_outputs": "structured output",
    "logit_bias": "logit biases",
    "allowed_token_ids": "allowed tokens",
    "bad_words": "bad words",
    "thinking_token_budget": "a budget for thinking",
    "logits_processors": "logit processors",
}
"""Parameters whose state is not in the tokens, and what to call them."""


def read_sampling(request: Any) -> Sampling:
    """Read the sampling of one of vLLM's requests."""
    params = request.sampling_params
    if params is None:
        return Sampling(inexact="this request samples nothing.")
    told = {name: getattr(params, name, None) for name in TOLD}
    given = {name: value for name, value in told.items() if _is_plain(value)}
    return Sampling(given, _inexact(params))


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, (str, int)) for one in value)
    return value is not None and isinstance(value, (str, int, float, bool))


def _inexact(params: Any) -> str | None:
    for name, words in _WITHOUT.items():
        if getattr(params, name, None):
            return f"the turn has {words}, whose state is in no snapshot."
    if params.temperature != 0:
        return "the turn is not greedy: send temperature 0."
    if any(getattr(params, name) != value for name, value in _NEUTRAL.items()):
        return "the turn has penalties, which count tokens of prompt and answer apart."
    if params.min_tokens:
        return "the turn has min_tokens, which count from the begin of its answer."
    return None
