"""A real server under random agents for a while, and whether anything of it is left behind.

    python -m bench.soak --minutes 30 --json

Agents grow contexts turn by turn, pause, hang up in mid-answer, send hints that make no sense, and
now and then somebody resets the prefix cache. At the end the cache is reset once more, and then:

- ``requests``, ``errors``: sent, and those that failed though nobody had hung up.
- ``leaked``: what there is more of than after the warm-up, by name: pages in CPU memory, pinned
  blocks and orders by the connector's gauges, threads and file descriptors by /proc. Jobs and pages
  on SSD are not looked at.
- ``rss_slope``: MiB that the server's memory grows in a minute, over the second half of the run.
- ``rss_mib``: its memory at the begin, after each tenth of the run, and at the end.

On CPU PyTorch and oneDNN keep something for each number of tokens that they met: in a process of
its own, 500 of them on four layers of SmolLM2-135M took 1.1 GiB, and nothing with both caches off.
A server of a soak keeps few. ``--stock`` runs the same without the connector, as a control.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from bench.agents import ROOT
from bench.load import group_members
from bench.model import small_model
from bench.output import parser, progress, show
from bench.replay.kinds import BLOCK, SCHEDULER
from bench.replay.measure import resident_bytes
from bench.server import CONNECTOR, MODEL_NAME, ServerOptions, VllmServer, machine_dtype

AGENTS = 6
POOL_TOKENS, MAX_LEN = 6_400, 2_048
CPU_GIB, SSD_GIB = 0.25, 0.5
WARM_UP_S = 20.0
SAMPLE_EVERY_S = 2.0
RESET_SHARE, HANG_UP_SHARE, NONSENSE_SHARE = 0.01, 0.08, 0.08
SETTLE_S = 120.0
GAUGES = ("cpu_pages", "pinned_blocks", "orders_in_flight")
SLACK = {"threads": 4, "descriptors": 8}
"""What a server may have more of at the end: connections and pools that are kept for a while."""
FEW_SHAPES = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""For PyTorch and oneDNN: see the module."""
NONSENSE: Sequence[Any] = (
    {"job_id": {"a": 1}},
    {"job_id": "j", "is_last_step": "perhaps"},
    {"is_last_step": True, "expected_tool_s": -1},
    {"job_id": 3.5, "unknown": [None]},
)


@dataclass(slots=True)
class Tally:
    """What happened so far.

    Attributes:
        samples: seconds and bytes of the server's memory.
    """

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)


async def agent(client: httpx2.AsyncClient, rng: random.Random, until: float, tally: Tally) -> None:
    """One agent after the other, until time is up."""
    while time.monotonic() < until:
        name = f"job-{rng.getrandbits(48):x}"
        context = [rng.randrange(40_000) for _ in range(rng.randrange(20, 900))]
        turns = rng.randrange(1, 6)
        for number in range(turns):
            tokens = rng.randrange(1, 25)
            if len(context) + tokens >= MAX_LEN or time.monotonic() >= until:
                break
            hints: Any = {"job_id": name, "is_last_step": number + 1 == turns}
            if rng.random() < NONSENSE_SHARE:
                hints = rng.choice(NONSENSE)
            elif rng.random() < 0.2:
                hints = None
            await turn(client, rng, context, tokens, hints, tally)
            context += [rng.randrange(40_000) for _ in range(tokens + rng.randrange(5, 200))]
            await asyncio.sleep(rng.choice([0.0, 0.05, 0.3, 1.0]))
            if rng.random() < RESET_SHARE:
                await client.post("/reset_prefix_cache")


async def turn(
    client: httpx2.AsyncClient,
    rng: random.Random,
    prompt: Sequence[int],
    tokens: int,
    hints: Any,
    tally: Tally,
) -> None:
    """One request; some clients hang up before it is answered."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        **({} if hints is None else {"kv_transfer_params": hints}),
    }
    tally.requests += 1
    patience_s = rng.uniform(0.01, 0.5) if rng.random() < HANG_UP_SHARE else None
    try:
        async with asyncio.timeout(patience_s):
            answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            tally.errors.append(f"{answer.status_code}: {answer.text[:200]}")
    except TimeoutError:
        pass  # it has hung up
    except httpx2.HTTPError as error:
        tally.errors.append(repr(error))


async def soak(server: VllmServer, seconds: float, seed: int, tally: Tally, tick: Any) -> None:
    """Agents side by side, and a look at the server's memory now and then."""
    began = time.monotonic()
    until = began + seconds
    async with httpx2.AsyncClient(base_url=server.url, timeout=900.0, trust_env=False) as client:

        async def watch() -> None:
            while time.monotonic() < until:
                tally.samples.append((time.monotonic() - began, resident_bytes(server.pid or 0)))
                tick(time.monotonic() - began)
                await asyncio.sleep(SAMPLE_EVERY_S)

        agents = [agent(client, random.Random(seed * 100 + n), until, tally) for n in range(AGENTS)]
        await asyncio.gather(watch(), *agents)


