"""One turn at a running server, streamed and timed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from openai import AsyncOpenAI

from tiered_kv.bench.replay.play.drive import Hints

from .conversation import Conversation

SESSION_HEADER = "X-Session-ID"
"""Sent with every request: routers keep a job on one server by it."""


class Api(Enum):
    """Route that a server is asked by."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, and what the server said about it. Times in seconds.

    Attributes:
        text: the answer, without what a model thinks before it.
        first_s: from sending to the first token. last_s: to the last.
        cached: tokens of the prompt that it had; None where the server does not tell.
    """

    text: str
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Wishes of a turn, beside its conversation.

    Attributes:
        job: name of the job at the server.
        last: no turn of the job follows.
        tool, tool_name: the tool that runs after it; may be empty.
    """

    job: str
    last: bool
    output_tokens: int
    tool: str = ""
    tool_name: str = ""


class AnswerError(Exception):
    """A server's answer is unusable; the message says why."""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A server's client.

    Args:
        plain: send only what OpenAI's API knows: nobody is named, and answers may end early.
    """

    client: AsyncOpenAI
    model: str
    api: Api
    hints: Hints
    plain: bool = False

    async def turn(self, conversation: Conversation, asked: Asked) -> Told:
        """Ask one turn.

        Raises:
            AnswerError: an answer without a token or without its counts.
            Exception: no answer, or half of one, as the OpenAI client and its transport say it.
        """
        began = time.perf_counter()
        stream = await self._ask(conversation, asked)
        text: list[str] = []
        first_s = last_s = None
        usage: Any = None
        async with stream:
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    said, thought = _text_of(choice)
                    if said or thought:
                        last_s = time.perf_counter() - began
                        first_s = first_s if first_s is not None else last_s
                        text.append(said)
        if usage is None or not usage.completion_tokens:
            raise AnswerError("an answer without usage: the server does not tell its tokens")
        ended_s = time.perf_counter() - began
        details = usage.prompt_tokens_details
        return Told(
            text="".join(text),
            # Tokens may be no text, such as half a character; then the end is all that is known.
            first_s=ended_s if first_s is None else first_s,
            last_s=ended_s if last_s is None else last_s,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached=details.cached_tokens if details is not None else None,
        )

    async def _ask(self, conversation: Conversation, asked: Asked) -> Any:
        common: dict[str, Any] = {
            "model": self.model,
            "max_tokens": asked.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": self._extra(asked),
            "extra_headers": {} if self.plain else {SESSION_HEADER: asked.job},
        }
        if self.api is Api.CHAT:
            messages: Any = conversation.chat()  # the client has a type for every role
            return await self.client.chat.completions.create(messages=messages, **common)
        return await self.client.completions.create(prompt=conversation.text(), **common)

    def _extra(self, asked: Asked) -> dict[str, Any]:
        if self.plain:
            return {}
        body = self.hints.body(asked.job, asked.last)
        tool = {"tool_name": asked.tool_name, "tool_command": asked.tool}
        for key in ("kv_transfer_params", "vllm_xargs"):
            if key in body:
                body[key] = {**body[key], **{name: said for name, said in tool.items() if said}}
        return {**body, "ignore_eos": True}


def _text_of(choice: Any) -> tuple[str, str]:
    """Text of a chunk, and the model's thoughts in it."""
    if hasattr(choice, "text"):
        return choice.text or "", ""
    extra: Mapping[str, Any] = choice.delta.model_extra or {}
    thoughts: Sequence[Any] = (extra.get("reasoning_content"), extra.get("reasoning"))
    return choice.delta.content or "", next((one for one in thoughts if one), "")
