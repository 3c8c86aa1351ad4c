"""An engine client whose engines say, or fail, as a test tells."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tiered_kv.connectors.vllm.routes.core_method import METHOD


class FakeCore:
    """The client's way to its engines.

    Args:
        said: answer of each engine; an exception is raised.

    Attributes:
        asked: questions so far.
        at_once: most questions that were under way at one time.
        go_on: set unless answers are to wait.
    """

    def __init__(self, *said: dict[str, Any] | Exception) -> None:
        self.said: Sequence[dict[str, Any] | Exception] = said
        self.asked: list[dict[str, Any]] = []
        self.at_once = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._under_way = 0

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        assert method == METHOD
        self.asked.append(question)
        self._under_way += 1
        self.at_once = max(self.at_once, self._under_way)
        try:
            await self.go_on.wait()
            await asyncio.sleep(0)
            for one in self.said:
                if isinstance(one, Exception):
                    raise one
            return [json.dumps(one) for one in self.said]
        finally:
            self._under_way -= 1


class FakeClient:
    """vLLM's engine client."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core
