"""The clients of a soak test: agents that never end, newcomers, and clients whose behaviour must
not harm other clients.

The same seed produces the same clients, so the clients of two servers send the same prompts in the
same order. Each client has its own ``cache_salt``, like the tenants of a gateway, except that
agents and newcomers share one.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tiered_kv.bench.agents.client import Ask, trouble
from tiered_kv.bench.agents.client import Client as OpenAIClient

from .tally import Tally, Turn

SEATS = 4
"""``--max-num-seqs`` of the servers."""
AGENTS = 6
PROXY_TURNS = 3
"""Number of concurrent turns of the client that uses a single session id."""
MAX_LEN = 2_048
LONGEST_CONTEXT, HEAD, TAIL = 1_600, 256, 512
"""Maximum context of an agent, and the head and tail that the agent keeps when its context exceeds
the maximum, in tokens."""
NEWCOMER_EVERY_S, SNAPSHOT_EVERY_S, UPDATE_EVERY_S = 4.0, 5.0, 60.0
LEAVES_S = 2.0, 8.0
"""Minimum and maximum time between two jobs of the client that abandons its jobs, seconds."""
HANG_UP_SHARE, NONSENSE_SHARE = 0.08, 0.08
OPERATION_S = 300.0
"""Timeout of a snapshot, restore or fork, seconds. Such a call can wait for a turn that waits for a
seat."""
REFUSALS = (404, 409, 429)
"""HTTP statuses with which the snapshot routes refuse a call that is currently impossible
(docs/snapshots.md)."""
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
"""False hints about tools or turns."""


@dataclass(slots=True)
class Site:
    """A server as seen by its clients.

    Attributes:
        openai: client for turns.
        http: client for the other routes.
        until: monotonic time at which the clients stop, seconds.
        tally: observations of the clients.
        weights: folders of the weights to serve alternately, starting with the first.
        snapshots: folder of the server's snapshots; None for stock vLLM, which has none.
        live: context of each agent, by job.
        serving: the current weights; None during an update.
        generation: part of each ``cache_salt``, so that no older KV is found.
    """

    openai: OpenAIClient
    http: httpx2.AsyncClient
    until: float
    seed: int
    tally: Tally
    weights: Sequence[Path]
    snapshots: Path | None = None
    live: dict[str, list[int]] = field(default_factory=dict)
    serving: str | None = None
    generation: int = 0

    def goes_on(self) -> bool:
        """Return True until the time is up."""
        return time.monotonic() < self.until

    async def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the end of the run if that is earlier."""
        await asyncio.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> bool:
        """Send a POST request to a management route of the connector or of vLLM, and count refusals
        and errors.

        Returns:
            True if the call succeeded.
        """
        try:
            answer = await self.http.post(path, json=body)
        except httpx2.HTTPError as error:
            self.tally.errors.append(f"{path}: {error!r}")
            return False
        if answer.status_code in REFUSALS and path.startswith("/tiered_kv/"):
            self.tally.refused[f"{path}: {answer.text}"] += 1
        elif answer.status_code != 200:
            self.tally.errors.append(f"{path}: {answer.status_code}: {answer.text[:200]}")
        return answer.status_code == 200


