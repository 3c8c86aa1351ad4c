"""Running servers that are compared, and what texts are worth there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tiered_kv.bench.agents.openai_client import open_client
from tiered_kv.bench.replay.ab import HarnessError
from tiered_kv.bench.replay.play.drive import Hints

from .chat_client import Api, Asked, ChatClient
from .conversation import Conversation
from .filler import filler

PROBE_WORDS = (100, 500)
"""Lengths of two requests, whose tokens tell those of a word and those of a message."""
NONCE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A running server.

    Attributes:
        url: without ``/v1``.
        model: its name there; None: the server's only one.
    """

    name: str
    url: str
    model: str | None
    api: Api
    hints: Hints
    plain: bool
    api_key: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes at a server, by two requests to it."""

    words_per_token: float
    tokens_a_message: float
    tokens_a_character: float


async def measure_sizes(target: Target, model: str, sample: str) -> Measured:
    """Tokens of words, messages and of a recording's text.

    Args:
        sample: text of a recording; may be empty.

    Raises:
        HarnessError: the server does not answer as it should.
    """
    few, many = PROBE_WORDS
    texts = [filler("probe", few), filler("probe", many)] + ([sample] if sample else [])
    counts = []
    async with open_client(target.url, target.api_key) as client:
        chat = ChatClient(client, model, target.api, target.hints, target.plain)
        for at, text in enumerate(texts):
            talk = Conversation()
            talk.ask(text)
            asked = Asked(f"probe-{secrets.token_hex(NONCE_BYTES)}-{at}", True, 1)
            try:
                counts.append((await chat.turn(talk, asked)).prompt_tokens)
            except Exception as error:
                advice = "" if target.plain else "; --plain sends only what OpenAI's API knows"
                raise HarnessError(
                    f"{target.url} does not answer {target.api.value} requests: {error}{advice}"
                ) from error
    a_word = (counts[1] - counts[0]) / (many - few)
    if a_word <= 0:
        raise HarnessError(f"{target.url} counts {counts[1]} tokens for {many} words")
    a_message = max(0.0, counts[0] - few * a_word)
    a_character = (counts[2] - a_message) / len(sample) if sample else 0.0
    return Measured(1 / a_word, a_message, a_character)
