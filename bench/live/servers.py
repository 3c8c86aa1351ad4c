"""Running servers to compare: their models, counters, and the sizes of texts in their tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tiered_kv.bench.agents.client import Api, Hints, open_client
from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.agents.player import OnTurn, Player
from tiered_kv.doctor.running_server import UnreachableError, fetch, totals

from .texts import filler

PROBE_WORDS = (100, 500)
"""Lengths of two requests, in words. Their token counts yield the tokens per word and per message.
"""
NONCE_BYTES = 4
COUNTERS: Mapping[str, str] = {
    "vllm:prefix_cache_queries_total": "asked",
    "vllm:prefix_cache_hits_total": "vram",
    "vllm:external_prefix_cache_hits_total": "connector",
}
"""Counters on vLLM's /metrics page, in prompt tokens: all tokens looked up, tokens found in VRAM,
and tokens loaded by a connector."""


class LiveError(RuntimeError):
    """The server cannot be measured. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of texts in a server's tokens, measured with requests to the server.

    Attributes:
        words_per_token: words of generated text per token.
        tokens_a_message: tokens that the chat template adds per message.
        tokens_a_character: tokens per character of recorded text; 0 without recorded text.
    """

    words_per_token: float
    tokens_a_message: float
    tokens_a_character: float


@dataclass(frozen=True, slots=True)
class Target:
    """A running server.

    Attributes:
        name: name of the server in the results.
        url: base URL without ``/v1``.
        model: name of the model on the server.
        longest: maximum context length in tokens; None if the server does not report it.
        plain: send only fields of OpenAI's own API.
    """

    name: str
    url: str
    model: str
    longest: int | None
    api: Api
    hints: Hints
    plain: bool
    api_key: str

    @asynccontextmanager
    async def player(
        self, nonce: str, on_turn: OnTurn = lambda _name, _turn: None
    ) -> AsyncIterator[Player]:
        """Open a client, and yield a player for one run on this server.

        Args:
            nonce: prepended to job names sent to the server.
        """
        async with open_client(self.url, self.model, self.api_key) as client:
            yield Player(
                client,
                api=self.api,
                hints=self.hints,
                prefix=f"{nonce}-",
                sessions=True,
                plain=self.plain,
                on_turn=on_turn,
            )

    async def measure_sizes(self, sample: str) -> Sizes:
        """Measure the token counts of words, of messages, and of a recorded text.

        Args:
            sample: recorded text; may be empty.

        Raises:
            LiveError: the server does not answer, or its answer is invalid.
        """
        few, many = PROBE_WORDS
        counts = list[int]()
        async with self.player(secrets.token_hex(NONCE_BYTES)) as player:
            for text in filter(None, (filler("probe", few), filler("probe", many), sample)):
                turn = Turn((), (), 0.0, length=1, text=text)
                done = await player.job(Job(f"probe-{len(counts)}", "", (turn,)))
                if done.error is not None:
                    advice = (
                        ""
                        if self.plain
                        else "; try --plain, which sends only the fields of OpenAI's API"
                    )
                    raise LiveError(f"{self.url}, {self.api.value}: {done.error}{advice}")
                counts.append(done.turns[0].prompt_tokens)
        a_word = (counts[1] - counts[0]) / (many - few)
        if a_word <= 0:
            raise LiveError(f"{self.url} reports only {counts[1]} prompt tokens for {many} words")
        a_message = max(0.0, counts[0] - few * a_word)
        a_character = (counts[2] - a_message) / len(sample) if sample else 0.0
        return Sizes(1 / a_word, a_message, a_character)

    def counts(self) -> dict[str, float]:
        """Return the current values of ``COUNTERS``, summed over all engines. Returns no values if
        the server's /metrics page cannot be read.
        """
        try:
            found = totals(fetch(f"{self.url}/metrics", token=self.api_key))
        except UnreachableError:
            return {}
        return {ours: found[name] for name, ours in COUNTERS.items() if name in found}


def served(base_url: str, wanted: str | None, api_key: str) -> tuple[str, int | None]:
    """Return the name of a server's model, and its maximum context length in tokens, which is None
    if the server does not report it.

    Args:
        wanted: the model's name; None selects the server's first model.

    Raises:
        LiveError: the server does not answer, or does not serve the model.
    """
    try:
        page = json.loads(fetch(f"{base_url}/v1/models", token=api_key))
        models = {one["id"]: one.get("max_model_len") for one in page["data"]}
    except UnreachableError as error:
        raise LiveError(f"{base_url} does not answer: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LiveError(f"{base_url}/v1/models is not a list of models") from error
    if not models or (wanted is not None and wanted not in models):
        other = "" if wanted is None else f", not {wanted}"
        raise LiveError(f"{base_url} serves {', '.join(models) or 'no model'}{other}")
    name = wanted or next(iter(models))
    longest = models[name]
    return name, longest if isinstance(longest, int) and longest > 0 else None


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Return the difference between two readings of the counters. Returns no values if a counter
    decreased, which means that the server was restarted in between.
    """
    counts = {name: round(after[name] - before[name]) for name in before.keys() & after.keys()}
    return counts if all(count >= 0 for count in counts.values()) else {}
