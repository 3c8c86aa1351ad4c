"""Calls from the API server to its engine cores, one at a time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .core_method import METHOD, NO_CONNECTOR
from .refusals import Refusal

logger = logging.getLogger(__name__)

Call = Callable[..., Awaitable[list[str]]]

PATIENCE_S = 30.0
"""Longest wait for the engines' answers, seconds: they come between two steps."""
MOST_WAITING = 32
"""Questions that wait for their turn: more are refused."""
TOO_OLD = (
    "This vLLM cannot pass questions on to its engine: use 0.32 or 0.33, whose server runs the "
    "engine in a process of its own."
)
NOT_THERE = (
    "The engine runs without TieredContinuumConnector: name it in --kv-transfer-config, and leave "
    "VLLM_PLUGINS unset or name tiered_kv in it."
)


class EngineCalls:
    """Questions to every engine core of this API server. One event loop.

    One question is under way at a time, so that however many come, an engine answers at most one
    between two steps.

    Args:
        client: vLLM's engine client; None for a server without an engine.
    """

    def __init__(self, client: Any) -> None:
        core = getattr(client, "engine_core", None)
        self._call: Call | None = getattr(core, "call_utility_all_async", None)
        self._one_by_one = asyncio.Lock()
        self._waiting = 0
        self._missing = False

    async def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask all engines; returns the answer of each, by rank.

        Raises:
            Refusal: there is no answer.
        """
        if self._call is None:
            raise Refusal(501, TOO_OLD)
        if self._missing:
            raise Refusal(501, NOT_THERE)
        if self._waiting >= MOST_WAITING:
            raise Refusal(429, "Too many questions wait for the engine: ask again in a while.")
        self._waiting += 1
        try:
            async with self._one_by_one:
                texts = await asyncio.wait_for(self._call(METHOD, question), PATIENCE_S)
        except TimeoutError:
            raise Refusal(
                504, f"The engine has not answered for {PATIENCE_S:.0f} s: ask again."
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
                raise Refusal(500, "The engine could not answer; its log says why.")
        return answers

    def _failed(self, error: Exception) -> Refusal:
        if METHOD in str(error) and "has no attribute" in str(error):
            self._missing = True  # an engine logs each such call, and would never have it
            return Refusal(501, NOT_THERE)
        return Refusal(503, "The engine does not answer: it is being stopped, or has failed.")
