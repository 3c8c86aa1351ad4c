"""Client of all load generators: sends one turn over an OpenAI route, and times the answer.

A prompt is a list of messages (``/v1/chat/completions``), or a text or token ids
(``/v1/completions``). ``Client`` streams over the OpenAI SDK. ``ask_over`` uses a connection that
the caller has opened, and can read the answer streamed or whole. A server without tiered-kv's
plugin reports where a prompt's KV came from only if the answer is not streamed.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import httpx
import httpx2  # what the OpenAI SDK is built on
from openai import APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import Completion

from .forcing import XARG

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or messages."""

SILENCE_S = 900.0
"""Maximum wait for the next bytes of an answer, seconds. Under load, a turn can wait for minutes.
"""
KEEPALIVE_S = 2.0
"""Connections that were idle for longer, in seconds, are not reused: vLLM's server closes them
after 5 s, and a request sent at that moment would be lost."""
OPENAI_FIELDS = ("model", "messages", "prompt", "stream")
"""Request fields that the SDK takes as arguments. All other fields are added to the body unchanged.
"""
SESSION_HEADER = "X-Session-ID"
"""Header by which routers keep a job on one server."""


class AnswerError(RuntimeError):
    """A server's answer cannot be used. The message gives the reason."""


class Api(Enum):
    """Route for jobs whose turns are texts."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Hints(Enum):
    """Ways for a request to carry its job id. ``policies.jobs.hints`` reads all of these forms."""

    KV_PARAMS = "kv-params"
    """Hints in ``kv_transfer_params``."""
    XARGS = "xargs"
    """Hints in ``vllm_xargs``."""
    SESSION = "session"
    """Hints as ``session_id``, which cannot mark a turn as the last."""
    TOP_LEVEL = "top-level"
    """Hints as fields at the top level of the request's body, as Continuum's clients send them.
    Only ``JobMiddleware`` reads these fields.
    """
    NONE = "none"

    def body(self, job_id: str, is_last_step: bool, more: Mapping[str, str] = {}) -> dict[str, Any]:
        """Return the body fields that carry the hints of a turn.

        Args:
            is_last_step: True for the job's last turn.
            more: ``tool_name`` and ``tool_command`` of the tool that runs after the turn, and
                ``parent_job_id`` of a sub-agent. ``SESSION`` and ``TOP_LEVEL`` do not carry these.
        """
        hint = {"job_id": job_id, "is_last_step": is_last_step}
        bodies: dict[Hints, dict[str, Any]] = {
            Hints.KV_PARAMS: {"kv_transfer_params": {**hint, **more}},
            Hints.XARGS: {"vllm_xargs": {**hint, **more}},
            Hints.SESSION: {"session_id": job_id},
            Hints.TOP_LEVEL: hint,
            Hints.NONE: {},
        }
        return bodies[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A turn's request.

    Attributes:
        max_tokens: length of the answer, tokens. The model's end-of-text token is ignored.
        session: value of the header ``X-Session-ID``; None omits the header.
        salt: value of ``cache_salt``; None omits the field.
        forced: token ids that the server must generate as its answer. The server must run with
            ``forcing.SERVER_ARGS``.
        logprobs: number of alternatives per answered token; None requests no logprobs.
        extra: further fields of the body, such as those returned by ``Hints.body``.
        plain: send only fields of OpenAI's own API. The model may then end the answer before
            ``max_tokens``.
    """

    prompt: Prompt
    max_tokens: int
    session: str | None = None
    salt: str | None = None
    forced: Sequence[int] | None = None
    logprobs: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a list of messages."""
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], Mapping)

    @property
    def is_ids(self) -> bool:
        """True if the prompt is a list of token ids."""
        return not isinstance(self.prompt, str) and not self.is_chat

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """Return the body of the request.

        Args:
            model: name under which the server serves the model.
            stream: request a streamed answer.
        """
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "temperature": 0}
        body["messages" if self.is_chat else "prompt"] = self.prompt
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.plain:
            return body
        body |= {**self.extra, "ignore_eos": True}
        if self.is_ids:
            body["return_token_ids"] = True
        if self.logprobs:  # otherwise two tokens with the same text would share a key
            body["return_tokens_as_token_ids"] = True
        if self.salt is not None:
            body["cache_salt"] = self.salt
        if self.forced is not None:
            body["vllm_xargs"] = {**body.get("vllm_xargs", {}), XARG: tuple(self.forced)}
        return body

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the client adds to the request."""
        return {} if self.session is None else {SESSION_HEADER: self.session}


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    Attributes:
        sent_at: time at which the request was sent, as ``time.perf_counter``.
        ttft_s: seconds from sending to the first token, or to the end of the answer if no token
            decodes to text on its own (for example half a character).
        latency_s: seconds from sending to the last token.
        text: the answer without the model's reasoning.
        cached_tokens: prompt tokens that the server reports as cached; None if it reports none.
        tokens: ids of the answer's tokens, if the prompt was token ids.
        times: arrival time of each token in ``tokens``, on the same clock as ``sent_at``.
        logprobs: raw logprobs of the answer's tokens, if requested.
        margins: lead of the best over the second best alternative, in nats, if at least two
            alternatives were requested.
        sources: prompt tokens by the tier that held their KV, under the connector's names; empty
            without the connector, and for streamed answers without its plugin.
    """

    sent_at: float
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    text: str = ""
    tokens: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Time until the answer was complete, milliseconds."""
        return 1e3 * self.latency_s