def holdings(server: VllmServer) -> dict[str, int]:
    """What the server has now, by name."""
    text = server.metrics_text()
    found = {}
    for name in GAUGES:
        values = re.findall(rf"^vllm:tiered_kv_{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        found[name] = int(float(values[0])) if values else 0
    threads = descriptors = 0
    for pid in group_members(server.pid or 0):
        with contextlib.suppress(OSError):
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {**found, "threads": threads, "descriptors": descriptors}


async def settle(server: VllmServer) -> None:
    """Nothing runs any more: drop the cache, and let the server say what it then holds."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=900.0, trust_env=False) as client:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            await client.post("/reset_prefix_cache")
            body = {"model": MODEL_NAME, "prompt": [1, 2, 3], "max_tokens": 18, "ignore_eos": True}
            await client.post("/v1/completions", json=body)  # gauges are told in steps
            held = holdings(server)
            if not held["pinned_blocks"] and not held["orders_in_flight"]:
                return
            await asyncio.sleep(0.5)


def leaks(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What there is more of than before, beyond what may be."""
    found = {name: after[name] - before[name] - SLACK.get(name, 0) for name in before}
    return {name: amount for name, amount in found.items() if amount > 0}


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """MiB a minute, over the second half of the samples."""
    late = np.array(samples[len(samples) // 2 :], dtype=float)
    if len(late) < 2:
        return 0.0
    per_second = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    return float(per_second * 60 / 2**20)


def with_every_tier(stock: ServerOptions, folder: Path) -> ServerOptions:
    """The same server with the connector and its scheduler; its SSD tier lies in ``folder``."""
    tiers = {
        "TIERED_KV_CPU_GIB": f"{CPU_GIB:g}",
        "TIERED_KV_SSD_PATH": str(folder / "ssd"),
        "TIERED_KV_SSD_GIB": f"{SSD_GIB:g}",
    }
    return replace(
        stock,
        kv_transfer_config=CONNECTOR,
        env={**stock.env, **tiers},
        extra_args=(*stock.extra_args, "--scheduler-cls", SCHEDULER),
    )


def tenths(samples: Sequence[tuple[float, int]]) -> list[int]:
    """MiB after each tenth of the samples, from the first to the last."""
    if not samples:
        return []
    at = np.linspace(0, len(samples) - 1, 11).astype(int)
    return [round(samples[n][1] / 2**20) for n in at]


def measure(minutes: float, seed: int, log: Path, *, stock: bool = False) -> dict[str, Any]:
    """One soak of a server with every tier, or of stock vLLM."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, progress() as bar:
        bar.disable = not sys.stderr.isatty()
        task = bar.add_task("seconds", total=60 * minutes)
        options = ServerOptions(
            model=small_model(),
            kv_blocks=POOL_TOKENS // BLOCK,
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            env={"VLLM_SERVER_DEV_MODE": "1", **FEW_SHAPES},
            extra_args=("--enable-prefix-caching",),
        )
        if not stock:
            options = with_every_tier(options, Path(folder))
        with VllmServer(options, log) as server:
            warm_up_s = min(WARM_UP_S, 20 * minutes)
            asyncio.run(soak(server, warm_up_s, seed + 1, Tally(), lambda _: None))
            asyncio.run(settle(server))
            before = holdings(server)
            tick = lambda s: bar.update(task, completed=s)  # noqa: E731
            asyncio.run(soak(server, 60 * minutes, seed, tally, tick))
            asyncio.run(settle(server))
            after = holdings(server)
            server.check()
    return {
        "requests": tally.requests,
        "errors": len(tally.errors),
        "leaked": leaks(before, after),
        "rss_slope": slope(tally.samples),
        "rss_mib": tenths(tally.samples),
        "dtype": str(machine_dtype()),
        "first_error": tally.errors[0] if tally.errors else None,
        "before": before,
        "after": after,
    }


def main() -> int:
    """Run it; 1 if something failed or was left behind."""
    command = parser("A real server under random agents, and whether anything is left behind.")
    command.add_argument("--minutes", type=float, default=30.0, help="(%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    command.add_argument("--stock", action="store_true", help="vLLM without the connector")
    args = command.parse_args()
    log = ROOT / ".replay" / "soak.log"
    log.parent.mkdir(exist_ok=True)
    result = measure(args.minutes, args.seed, log, stock=args.stock)
    show("A real server under random agents", result, args.json)
    return 1 if result["errors"] or result["leaked"] else 0


if __name__ == "__main__":
    sys.exit(main())
