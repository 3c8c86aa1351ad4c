"""What the connector costs when it saves nothing anybody will use: time per step.

    python -m bench.overhead --json

``step_ratio``: vLLM's scheduler alone (schedule and update, no model) with 64 requests
decoding, with the connector over without it. ``decode_ratio``: a decode step of the real
model on real servers, eight requests at a time, every filled block being saved. Beside
each its ``control``: stock over stock, measured in the same way in the same run, which is
what the machine's noise makes of 1.0. ``*_net`` is the ratio divided by its control.

The contestants take turns within fractions of a second, so that a noisy neighbour hits all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench.model import small_model
from bench.output import parser, progress, show
from bench.restore import CONNECTOR
from bench.server import MODEL_NAME, ServerOptions, VllmServer

RUNNING = 64
DECODERS = 8
DECODE_TOKENS = 96

Tick = Callable[[str], None]


def ratios(times: dict[str, list[float]]) -> tuple[float, float]:
    """Connector over stock, and stock over stock, of totals that leave out outliers.

    The three lists hold the same moments. A moment in which one of them was disturbed
    (beyond four times the median) is left out of all.
    """
    stock, control, ours = times["stock"], times["control"], times["connector"]
    limit = 4 * statistics.median(stock)
    kept = [row for row in zip(stock, control, ours, strict=True) if max(row) < limit]
    total_stock, total_control, total_ours = (sum(column) for column in zip(*kept, strict=True))
    mean_stock = (total_stock + total_control) / 2
    return total_ours / mean_stock, max(total_stock, total_control) / mean_stock


def scheduler_step(steps: int, tick: Tick) -> dict[str, list[float]]:
    """Seconds of scheduler steps of each contestant, taken in turn.

    Prompts differ in length, so that their blocks fill at different steps, as they do in
    a server; the fake model of the rig runs outside the clock.
    """
    from tiered_kv.testing.vllm_rig import Rig, RigOptions, text

    extras: dict[str, Any] = {"stock": None, "control": None, "connector": {"cpu_gib": 0.05}}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rigs: dict[str, Rig] = {}
        for name, extra in extras.items():
            options = RigOptions(
                blocks=RUNNING * 140,
                max_model_len=2048,
                max_num_seqs=RUNNING,
                max_batched_tokens=8192,
                extra=extra,
                check_kv=False,
            )
            rigs[name] = stack.enter_context(Rig(Path(folder) / name, options))
            for i in range(RUNNING):
                rigs[name].add(f"r{i}", text(100 + i, seed=i), max_tokens=steps + 50)
            for _ in range(20):
                rigs[name].step()
        times: dict[str, list[float]] = {name: [] for name in rigs}
        gc.collect()
        gc.disable()
        names = list(rigs)
        try:
            for i in range(steps):
                for name in names[i % 3 :] + names[: i % 3]:
                    rig = rigs[name]
                    rig.step()
                    times[name].append(rig.scheduler_s)
                tick("scheduler steps")
        finally:
            gc.enable()
    return times


async def _decode(client: httpx.AsyncClient, seed: int) -> None:
    body = {
        "model": MODEL_NAME,
        "prompt": [1000 + seed * 17 + i for i in range(8)],
        "max_tokens": DECODE_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def _decode_step(client: httpx.AsyncClient, round_number: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_decode(client, round_number * DECODERS + i) for i in range(DECODERS)))
    return (time.perf_counter() - began) / DECODE_TOKENS


def decode_step(model: Path, rounds: int, tick: Tick) -> dict[str, list[float]]:
    """Seconds per decode step of three servers that run side by side and decode in turn."""
    configs: dict[str, Any] = {"stock": None, "control": None, "connector": CONNECTOR}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {}
        for name, config in configs.items():
            options = ServerOptions(
                model=model,
                kv_blocks=400,
                max_model_len=2048,
                kv_transfer_config=config,
                env={"TIERED_KV_CPU_GIB": "1"} if config else {},
            )
            server = VllmServer(options, Path(folder) / f"{name}.log", start_timeout_s=600)
            servers[name] = stack.enter_context(server)
            tick("starting servers")
        times = asyncio.run(_take_turns({n: s.url for n, s in servers.items()}, rounds, tick))
        saved = [
            line.rsplit(" ", 1)[1]
            for line in servers["connector"].metrics_text().splitlines()
            if line.startswith("vllm:tiered_kv_pages_saved_total")
        ]
        if not saved or float(saved[0]) < rounds * DECODERS:
            raise RuntimeError(f"the connector saved {saved} pages: nothing was measured")
    return times


async def _take_turns(urls: dict[str, str], rounds: int, tick: Tick) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in urls}
    clients = {n: httpx.AsyncClient(base_url=url, timeout=120) for n, url in urls.items()}
    names = list(urls)
    try:
        for i in range(-1, rounds):
            for name in names[i % 3 :] + names[: i % 3]:
                seconds = await _decode_step(clients[name], i + 1)
                if i >= 0:  # the first round warms up
                    times[name].append(seconds)
            tick("decode rounds")
    finally:
        for client in clients.values():
            await client.aclose()
    return times


def measure(model: Path, steps: int, rounds: int, tick: Tick) -> dict[str, float | int]:
    """Both comparisons."""
    step_ratio, step_control = ratios(scheduler := scheduler_step(steps, tick))
    decode_ratio, decode_control = ratios(decode := decode_step(model, rounds, tick))
    return {
        "step_ratio": step_ratio,
        "decode_ratio": decode_ratio,
        "control_ratio": max(step_control, decode_control),
        "step_control": step_control,
        "decode_control": decode_control,
        "step_net": step_ratio / step_control,
        "decode_net": decode_ratio / decode_control,
        "step_ms": 1e3 * statistics.median(scheduler["stock"]),
        "decode_ms": 1e3 * statistics.median(decode["stock"]),
        "running": RUNNING,
        "steps": steps,
        "rounds": rounds,
    }


def main() -> None:
    command = parser(__doc__.splitlines()[0])
    command.add_argument("--steps", type=int, default=1500, help="scheduler steps each")
    command.add_argument("--rounds", type=int, default=9, help="decode rounds each")
    command.add_argument("--model", type=Path, help="a model folder; default: the small model")
    args: argparse.Namespace = command.parse_args()
    with progress() as bar:
        bar.disable = args.json or not sys.stderr.isatty()
        task = bar.add_task("", total=args.steps + 3 + args.rounds + 1)
        result = measure(
            args.model or small_model(),
            args.steps,
            args.rounds,
            lambda what: bar.update(task, advance=1, description=what),
        )
    show("Time per step with the connector over stock", result, args.json)


if __name__ == "__main__":
    main()
