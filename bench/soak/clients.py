"""The clients of a soak: random agents, and two that a fair server must not let harm the others.

Each has a ``cache_salt`` of its own, as a gateway gives its tenants one; the agents share one.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tiered_kv.bench.common.server import MODEL_NAME

AGENTS = 6
MAX_LEN = 2_048
RESET_SHARE, HANG_UP_SHARE, NONSENSE_SHARE = 0.01, 0.08, 0.08
LEAVES_S = 2.0, 8.0
"""Between two jobs of the client that leaves them open."""
NONSENSE: Sequence[Any] = (
    {"job_id": {"a": 1}},
    {"job_id": "j", "is_last_step": "perhaps"},
    {"is_last_step": True, "expected_tool_s": -1},
    {"job_id": 3.5, "unknown": [None]},
)
LIES: Sequence[dict[str, Any]] = (
    {"expected_tool_s": 604_800},
    {"expected_tool_s": 0.001},
    {"tool_name": "bash", "tool_command": "sleep 86400"},
    {"tool_name": "bash", "tool_command": "true"},
    {"is_last_step": True},
)
"""Said of tools, or of the turn, whatever comes after it."""


class RequestError(Exception):
    """The server refused a request, or broke off its answer."""


@dataclass(slots=True)
class Tally:
    """Everything the clients of one server saw.

    Attributes:
        first_tokens: seconds to the first token of each agent's new job.
        samples: seconds, and bytes of the server's memory.
    """

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class Client:
    """One client of a server.

    Attributes:
        salt: its ``cache_salt``. until: monotonic seconds at which it stops.
    """

    http: httpx2.AsyncClient
    rng: random.Random
    salt: str
    until: float
    tally: Tally

    def goes_on(self) -> bool:
        """Look at the clock: False once time is up."""
        return time.monotonic() < self.until

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self.rng.randrange(40_000) for _ in range(count)]

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end."""
        await asyncio.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    async def ask(
        self, prompt: Sequence[int], tokens: int, hints: Any, patience_s: float | None = None
    ) -> float | None:
        """Send a request, and hang up after ``patience_s``.

        Returns:
            Seconds to the first token; None if there was none.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_salt": self.salt,
            **({} if hints is None else {"kv_transfer_params": hints}),
        }
        self.tally.requests += 1
        try:
            async with asyncio.timeout(patience_s):
                return await self._first_token(body)
        except TimeoutError:
            return None  # it has hung up
        except (httpx2.HTTPError, RequestError) as error:
            self.tally.errors.append(repr(error))
            return None

    async def _first_token(self, body: dict[str, Any]) -> float:
        """Read a whole answer.

        Raises:
            RequestError: it is refused, or incomplete.
        """
        began, first = time.monotonic(), None
        ended = False
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise RequestError(f"{answer.status_code}: {text[:200]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                elif "error" in json.loads(line[6:]):
                    raise RequestError(line[:200])
                elif first is None:
                    first = time.monotonic() - began
        if first is None or not ended:
            raise RequestError("an answer broke off")
        return first


async def work(client: Client) -> None:
    """One agent after the other: contexts grow turn by turn, some hang up, some talk nonsense."""
    rng = client.rng
    while client.goes_on():
        name = f"job-{rng.getrandbits(48):x}"
        context = client.tokens(rng.randrange(20, 900))
        turns = rng.randrange(1, 6)
        for number in range(turns):
            tokens = rng.randrange(1, 25)
            if len(context) + tokens >= MAX_LEN or not client.goes_on():
                break
            hints: Any = {"job_id": name, "is_last_step": number + 1 == turns}
            if rng.random() < NONSENSE_SHARE:
                hints = rng.choice(NONSENSE)
            elif rng.random() < 0.2:
                hints = None
            patience_s = rng.uniform(0.01, 0.5) if rng.random() < HANG_UP_SHARE else None
            first_s = await client.ask(context, tokens, hints, patience_s)
            if first_s is not None and not number and patience_s is None:
                client.tally.first_tokens.append(first_s)
            context += client.tokens(tokens + rng.randrange(5, 200))
            await client.pause(rng.choice([0.0, 0.05, 0.3, 1.0]))
            if rng.random() < RESET_SHARE:
                await client.http.post("/reset_prefix_cache")


async def abandon(client: Client) -> None:
    """One job after the other is begun, said to go on in a second, and never heard of again."""
    while client.goes_on():
        hints = {
            "job_id": f"left-{client.rng.getrandbits(48):x}",
            "is_last_step": False,
            "tool_name": "bash",
            "expected_tool_s": 1.0,
        }
        await client.ask(client.tokens(client.rng.randrange(100, 900)), 2, hints)
        await client.pause(client.rng.uniform(*LEAVES_S))


async def lie(client: Client) -> None:
    """Jobs of several turns; nothing that is said of their tools is so."""
    rng = client.rng
    while client.goes_on():
        name, context = f"lies-{rng.getrandbits(48):x}", client.tokens(rng.randrange(100, 600))
        for _ in range(rng.randrange(1, 5)):
            hints = {"job_id": name, "is_last_step": False, **rng.choice(LIES)}
            await client.ask(context, 4, hints)
            context += client.tokens(rng.randrange(5, 200))
            await client.pause(rng.choice([0.0, 0.5, 4.0]))
            if not client.goes_on():
                return


async def all_clients(http: httpx2.AsyncClient, seconds: float, seed: int, tally: Tally) -> None:
    """Agents side by side, beside one client that abandons jobs and one that lies."""
    until = time.monotonic() + seconds

    def client(salt: str, number: int) -> Client:
        return Client(http, random.Random(seed * 100 + number), salt, until, tally)

    await asyncio.gather(
        abandon(client("abandons", AGENTS)),
        lie(client("lies", AGENTS + 1)),
        *(work(client("agents", number)) for number in range(AGENTS)),
    )
