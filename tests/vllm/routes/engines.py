"""Fake engine clients whose engines answer or fail as a test specifies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tiered_kv.connectors.vllm.routes.core_method import METHOD


class FakeCore:
    """A fake engine core client.

    Args:
        said: answer of each engine; an exception is raised instead.

    Attributes:
        asked: questions received so far.
        at_once: largest number of concurrent questions.
        go_on: set by default. Answers wait while it is cleared.
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
    """A fake of vLLM's engine client."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core


class WorkingCore:
    """A fake engine core client whose engines run operations on jobs.

    Args:
        jobs: names of each engine's jobs.

    Attributes:
        jobs: names of each engine's jobs. A name that occurs twice belongs to two jobs.
        looks: number of polls that find an operation running before a poll finds it done.
        fails, refuses: messages of engines that fail or refuse, by engine number.
        result: result of an operation.
        asked: questions received so far.
        at_once: largest number of concurrent questions.
    """

    def __init__(self, *jobs: Sequence[str]) -> None:
        self.jobs = jobs
        self.looks = 0
        self.fails: dict[int, str] = {}
        self.refuses: dict[int, tuple[str, int]] = {}
        self.result: dict[str, Any] = {"tokens": 7}
        self.asked: list[dict[str, Any]] = []
        self.at_once = 0
        self._under_way = 0
        self._looks: dict[tuple[int, int], int] = {}

    @property
    def begun(self) -> list[tuple[int, int]]:
        """Operations started so far, as pairs of engine number and operation number."""
        return list(self._looks)

    @property
    def done(self) -> list[tuple[int, int]]:
        """Operations that a poll has found done."""
        return [one for one, looks in self._looks.items() if looks > self.looks]

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        assert method == METHOD
        self.asked.append(question)
        self._under_way += 1
        self.at_once = max(self.at_once, self._under_way)
        await asyncio.sleep(0)
        self._under_way -= 1
        return [json.dumps(self._answer(engine, question)) for engine in range(len(self.jobs))]

    def _answer(self, engine: int, question: dict[str, Any]) -> dict[str, Any]:
        match question["ask"]:
            case "job":
                named = [name for name in self.jobs[engine] if name == question["id"]]
                return {"now": 1.0, "jobs": [{"id": name, "engine": engine} for name in named]}
            case "operation":
                said = self._state((engine, question["id"])) if question["engine"] == engine else {}
                return {"engine": engine, "state": None, **said}
            case "snapshot" | "fork" | "restore" as ask:
                return {"engine": engine, **self._begin(engine, ask, question)}
            case _:
                return {"engine": engine}

    def _begin(self, engine: int, ask: str, question: dict[str, Any]) -> dict[str, Any]:
        if engine in self.refuses:
            sentence, status = self.refuses[engine]
            return {"refused": sentence, "status": status}
        if ask != "restore" and question["job"] not in self.jobs[engine]:
            return {"operation": None}
        number = 10 * engine + len(self._looks)
        self._looks[engine, number] = 0
        return {"operation": number}

    def _state(self, operation: tuple[int, int]) -> dict[str, Any]:
        if operation not in self._looks:
            return {"state": "failed", "why": "It is not known."}
        self._looks[operation] += 1
        if self._looks[operation] <= self.looks:
            return {"state": "running", "doing": "writing pages"}
        if operation[0] in self.fails:
            return {"state": "failed", "why": self.fails[operation[0]]}
        return {"state": "done", "result": self.result}