@dataclass(slots=True)
class Client:
    """One client of a server.

    Attributes:
        salt: first part of the client's ``cache_salt``.
        session: value of its header ``X-Session-ID``; None sends no header.
    """

    site: Site
    rng: random.Random
    salt: str
    session: str | None = None

    def tokens(self, count: int) -> list[int]:
        """Return ``count`` random token ids."""
        return [self.rng.randrange(40_000) for _ in range(count)]

    async def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        hints: Any,
        patience_s: float | None = None,
        *,
        newcomer: bool = False,
    ) -> None:
        """Send a turn and read its answer. The answer, or the error of a failed turn, is added to
        the tally.

        Args:
            tokens: length of the answer.
            hints: value of ``kv_transfer_params``; None sends no hints.
            patience_s: the client hangs up after this time; None waits for the answer.
            newcomer: True for the first turn of a newcomer.
        """
        site = self.site
        ask = Ask(
            prompt=prompt,
            max_tokens=tokens,
            session=self.session,
            salt=f"{self.salt}-{site.generation}",
            logprobs=2,
            extra={} if hints is None else {"kv_transfer_params": hints},
        )
        sent_at, weights, updates = time.monotonic(), site.serving, site.tally.updates
        site.tally.requests += 1
        site.tally.open += 1
        try:
            async with asyncio.timeout(patience_s) as patience:
                answer = await site.openai.ask(ask)
        except Exception as error:
            if not patience.expired():  # a client whose patience expired has hung up
                site.tally.errors.append(f"a turn {trouble(error)}")
            return
        finally:
            site.tally.open -= 1
        if len(answer.tokens) != tokens:
            site.tally.errors.append("an answer ended early")
            return
        same = weights == site.serving and updates == site.tally.updates
        site.tally.turns.append(
            Turn(
                sent_at,
                answer.ttft_s,
                hash((tuple(prompt), tokens)),
                weights if same else None,
                answer.tokens,
                answer.margins,
                newcomer,
            )
        )


async def work(client: Client, name: str) -> None:
    """Play an agent that never ends. The context grows turn by turn, and is truncated when it is
    too long. At random, the agent hangs up before the answer ends, sends invalid hints, or sends no
    hints.
    """
    rng, site = client.rng, client.site
    context = client.tokens(rng.randrange(20, 900))
    while site.goes_on():
        if len(context) > LONGEST_CONTEXT:
            context = context[:HEAD] + context[-TAIL:]
        site.live[name] = context
        tokens = rng.randrange(1, 25)
        hints: Any = {"job_id": name, "is_last_step": False}
        if rng.random() < NONSENSE_SHARE:
            hints = rng.choice(NONSENSE)
        elif rng.random() < 0.2:
            hints = None
        patience_s = rng.uniform(0.01, 0.5) if rng.random() < HANG_UP_SHARE else None
        await client.ask(context, tokens, hints, patience_s)
        context = context + client.tokens(tokens + rng.randrange(5, 200))
        await site.pause(rng.choice([0.0, 0.05, 0.3, 1.0]))


async def proxy(client: Client) -> None:
    """Play a proxy that sends one conversation after another under a single session id."""
    rng = client.rng
    while client.site.goes_on():
        context = client.tokens(rng.randrange(100, 600))
        for _ in range(rng.randrange(1, 6)):
            await client.ask(context, rng.randrange(4, 16), None)
            context = context + client.tokens(rng.randrange(20, 150))
            if not client.site.goes_on():
                return


async def newcomers(site: Site) -> None:
    """Start new jobs at a fixed pace, however long earlier jobs wait."""
    began, number = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while site.goes_on():
            rng = random.Random(f"{site.seed} newcomer {number}")
            group.create_task(_newcomer(Client(site, rng, "agents"), f"newcomer-{number}"))
            number += 1
            await site.pause(began + number * NEWCOMER_EVERY_S - time.monotonic())


async def _newcomer(client: Client, name: str) -> None:
    """Play a job of two turns."""
    context = client.tokens(client.rng.randrange(20, 900))
    await client.ask(context, 8, {"job_id": name, "is_last_step": False}, newcomer=True)
    await client.site.pause(client.rng.uniform(0.5, 4.0))
    if client.site.goes_on():
        context = context + client.tokens(client.rng.randrange(20, 150))
        await client.ask(context, 8, {"job_id": name, "is_last_step": True})


async def abandon(client: Client) -> None:
    """Start one job after another. Each job announces that its next turn follows in a second, and
    never sends that turn.
    """
    while client.site.goes_on():
        hints = {
            "job_id": f"left-{client.rng.getrandbits(48):x}",
            "is_last_step": False,
            "tool_name": "bash",
            "expected_tool_s": 1.0,
        }
        await client.ask(client.tokens(client.rng.randrange(100, 900)), 2, hints)
        await client.site.pause(client.rng.uniform(*LEAVES_S))


