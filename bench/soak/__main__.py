"""A real server under random agents for a while, stock vLLM under the same beside it.

    python -m bench.soak --minutes 30 --json

Agents grow contexts turn by turn, pause, hang up in mid-answer, send hints that make no sense, and
now and then somebody resets the prefix cache. Beside them one client leaves all its jobs open, and
one lies about its tools (``bench.soak.clients``). Both servers run at the same time, each with such
clients of its own, who do the same. At the end the cache is reset once more, and then:

- ``requests``, ``errors``: sent, and those that failed though nobody had hung up; of both servers.
- ``leaked``, ``left``: whether there is more of something than after the warm-up, and of what:
  pages in CPU memory, pinned blocks and orders by the connector's gauges, threads and file
  descriptors by /proc. Jobs and pages on SSD are not looked at.
- ``newcomers``, ``newcomer_s``: new jobs of agents, and the median time to their first token;
  ``newcomer_ratio``: over stock's. ``newcomer_s_tenths``: the medians of each tenth of them.
- ``admission``: jobs and turns that were held so far, and the percentage of the pool that new jobs
  were let in for at the end.
- ``compression``: pages of CPU memory that were compressed, and decompressed again; and those that
  left it altogether.
- ``failures``: pages of ours that could not be copied, compressed or decoded, or were bad on SSD.
- ``rss_slope``: MiB that the server's memory grows in a minute, over the second half of the run.
- ``rss_mib``: its memory at the begin, after each tenth of the run, and at the end.
- ``stock``: what of this is known of stock vLLM.

On CPU PyTorch and oneDNN keep something for each number of tokens that they met: in a process of
its own, 500 of them on four layers of SmolLM2-135M took 1.1 GiB, and nothing with both caches off.
A server of a soak keeps few.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx2
import numpy as np
import typer

from tiered_kv.bench.common.load import group_members
from tiered_kv.bench.common.model import small_model
from tiered_kv.bench.common.openai_client import KEEPALIVE_S
from tiered_kv.bench.common.output import AsJson, progress, run_benchmark, show
from tiered_kv.bench.common.paths import ROOT
from tiered_kv.bench.common.server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    all_cores,
    machine_dtype,
)
from tiered_kv.bench.replay.kinds import BLOCK, SCHEDULER
from tiered_kv.bench.replay.measure import resident_bytes
from tiered_kv.bench.soak.clients import MAX_LEN, Tally, all_clients
from tiered_kv.doctor.metrics_page import events

POOL_TOKENS = 6_400
CPU_GIB, SSD_GIB = 0.25, 0.5
WARM_UP_S = 20.0
SAMPLE_EVERY_S = 2.0
SETTLE_S = 120.0
GAUGES = ("cpu_pages", "pinned_blocks", "orders_in_flight")
COMPRESSION = ("pages_compressed", "pages_decompressed", "pages_evicted")
FAILURES = ("save_failures", "restore_failures", "compression_failures", "ssd_pages_bad")
SLACK = {"threads": 4, "descriptors": 8}
"""Surplus that a server may have at the end: connections and pools that are kept for a while."""
FEW_SHAPES = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""Settings of PyTorch and oneDNN: see the module."""


async def soak(
    servers: Mapping[str, VllmServer],
    seconds: float,
    seed: int,
    tick: Callable[[float], None] = lambda _: None,
) -> dict[str, Tally]:
    """Clients of each server, side by side, and a look at its memory now and then."""
    began = time.monotonic()

    async def one(server: VllmServer, tally: Tally) -> None:
        limits = httpx2.Limits(keepalive_expiry=KEEPALIVE_S)
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=900.0, limits=limits, trust_env=False
        ) as http:
            clients = asyncio.create_task(all_clients(http, seconds, seed, tally))
            while not clients.done():
                now = time.monotonic() - began
                tally.samples.append((now, resident_bytes(server.pid or 0)))
                tick(now)
                await asyncio.wait([clients], timeout=SAMPLE_EVERY_S)
            await clients

    tallies = {name: Tally() for name in servers}
    await asyncio.gather(*(one(servers[name], tally) for name, tally in tallies.items()))
    return tallies


def holdings(server: VllmServer) -> dict[str, int]:
    """Holdings of the server now, by name."""
    found = counted(server.metrics_text(), GAUGES)
    threads = descriptors = 0
    for pid in group_members(server.pid or 0):
        with contextlib.suppress(OSError):
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {**found, "threads": threads, "descriptors": descriptors}


