"""Soak test: a real server under random agents, next to stock vLLM under the same load.

    python -m bench.soak --minutes 30 --json

More agents than a server can run concurrently (its seats) grow their contexts turn by turn, for as
long as the run lasts. Some clients hang up in the middle of an answer, or send nonsensical hints.
New jobs (newcomers) arrive at a fixed pace. One client sends all of its traffic under one session
id, another leaves all its jobs open, and a third sends false hints about its tools. Snapshots of
agents are taken, restored and deleted, and agents are forked. Every minute weights are loaded into
the engine, alternating between the same and different weights (``bench.soak.clients``). Both
servers run concurrently, each with its own copy of these clients, which send the same prompts. At
the end the cache is reset. The result has:

- ``requests``, ``errors``: turns sent, and failed calls. Clients that hang up and refusals by the
  snapshot routes are not counted as failures (``refused`` has the reasons).
- ``crowded``: fraction of samples at which more turns were open than the server has seats.
- ``snapshots``, ``updates``: snapshots, restores and forks done; weight updates.
- ``overtaken``: turns that waited longer than ``admission_max_wait_s`` plus ``service_s`` (the
  longest wait for a first token on stock vLLM) while a turn sent later got its first token.
- ``compared``, ``different``: answers to prompts that both servers computed with the same weights,
  and answers that differ at a token of which stock vLLM was sure.
- ``leaked``, ``left``: whether the server holds more resources than after the warm-up, and which:
  pages in CPU memory, pinned blocks and orders, threads and file descriptors. Jobs and pages on SSD
  are not checked.
- ``newcomers``, ``newcomer_s``: jobs that arrived during the run, and their median time to first
  token; ``newcomer_ratio``: this time, divided by the newcomers' time on stock vLLM.
  ``newcomer_s_tenths``: medians of each tenth of the newcomers. ``newcomer_ratio_end``: the ratio
  for the last three tenths.
- ``admission``: jobs and turns that were held back, and the percentage of the pool open to new jobs
  at the end.
- ``compression``, ``failures``: counters of compressed pages in CPU memory, and of pages that could
  not be copied, compressed or decoded, or were bad on SSD.
- ``rss_slope``: growth of the server's memory in MiB per minute, over the second half of the run.
  ``rss_mib``: its memory at the start and after each tenth of the run.
- ``stock``: the same figures for stock vLLM, where they exist.

On CPU, PyTorch and oneDNN cache data for every batch size in tokens. In a separate process, 500
sizes on four layers of SmolLM2-135M took 1.1 GiB, and nothing with both caches off. The servers of
a soak test keep these caches small.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import httpx2
import numpy as np
import typer

from tiered_kv.bench.agents.client import SILENCE_S, Ask, ask_over, open_client
from tiered_kv.bench.output import AsJson, benchmark, run_benchmark
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.kinds import BLOCK, SCHEDULER, with_args, with_connector
from tiered_kv.bench.replay.measure import resident_bytes
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    all_cores,
    machine_dtype,
)
from tiered_kv.bench.soak.clients import MAX_LEN, SEATS, Site, all_clients
from tiered_kv.bench.soak.tally import (
    Tally,
    compare,
    medians,
    overtaken,
    ratio_of_medians,
    slope,
    tenths,
)
from tiered_kv.doctor.running_server import events

POOL_TOKENS = 6_400
CPU_GIB, SSD_GIB = 0.25, 0.5
ADMISSION_MAX_WAIT_S = 20.0
WARM_UP_S = 20.0
SAMPLE_EVERY_S = 2.0
SETTLE_S = 120.0
ADMISSION = ("jobs_held", "room_ratio")
GAUGES = ("cpu_pages", "pinned_blocks", "orders_in_flight")
COMPRESSION = ("pages_compressed", "pages_decompressed", "pages_evicted")
FAILURES = ("save_failures", "restore_failures", "compression_failures", "ssd_pages_bad")
SLACK = {"threads": 9, "descriptors": 8}
"""Permitted growth until the end: connections that are kept alive for a while, four idle threads
that serve routes, and five threads of tiered-kv that start on first use (two compress pages, two
decompress pages, one saves the policy's state)."""
FEW_SHAPES = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""Settings that keep the caches of PyTorch and oneDNN small; see the module docstring."""
SNAPSHOTS, OTHER_WEIGHTS = "snapshots", "other-weights"
NEGATED = "model.layers.20.self_attn.v_proj.weight"
"""Weights that are negated. They belong to a late layer, because with the first layer negated, bf16
and fp32 disagree even on tokens that lead by a nat."""
LAST = 0.3
"""Fraction of the newcomers that ``newcomer_ratio_end`` covers."""


async def soak(
    servers: Mapping[str, VllmServer],
    seconds: float,
    seed: int,
    folder: Path,
    tick: Callable[[str], None] = lambda _: None,
) -> dict[str, Tally]:
    """Run the clients of all servers concurrently, and sample each server's memory. Returns the
    observations by server name.

    Args:
        seconds: duration of the run.
        folder: folder that ``prepare`` filled.
        tick: called for every sample.
    """
    began = time.monotonic()

    async def one(server: VllmServer, tally: Tally) -> None:
        async with (
            open_client(server.url, MODEL_NAME) as openai,
            httpx2.AsyncClient(base_url=server.url, timeout=SILENCE_S, trust_env=False) as http,
        ):
            weights = (Path(server.options.model), folder / OTHER_WEIGHTS)
            with_routes = server.options.kv_transfer_config is not None
            snapshots = folder / SNAPSHOTS if with_routes else None
            site = Site(openai, http, began + seconds, seed, tally, weights, snapshots)
            clients = asyncio.create_task(all_clients(site))
            while not clients.done():
                now = time.monotonic() - began
                tally.samples.append((now, resident_bytes(server.pid or 0)))
                tally.open_turns.append(tally.open)
                tick(f"{len(tally.turns)} turns")
                await asyncio.wait([clients], timeout=SAMPLE_EVERY_S)
            await clients

    tallies = {name: Tally() for name in servers}
    await asyncio.gather(*(one(servers[name], tally) for name, tally in tallies.items()))
    return tallies


def prepare(folder: Path, model: Path) -> None:
    """Create a folder for snapshots, and a copy of the model with different weights: the value
    projection of one attention layer is negated.

    Args:
        folder: parent folder of both.
    """
    (folder / SNAPSHOTS).mkdir()
    shutil.copytree(model, folder / OTHER_WEIGHTS)
    path = folder / OTHER_WEIGHTS / "model.safetensors"
    head = int.from_bytes(path.read_bytes()[:8], "little")
    data = np.memmap(path, np.uint8, "r+")
    begin, end = json.loads(data[8 : 8 + head].tobytes())[NEGATED]["data_offsets"]
    data[8 + head + begin + 1 : 8 + head + end : 2] ^= 0x80  # the sign of each bf16
    data.flush()


def holdings(server: VllmServer) -> dict[str, int]:
    """Return the amounts of the resources that the server holds now, by name."""
    found = counted(server.metrics_text(), GAUGES)
    threads = descriptors = 0
    for pid in group_members(server.pid or 0):
        with contextlib.suppress(OSError):
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {**found, "threads": threads, "descriptors": descriptors}


def settle(server: VllmServer) -> None:
    """Reset the cache until no block is pinned and no order is in flight, or for at most
    ``SETTLE_S`` seconds.
    """
    with httpx.Client(base_url=server.url, timeout=SILENCE_S, trust_env=False) as client:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            client.post("/reset_prefix_cache")
            ask = Ask(prompt=[1, 2, 3], max_tokens=18)
            ask_over(client, MODEL_NAME, ask)  # gauges are updated in steps
            held = holdings(server)
            if not held["pinned_blocks"] and not held["orders_in_flight"]:
                return
            time.sleep(0.5)


def leaks(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the resources that have grown by more than the permitted amount, with the excess."""
    found = {name: after[name] - before[name] - SLACK.get(name, 0) for name in before}
    return {name: amount for name, amount in found.items() if amount > 0}


def with_every_tier(stock: ServerOptions, folder: Path) -> ServerOptions:
    """Return the options with the connector and its scheduler. The SSD tier and the snapshots are
    in ``folder``.
    """
    return with_connector(
        with_args(stock, "--scheduler-cls", SCHEDULER),
        TIERED_KV_CPU_GIB=f"{CPU_GIB:g}",
        TIERED_KV_SSD_PATH=str(folder / "ssd"),
        TIERED_KV_SSD_GIB=f"{SSD_GIB:g}",
        TIERED_KV_SNAPSHOT_PATH=str(folder / SNAPSHOTS),
        TIERED_KV_ADMISSION_MAX_WAIT_S=f"{ADMISSION_MAX_WAIT_S:g}",
        VLLM_PLUGINS="tiered_kv",
    )


def counted(metrics: str, names: Sequence[str]) -> dict[str, int]:
    """Return the named counters and gauges of the connector.

    Args:
        metrics: content of the server's ``/metrics``.

    Raises:
        KeyError: the server does not report one of them.
    """
    found = events(metrics)
    return {name: int(found[name]) for name in names}


def measure(
    minutes: float, seed: int, logs: Path, tick: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run a soak test of a server with every tier, next to stock vLLM. Both servers write logs in
    ``logs``.
    """
    mine, theirs = halves(sorted(os.sched_getaffinity(0)))
    stock = ServerOptions(
        model=small_model(),
        kv_blocks=POOL_TOKENS // BLOCK,
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        env={"VLLM_SERVER_DEV_MODE": "1", **FEW_SHAPES, "VLLM_CPU_OMP_THREADS_BIND": theirs},
        extra_args=("--enable-prefix-caching", "--max-num-seqs", str(SEATS)),
    )
    same = replace(stock, env={**stock.env, "VLLM_CPU_OMP_THREADS_BIND": mine})
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as scratch,
        VllmServer(stock, logs / "soak-stock.log") as control,
        VllmServer(with_every_tier(same, Path(scratch)), logs / "soak.log") as ours,
    ):
        folder = Path(scratch)
        prepare(folder, small_model())
        servers = {"ours": ours, "stock": control}
        asyncio.run(soak(servers, min(WARM_UP_S, 20 * minutes), seed + 1, folder))
        settle(ours)
        before = holdings(ours)
        tallies = asyncio.run(soak(servers, 60 * minutes, seed, folder, tick))
        metrics = ours.metrics_text()
        deadline = time.monotonic() + SETTLE_S
        settle(ours)
        while leaks(before, holdings(ours)) and time.monotonic() < deadline:
            time.sleep(1.0)  # an idle server ends surplus threads of its thread pools
            settle(ours)
        after = holdings(ours)
        for server in servers.values():
            server.check()
    left = leaks(before, after)
    found, control_found = tallies["ours"], tallies["stock"]
    waits, control_waits = found.newcomer_waits(), control_found.newcomer_waits()
    service_s = max((turn.wait_s for turn in control_found.turns), default=0.0)
    compared, different = compare(found.turns, control_found.turns)
    return {
        **summary(found),
        "snapshots": found.snapshots,
        "refused": dict(found.refused),
        "overtaken": overtaken(found.turns, ADMISSION_MAX_WAIT_S + service_s),
        "admission_max_wait_s": ADMISSION_MAX_WAIT_S,
        "service_s": service_s,
        "compared": compared,
        "different": different,
        "leaked": bool(left),
        "left": left,
        "newcomer_ratio": ratio_of_medians(waits, control_waits),
        "newcomer_ratio_end": ratio_of_medians(waits, control_waits, LAST),
        "admission": {name: events(metrics)[name] for name in ADMISSION},
        "compression": counted(metrics, COMPRESSION),
        "failures": counted(metrics, FAILURES),
        "dtype": str(machine_dtype()),
        "before": before,
        "after": after,
        "stock": summary(control_found),
    }


def halves(cores: Sequence[int]) -> tuple[str, str]:
    """Return each server's cores, in vLLM's notation. Both get the same number of cores, because
    models that share a core spend much of its time waiting for each other. A single core is shared.
    """
    half = len(cores) // 2
    if not half:
        return all_cores(cores), all_cores(cores)
    return all_cores(cores[:half]), all_cores(cores[half : 2 * half])


def summary(tally: Tally) -> dict[str, Any]:
    """Return the figures of one server."""
    waits = tally.newcomer_waits()
    return {
        "requests": tally.requests,
        "errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else None,
        "crowded": float(np.mean([number > SEATS for number in tally.open_turns])),
        "updates": tally.updates,
        "newcomers": len(waits),
        "newcomer_s": float(np.median(waits)) if waits else None,
        "newcomer_s_tenths": medians(waits),
        "rss_slope": slope(tally.samples),
        "rss_mib": tenths(tally.samples),
    }


def main(
    minutes: Annotated[float, typer.Option(help="Duration, minutes.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Random seed of the agents.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a soak test. The command exits with 1 if a request or a page failed, an answer differs, a
    turn was overtaken, or resources leaked.
    """
    logs = ROOT / ".replay"
    logs.mkdir(exist_ok=True)
    samples = 2 * 60 * minutes / SAMPLE_EVERY_S
    with benchmark("A real server under random agents", samples, as_json=as_json) as run:
        run.result = measure(minutes, seed, logs, run.tick)
    found = run.result
    failed = found["stock"]["errors"] or any(found["failures"].values())
    if failed or any(found[name] for name in ("errors", "different", "overtaken", "leaked")):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
