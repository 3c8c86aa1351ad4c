"""``Request`` (``runtime.base``) on top of vLLM's requests; requests that never run, created to
compute the keys of a context as vLLM would; and sampling parameters as JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from tiered_kv.connectors.runtime.base import MakeRequest, Sampling
from tiered_kv.policies.jobs.hints import TurnHints, read_hints

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
"""Sampling parameters that a snapshot stores. Stop strings need no further state: they are matched
against the answer so far."""
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_WITHOUT = {
    "structured_outputs": "structured output",
    "logit_bias": "logit biases",
    "allowed_token_ids": "allowed tokens",
    "bad_words": "bad words",
    "thinking_token_budget": "a thinking budget",
    "logits_processors": "logit processors",
}
"""Sampling parameters whose state cannot be derived from the tokens, with their names in
messages."""


def read_sampling(request: Any) -> Sampling:
    """Return the sampling parameters of a vLLM request."""
    params = request.sampling_params
    if params is None:
        return Sampling(inexact="the request generates no text.")
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
            return f"the turn has {words}, whose state is not part of a snapshot."
    if params.temperature != 0:
        return "the turn is not greedy: send temperature 0."
    if any(getattr(params, name) != value for name, value in _NEUTRAL.items()):
        return "the turn has penalties, which count prompt and answer tokens separately."
    if params.min_tokens:
        return "the turn has min_tokens, which is counted from the start of its answer."
    return None


_ANSWERED = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)
_READY = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


PLUGIN, UNNAMED = "tiered_kv", 100

logger = logging.getLogger(__name__)


def hints_of(request: Any) -> TurnHints:
    """Read the hints that the client sent with the prompt."""
    sampling = request.sampling_params
    xargs = sampling.extra_args if sampling is not None else None
    session_id = getattr(request, "session_id", None)
    kv_hints = getattr(request, "kv_hints", None)  # earlier versions of vLLM have none
    return read_hints(request.kv_transfer_params, xargs, session_id, kv_hints)


class UnreadIds:
    """Logs once that clients may send ids that are not read, because the engine does not see
    headers.

    The message is logged if ``UNNAMED`` requests named no job, no request came through the
    middleware, and the plugin that adds the middleware is not enabled.

    Args:
        env: environment of the engine, a copy of the API server's environment.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        enabled = env.get("VLLM_PLUGINS", "").split(",")
        self._left = 0 if PLUGIN in enabled else UNNAMED

    def look(self, hints: TurnHints) -> None:
        """Count a request with these hints. Logs the message once it is due."""
        if not self._left:
            return
        if hints.who.carried:
            self._left = 0
        elif hints.job_id is None:
            self._left -= 1
            if not self._left:
                logger.info(
                    "%d requests named no job, and none came through tiered-kv's middleware. If "
                    "clients name their sessions in headers or body fields, as Claude Code, Codex "
                    "and OpenCode do, tiered-kv does not see these names: set VLLM_PLUGINS=%s",
                    UNNAMED,
                    PLUGIN,
                )


class VllmRequest:
    """vLLM's request as a ``Request`` (``runtime.base``).

    Args:
        request: vLLM's own request.
    """

    __slots__ = ("_request", "request_id")

    def __init__(self, request: Any) -> None:
        self._request = request
        self.request_id: str = request.request_id

    @property
    def of_vllm(self) -> Any:
        """vLLM's own request."""
        return self._request

    @property
    def cache_salt(self) -> str | None:
        salt: str | None = self._request.cache_salt
        return salt

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        ids: Sequence[int] | None = self._request.prompt_token_ids
        return ids

    @property
    def output_token_ids(self) -> Sequence[int]:
        ids: Sequence[int] = self._request.output_token_ids
        return ids

    @property
    def all_token_ids(self) -> Sequence[int]:
        ids: Sequence[int] = self._request.all_token_ids
        return ids

    @property
    def text_only(self) -> bool:
        embeds = getattr(self._request, "prompt_embeds", None)
        return not self._request.mm_features and embeds is None

    @property
    def block_hashes(self) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return int(self._request.num_output_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def num_in_flight_tokens(self) -> int:
        return int(self._request.num_in_flight_tokens)

    @property
    def num_preemptions(self) -> int:
        return int(self._request.num_preemptions)

    @property
    def arrival_time(self) -> float:
        return float(self._request.arrival_time)

    @property
    def adapter(self) -> object | None:
        found: object | None = self._request.lora_request
        return found

    @property
    def reads_cache(self) -> bool:
        return not self._request.skip_reading_prefix_cache

    @property
    def streams_input(self) -> bool:
        return bool(self._request.resumable)

    @property
    def waits_for_kv(self) -> bool:
        return self._request.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    @property
    def finished(self) -> bool:
        return bool(self._request.is_finished())

    @property
    def answered(self) -> bool:
        """True if the answer is complete. Stop strings are matched by the API server, not by the
        engine, and the API server then aborts the request. So an aborted request with stop strings
        and any output is assumed to have matched a stop string."""
        request = self._request
        if request.status is RequestStatus.FINISHED_ABORTED:
            sampling = request.sampling_params
            return bool(sampling is not None and sampling.stop and request.num_output_tokens)
        return request.status in _ANSWERED

    @property
    def text_cut(self) -> bool:
        return self._request.status is RequestStatus.FINISHED_ABORTED

    @property
    def shared_tokens(self) -> int:
        return int(getattr(self._request, "shared_prefix_boundary", 0) or 0)

    @property
    def outcome(self) -> str:
        return str(self._request.status.name)

    @property
    def priority(self) -> int:
        return int(self._request.priority)

    @property
    def ready(self) -> bool:
        return self._request.status in _READY

    @property
    def sampling(self) -> Sampling:
        return read_sampling(self._request)

    def end_after_next_token(self) -> None:
        """Stop the request's answer after the next token, through a limit that vLLM checks after
        each token."""
        request = self._request
        request.max_tokens = min(request.max_tokens, int(request.num_output_tokens) + 1)

    def extra_key(self, token: int) -> object:
        extra, _ = generate_block_hash_extra_keys(self._request, token, token + 1, 0)
        return extra

    def extra_keys(self, start: int, block_size: int, blocks: int) -> Sequence[object] | None:
        request = self._request
        if self.text_only and request.lora_request is None and (start or not request.cache_salt):
            return None
        found, at = [], 0
        for first in range(start, start + blocks * block_size, block_size):
            extra, at = generate_block_hash_extra_keys(request, first, first + block_size, at)
            found.append(extra)
        return found


def request_maker(vllm_config: Any) -> MakeRequest:
    """Return a function that creates requests for computing page keys. The requests never run.
    Must be called in the engine core's process, where vLLM has initialized the seed of block
    hashes."""
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