async def settle(server: VllmServer) -> None:
    """Drop the cache once nothing runs, and return what the server then holds."""
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
    """Find what there is more of than before, beyond what may be."""
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


def medians(values: Sequence[float]) -> list[float]:
    """Medians of each tenth of the values, from the first to the last."""
    parts = np.array_split(np.array(values), 10)
    return [round(float(np.median(part)), 3) for part in parts if len(part)]


def admission(metrics: str) -> dict[str, float]:
    """Jobs held so far, and the room that is given out."""
    found = events(metrics)
    return {name: found[name] for name in ("jobs_held", "room_ratio")}


def counted(metrics: str, names: Sequence[str]) -> dict[str, int]:
    """Counters and gauges of the connector, by name."""
    found = events(metrics)
    return {name: int(found[name]) for name in names}


def measure(minutes: float, seed: int, logs: Path) -> dict[str, Any]:
    """One soak of a server with every tier, and of stock vLLM beside it. Both log in ``logs``."""
    mine, theirs = halves(sorted(os.sched_getaffinity(0)))
    stock = ServerOptions(
        model=small_model(),
        kv_blocks=POOL_TOKENS // BLOCK,
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        env={"VLLM_SERVER_DEV_MODE": "1", **FEW_SHAPES, "VLLM_CPU_OMP_THREADS_BIND": theirs},
        extra_args=("--enable-prefix-caching",),
    )
    same = replace(stock, env={**stock.env, "VLLM_CPU_OMP_THREADS_BIND": mine})
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        progress() as bar,
        VllmServer(stock, logs / "soak-stock.log") as control,
        VllmServer(with_every_tier(same, Path(folder)), logs / "soak.log") as ours,
    ):
        bar.disable = not sys.stderr.isatty()
        task = bar.add_task("seconds", total=60 * minutes)
        servers = {"ours": ours, "stock": control}
        asyncio.run(soak(servers, min(WARM_UP_S, 20 * minutes), seed + 1))
        asyncio.run(settle(ours))
        before = holdings(ours)
        told = asyncio.run(
            soak(servers, 60 * minutes, seed, lambda s: bar.update(task, completed=s))
        )
        metrics = ours.metrics_text()
        asyncio.run(settle(ours))
        after = holdings(ours)
        for server in servers.values():
            server.check()
    left = leaks(before, after)
    found, control_found = summary(told["ours"]), summary(told["stock"])
    return {
        **found,
        "leaked": bool(left),
        "left": left,
        "newcomer_ratio": ratio(found["newcomer_s"], control_found["newcomer_s"]),
        "admission": admission(metrics),
        "compression": counted(metrics, COMPRESSION),
        "failures": counted(metrics, FAILURES),
        "dtype": str(machine_dtype()),
        "before": before,
        "after": after,
        "stock": control_found,
    }


def halves(cores: Sequence[int]) -> tuple[str, str]:
    """Each server's cores, in vLLM's notation: as many for one as for the other, since models that
    share a core spend much of it waiting for each other. A single core is shared."""
    half = len(cores) // 2
    if not half:
        return all_cores(cores), all_cores(cores)
    return all_cores(cores[:half]), all_cores(cores[half : 2 * half])


def summary(tally: Tally) -> dict[str, Any]:
    """Everything that is told of one server."""
    return {
        "requests": tally.requests,
        "errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else None,
        "newcomers": len(tally.first_tokens),
        "newcomer_s": median(tally.first_tokens) if tally.first_tokens else None,
        "newcomer_s_tenths": medians(tally.first_tokens),
        "rss_slope": slope(tally.samples),
        "rss_mib": tenths(tally.samples),
    }


def ratio(of: float | None, over: float | None) -> float | None:
    """One number over the other; None where one is missing."""
    return of / over if of is not None and over else None


def main(
    minutes: Annotated[float, typer.Option(help="Length of the soak, minutes.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of the agents.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run it. Exit with 1 if a request or a page failed, or something was left behind."""
    logs = ROOT / ".replay"
    logs.mkdir(exist_ok=True)
    result = measure(minutes, seed, logs)
    show("A real server under random agents", result, as_json)
    failed = any(result["failures"].values())
    if result["errors"] or result["stock"]["errors"] or result["leaked"] or failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