async def lie(client: Client) -> None:
    """Play jobs of several turns whose hints about tools are all false."""
    rng = client.rng
    while client.site.goes_on():
        name, context = f"lies-{rng.getrandbits(48):x}", client.tokens(rng.randrange(100, 600))
        for _ in range(rng.randrange(1, 5)):
            hints = {"job_id": name, "is_last_step": False, **rng.choice(LIES)}
            await client.ask(context, 4, hints)
            context += client.tokens(rng.randrange(5, 200))
            await client.site.pause(rng.choice([0.0, 0.5, 4.0]))
            if not client.site.goes_on():
                return


async def keep(client: Client) -> None:
    """Take snapshots of running or waiting agents, restore them as other jobs, delete the
    snapshots, and fork agents. Each new job sends one turn. On stock vLLM, only these turns are
    sent.
    """
    site, rng = client.site, client.rng
    number = 0
    while site.goes_on():
        await site.pause(SNAPSHOT_EVERY_S)
        job, number = f"agent-{rng.randrange(AGENTS)}", number + 1
        name, back, fork = f"soak-{number}", f"back-{number}", f"fork-{number}"
        prompt = site.live.get(job, []) + client.tokens(20)
        taken = {"job": job, "name": name, "wait_turn": rng.random() < 0.3}
        if site.snapshots is not None:
            patience = {"timeout_s": OPERATION_S}
            if await site.call("/tiered_kv/snapshots", taken | patience):
                site.tally.snapshots += 1
                restored = {"name": name, "job": back} | patience
                site.tally.snapshots += await site.call("/tiered_kv/restores", restored)
                await asyncio.to_thread(shutil.rmtree, site.snapshots / name)
            forked = {"job": job, "as": [fork]} | patience
            site.tally.snapshots += await site.call("/tiered_kv/forks", forked)
        for child in (back, fork):
            await client.ask(prompt, 4, {"job_id": child, "is_last_step": True})


async def update(site: Site) -> None:
    """Load weights into the server at a fixed pace. Every second update loads different weights,
    and the updates in between load the current weights again.

    Different weights come with a cache reset, as vLLM requires. Stock vLLM refuses a reset while
    requests run, so the clients of stock vLLM change their ``cache_salt`` at every update, which
    has the same effect as a reset.
    """
    every_s = min(UPDATE_EVERY_S, (site.until - time.monotonic()) / 3)
    began = time.monotonic()
    while True:
        await site.pause(began + (site.tally.updates + 1) * every_s - time.monotonic())
        if not site.goes_on():
            return
        number = site.tally.updates + 1
        await _load(site, site.weights[number // 2 % len(site.weights)], number)
        site.tally.updates = number


async def _load(site: Site, weights: Path, number: int) -> None:
    site.serving = None
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    await site.call("/collective_rpc", body)
    if site.snapshots is None:
        site.generation += 1
    if number % 2 == 0:
        await site.call("/reset_prefix_cache")
    site.serving = str(weights)


async def all_clients(site: Site) -> None:
    """Run all clients of a server until the time is up and their last turns are answered."""
    await _load(site, site.weights[0], 0)

    def client(salt: str, number: int, session: str | None = None) -> Client:
        return Client(site, random.Random(site.seed * 100 + number), salt, session)

    await asyncio.gather(
        abandon(client("abandons", AGENTS)),
        lie(client("lies", AGENTS + 1)),
        keep(client("agents", AGENTS + 2)),
        newcomers(site),
        update(site),
        *(proxy(client("proxy", 50 + number, "everybody")) for number in range(PROXY_TURNS)),
        *(work(client("agents", number), f"agent-{number}") for number in range(AGENTS)),
    )
