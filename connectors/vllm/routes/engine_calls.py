"""Calls from the API server to its engine cores, one at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from .access import Refusal
from .core_method import METHOD, NO_CONNECTOR

Call = Callable[..., Awaitable[list[str]]]

PATIENCE_S = 30.0
"""Longest wait for the engines' replies, including the wait for earlier queries, seconds."""
MOST_WAITING = 32
"""Maximum number of queued queries. Further queries are refused."""
NO_WAY = (
    "This server cannot forward queries to an engine: use vLLM 0.30 to 0.33, with engines in "
    "separate processes."
)
NOT_THERE = (
    "The engine runs without TieredContinuumConnector: name it in --kv-transfer-config, and "
    "include tiered_kv in VLLM_PLUGINS or unset VLLM_PLUGINS."
)


class EngineCalls:
    """Sends queries to every engine core of this API server. Used on one event loop.

    Only one query is in flight at a time, so that an engine answers at most one query between two
    steps, however many arrive.

    Args:
        client: vLLM's engine client; None for a server without an engine.
    """

    def __init__(self, client: Any) -> None:
        self._call = _way_to_all(getattr(client, "engine_core", None))
        self._one_by_one = asyncio.Lock()
        self._waiting = 0
        self._missing = False

    async def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """Query all engines. Returns the reply of each engine, by rank.

        Raises:
            Refusal: the query cannot be sent, too many queries wait, or an engine does not reply or
                replies with an error.
        """
        if self._call is None:
            raise Refusal(501, NO_WAY)
        if self._missing:
            raise Refusal(501, NOT_THERE)
        if self._waiting >= MOST_WAITING:
            raise Refusal(429, "Too many queries are waiting for the engine: try again later.")
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE_S), self._one_by_one:
                texts = await self._call(METHOD, question)
        except TimeoutError:
            raise Refusal(
                504, f"The engine did not respond within {PATIENCE_S:.0f} s: try again."
            ) from None
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._waiting -= 1
        answers: list[dict[str, Any]] = [json.loads(text) for text in texts]
        for said in answers:
            if (wrong := said.get("error")) == NO_CONNECTOR:
                raise Refusal(501, NOT_THERE)
            if wrong is not None:
                raise Refusal(500, "The engine could not answer: see its log.")
        return answers

    def _failed(self, error: Exception) -> Refusal:
        if METHOD in str(error) and "has no attribute" in str(error):
            self._missing = True  # do not retry: an engine logs each such call
            return Refusal(501, NOT_THERE)
        return Refusal(503, "The engine does not answer: it is being stopped, or has failed.")


def _way_to_all(core: Any) -> Call | None:
    """Return a function that calls a method on every engine core; None if this client has no such
    function."""
    if (to_all := getattr(core, "call_utility_all_async", None)) is not None:  # since 0.32
        found: Call = to_all
        return found
    to_one = getattr(core, "_call_utility_async", None)
    if to_one is None:
        return None

    async def call(method: str, *args: Any) -> list[str]:
        calls = [to_one(method, *args, engine=engine) for engine in core.core_engines]
        found: list[str] = await asyncio.gather(*calls)
        return found

    return call
