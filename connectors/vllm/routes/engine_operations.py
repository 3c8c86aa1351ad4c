"""Operations of the engines: begun with one question, and asked about until they are over.

Each look is a question of its own, so that others are answered meanwhile. An operation goes on
whether or not somebody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from .refusals import NO_JOB, Refusal

Ask = Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Puts a question to all engines; returns the answer of each, by rank."""
Gone = Callable[[], Awaitable[bool]]
"""Tells whether nobody waits any more."""

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.005, 0.1, 1.1
"""Time between two looks at an operation: at first, at most, and by what it grows."""
MOST_WAITED_FOR = 16
"""Operations that are waited for at one time: more are refused. Each look is a question, which an
engine answers between two steps."""

SEVERAL = (
    "There are several jobs of this id, with cache salts of their own or in several engines: give "
    "each job an id of its own."
)
CROWD = "Too many operations on jobs are under way: ask again in a while."
_BUSY = (429, 504)
"""Refusals of a question for which the engine has no time: the operation goes on."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Patience of whoever waits.

    Attributes:
        timeout_s: longest wait, seconds.
        until: its end, by the event loop's clock.
        gone: tells whether nobody waits any more.
    """

    timeout_s: float
    until: float
    gone: Gone

    @classmethod
    def of(cls, timeout_s: float, gone: Gone) -> Patience:
        """The patience of somebody who begins to wait now."""
        return cls(timeout_s, _now() + timeout_s, gone)

    @property
    def left_s(self) -> float:
        """Time that is left, seconds."""
        return max(0.0, self.until - _now())

    async def is_over(self) -> bool:
        """True once there is no time left, or nobody waits."""
        return self.left_s == 0 or await self.gone()


class EngineOperations:
    """Operations that this API server waits for. One event loop.

    Args:
        ask: the way to the engines.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._waited_for = 0

    async def of_one(self, question: dict[str, Any], patience: Patience) -> dict[str, Any]:
        """Have the one engine that has the question's job do what is asked.

        Returns:
            The result, with the engine's number.

        Raises:
            Refusal: no engine has the job, or several jobs have its id; it failed, or is not over.
        """
        jobs = await self._ask({"ask": "job", "id": question["job"]})
        if sum(len(said["jobs"]) for said in jobs) > 1:
            raise Refusal(409, SEVERAL)
        results = await self._results(question, patience)
        if len(results) > 1:  # the job came to another engine just now
            raise Refusal(409, SEVERAL)
        return results[0]

    async def of_all(self, question: dict[str, Any], patience: Patience) -> list[dict[str, Any]]:
        """Have all engines do what is asked.

        Returns:
            The result of each with its number, by rank.

        Raises:
            Refusal: it is refused, failed in one, or is not over. The others have done it.
        """
        return await self._results(question, patience, of_all=True)

    async def _results(
        self, question: dict[str, Any], patience: Patience, *, of_all: bool = False
    ) -> list[dict[str, Any]]:
        if self._waited_for >= MOST_WAITED_FOR:
            raise Refusal(429, CROWD)
        self._waited_for += 1
        try:
            answers = await self._ask(question)
            begun = [said for said in answers if said.get("operation") is not None]
            refused = [_refusal(said) for said in answers if "refused" in said]
            outcomes = [await self._outcome(said, patience) for said in begun]
        finally:
            self._waited_for -= 1
        failed = [one for one in outcomes if isinstance(one, Refusal)]
        if not begun or of_all:
            failed += refused
        if failed:
            raise failed[0]
        if not begun:
            raise Refusal(404, NO_JOB)
        return [one for one in outcomes if not isinstance(one, Refusal)]

    async def _outcome(self, begun: dict[str, Any], patience: Patience) -> dict[str, Any] | Refusal:
        """Result of an operation, or why it failed.

        Raises:
            Refusal: it is not over.
        """
        engine, pause = begun["engine"], FIRST_PAUSE_S
        while True:
            said = await self._state(engine, begun["operation"])
            match said["state"]:
                case "done":
                    return {"engine": engine, **said["result"]}
                case "failed":
                    return Refusal(409, str(said["why"]))
            if await patience.is_over():
                doing = said.get("doing")
                raise Refusal(
                    504,
                    f"It is not over after {patience.timeout_s:g} s, and goes on"
                    f"{f' ({doing})' if doing else ''}: to be told of its end, give a larger "
                    "timeout_s.",
                )
            await asyncio.sleep(min(pause, patience.left_s))
            pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_S)

    async def _state(self, engine: int, operation: int) -> dict[str, Any]:
        try:
            answers = await self._ask({"ask": "operation", "engine": engine, "id": operation})
        except Refusal as refusal:
            if refusal.status in _BUSY:
                return {"state": "running"}
            raise
        for said in answers:
            if said["engine"] == engine and said["state"] is not None:
                return said
        return {"state": "failed", "why": "The engine that did it is not there any more."}


def _refusal(said: dict[str, Any]) -> Refusal:
    return Refusal(501 if said.get("status") == 501 else 409, str(said["refused"]))


def _now() -> float:
    return asyncio.get_running_loop().time()