@dataclass(frozen=True, slots=True)
class Client:
    """Streams turns from one server over the OpenAI SDK; see ``open_client``."""

    openai: AsyncOpenAI
    model: str

    async def ask(self, ask: Ask) -> Answer:
        """Send a turn and read its answer. Cancellation closes the connection.

        Raises:
            AnswerError: the answer lacks usage or token ids, or differs from the forced tokens.
            Exception: no answer arrived, or an incomplete one. The SDK passes some connection
                errors on unchanged; ``trouble`` describes any of them.
        """
        api: Any = self.openai.chat.completions if ask.is_chat else self.openai.completions
        body, reading = ask.body(self.model, stream=True), Reading(ask)
        known = {name: body.pop(name) for name in OPENAI_FIELDS if name in body}
        stream = await api.create(**known, extra_body=body, extra_headers=ask.headers)
        async with stream:
            async for chunk in stream:
                reading.add(chunk)
        return reading.answer()


@asynccontextmanager
async def open_client(
    base_url: str, model: str, api_key: str = "none", silence_s: float = SILENCE_S
) -> AsyncIterator[Client]:
    """Open a client that neither limits the load nor retries, and uses no proxy.

    Args:
        base_url: the server's URL without ``/v1``.
        silence_s: maximum wait for the next bytes of an answer, seconds.
    """
    limits = httpx2.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
    )
    http = DefaultAsyncHttpxClient(trust_env=False, timeout=silence_s, limits=limits)
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=api_key, http_client=http, max_retries=0
    ) as openai:
        yield Client(openai, model)


def ask_over(
    http: httpx.Client,
    model: str,
    ask: Ask,
    *,
    on_token: Callable[[Reading], None] | None = None,
) -> Answer:
    """Send a turn to the completions route over an open connection, and block until the answer is
    complete.

    Args:
        on_token: called after each received chunk, with the answer so far. If given, the answer is
            streamed.

    Raises:
        httpx.HTTPError: the connection failed, or the server refused a request whose answer is not
            streamed.
        AnswerError: as for ``Client.ask``, or the server refused a streamed request or reported an
            error in the stream.
    """
    body, reading = ask.body(model, stream=on_token is not None), Reading(ask)
    if on_token is None:
        reply = http.post("/v1/completions", json=body, headers=ask.headers)
        reading.add(Completion.construct(**reply.raise_for_status().json()))
        return reading.answer()
    with http.stream("POST", "/v1/completions", json=body, headers=ask.headers) as stream:
        if stream.is_error:
            text = stream.read().decode(errors="replace")
            raise AnswerError(f"the server answered with status {stream.status_code}: {text}")
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise AnswerError(line)
            reading.add(Completion.construct(**chunk))
            on_token(reading)
    return reading.answer()


class Reading:
    """An answer that is being received, whole or in chunks. The creation of this object counts as
    the time at which the request was sent.

    Attributes:
        tokens: token ids received so far.
    """

    def __init__(self, ask: Ask) -> None:
        self.tokens: list[int] = []
        self._ask = ask
        self._sent_at = time.perf_counter()
        self._first: float | None = None
        self._last = 0.0
        self._times: list[float] = []
        self._text: list[str] = []
        self._logprobs: list[float] = []
        self._margins: list[float] = []
        self._usage: Any = None
        self._sources: Mapping[str, int] = {}

    def add(self, chunk: Any) -> None:
        """Add a chunk, or the whole answer, as the SDK parses it."""
        now = time.perf_counter()
        self._usage = chunk.usage or self._usage
        params = (chunk.model_extra or {}).get("kv_transfer_params") or {}
        self._sources = params.get("tiered_kv") or self._sources
        for choice in chunk.choices:
            ids = (choice.model_extra or {}).get("token_ids") or []
            text, reasoning = _text_of(choice)
            if not (ids or text or reasoning):
                continue
            self._first = now if self._first is None else self._first
            self._last = now
            self._text.append(text)
            self.tokens += ids
            self._times += [now] * len(ids)
            if choice.logprobs is not None:
                self._logprobs += choice.logprobs.token_logprobs or []
                self._margins += map(_margin, choice.logprobs.top_logprobs or [])

    def answer(self) -> Answer:
        """Return the complete answer.

        Raises:
            AnswerError: the answer lacks usage or token ids, or differs from the forced tokens.
        """
        usage, ended_at = self._usage, time.perf_counter()
        if usage is None or not usage.completion_tokens:
            raise AnswerError("the answer has no usage: the server does not report token counts")
        if self._ask.is_ids and not self.tokens:
            raise AnswerError("the answer has no token ids: the server ignored return_token_ids")
        if self._ask.forced is not None and self.tokens != list(self._ask.forced):
            raise AnswerError("the answer differs from the forced tokens")
        details = usage.prompt_tokens_details
        return Answer(
            sent_at=self._sent_at,
            ttft_s=(ended_at if self._first is None else self._first) - self._sent_at,
            latency_s=(self._last or ended_at) - self._sent_at,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            text="".join(self._text),
            tokens=tuple(self.tokens),
            times=tuple(self._times),
            logprobs=tuple(self._logprobs),
            margins=tuple(self._margins) if (self._ask.logprobs or 0) > 1 else (),
            sources=self._sources,
        )


def trouble(error: Exception) -> str:
    """Describe why a turn got no answer. The text is the predicate of a sentence whose subject is
    the turn's name.
    """
    if isinstance(error, APITimeoutError):
        return "timed out without an answer"
    if isinstance(error, APIStatusError):
        return f"was refused: {error.message}"
    return f"got no answer: {error!r}"


def _text_of(choice: Any) -> tuple[str, str]:
    """Return the text and the reasoning in a chunk."""
    if hasattr(choice, "text"):
        return choice.text or "", ""
    extra: Mapping[str, Any] = choice.delta.model_extra or {}
    reasoning = extra.get("reasoning_content") or extra.get("reasoning") or ""
    return choice.delta.content or "", reasoning


def _margin(alternatives: Mapping[str, float]) -> float:
    """Return the lead of the best alternative over the second best, in nats; infinite if there is
    only one alternative.
    """
    best, *others = sorted(alternatives.values(), reverse=True)
    return best - others[0] if others else float("inf")
