"""Effect of compressing idle pages in CPU memory that is too small.

    python -m bench.cold --json

Uses real servers and one run. Twenty texts of 3,000 tokens are sent in turn, several times over, to
a server whose CPU memory has space for fifteen and a half of them, and whose KV pool holds one. The
same server with ``TIERED_KV_CODEC=raw`` compresses nothing. On both servers, a request then decodes
while pages are compressed. A third server has space for all texts. ``unannounced_ratio`` is the
time of requests with compressed pages, over the sum of the time of requests with uncompressed pages
and the time to decode that many bytes at the speed that the server measured at startup.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
from tiered_kv.bench.restore import ask, counters, served, texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, machine_dtype
from tiered_kv.config import GIB

CONTEXTS, SPACE = 20, 15.5
"""Number of contexts sent, and number that fit into CPU memory uncompressed."""
MORE = 3
"""Number of further contexts, sent last so that the pages exceed the memory."""
ROUNDS = 3
"""Number of rounds. The first round fills the tiers and is not counted."""
HOT = 4
"""Number of contexts sent to the server that has space for all of them."""
GAP_S = 0.2
"""Tool time between two requests, seconds."""
DECODED = 96
"""Length of the answer that is decoded while other jobs' pages are compressed, tokens."""
BYTES_A_TOKEN = {"bfloat16": 2.25e4, "float16": 2.25e4, "float32": 4.5e4}
"""KV bytes per token of the small model, by dtype."""
RAW = {"TIERED_KV_CODEC": "raw"}
DECODES = re.compile(r"decodes (\S+) GB/s per thread, on (\d+) thread")


def context_bytes(tokens: int) -> float:
    """Return the size of a context's pages, bytes."""
    return tokens * BYTES_A_TOKEN[machine_dtype().name]


def options_of(model: Path, tokens: int, space: float, env: Mapping[str, str]) -> ServerOptions:
    """Return the options of a server with CPU memory for ``space`` contexts, and a KV pool for
    little more than one context. The server pins nothing, so KV that leaves VRAM must be restored
    from another tier.
    """
    settings = {
        "TIERED_KV_CPU_GIB": f"{space * context_bytes(tokens) / GIB:.4f}",
        "TIERED_KV_PIN_FRACTION": "0",
    }
    return ServerOptions(
        model=model,
        kv_blocks=13 * tokens // 320,
        max_model_len=tokens + DECODED + 64,
        kv_transfer_config=CONNECTOR,
        env={**settings, **env},
    )


def send(client: httpx.Client, prompts: Sequence[list[int]], tick: Tick, what: str) -> list[float]:
    """Send contexts with a pause after each. Returns the latency of each request, seconds."""
    times = list[float]()
    for prompt in prompts:
        tick(what)
        times.append(ask(client, prompt).latency_s)
        time.sleep(GAP_S)
    return times


def play(options: ServerOptions, tokens: int, folder: Path, tick: Tick) -> dict[str, Any]:
    """Send the contexts in turn, round after round.

    Returns:
        ``pages_ratio``: pages in CPU memory over its slots, when the memory is full.
        ``recomputed``: prompt tokens recomputed in the counted rounds.
        ``times``: latencies of the requests in the counted rounds, seconds.
        ``token_ms``: median time per token decoded while pages are compressed.
        ``compressed``: pages compressed so far.
        ``decode_rate``: speed at which the server decodes pages, bytes per second; 0 if the server
            compresses no pages.
    """
    with served(options, folder) as (server, client):
        prompts = texts(client, CONTEXTS, tokens)
        send(client, prompts, tick, "filling the tiers")
        before = counters(client)
        times = send(client, prompts * (ROUNDS - 1), tick, "rounds")
        after = counters(client)
        tick("decoding")  # after a new context, for which other contexts' pages are compressed
        new, *more = [[*reversed(prompt)] for prompt in prompts[: 1 + MORE]]
        arrived = ask(client, new, tokens=DECODED, on_token=lambda _: None).times
        send(client, more, tick, "more than fits")
        full = counters(client)
        name = "prompt_tokens_recomputed"
        found = DECODES.search(server.log_text())
        return {
            "pages_ratio": full["cpu_pages"] / full["cpu_slots"],
            "recomputed": int(after[name] - before[name]),
            "times": times,
            "token_ms": 1e3 * statistics.median(b - a for a, b in pairwise(arrived)),
            "compressed": int(full["pages_compressed"]),
            "decode_rate": float(found[1]) * 1e9 * int(found[2]) if found else 0.0,
        }


def measure(model: Path, tokens: int, tick: Tick) -> dict[str, Any]:
    """Measure without compression, with compression, and with space for all contexts.

    Raises:
        RuntimeError: the server with compression compresses no pages.
    """
    with tempfile.TemporaryDirectory() as name:
        raw, cold = (
            play(options_of(model, tokens, SPACE, env), tokens, Path(name), tick)
            for env in (RAW, {})
        )
        if not cold["decode_rate"]:
            raise RuntimeError("the server did not compress its pages in CPU memory")
        with served(options_of(model, tokens, HOT + 1, RAW), Path(name)) as (_, client):
            prompts = texts(client, HOT, tokens) * ROUNDS * 2
            hot_s = statistics.median(send(client, prompts, tick, "with space for all")[HOT:])
    mean_s, mean_raw_s = statistics.mean(cold["times"]), statistics.mean(raw["times"])
    # A median is robust here: if any request finds all of its KV, most do.
    cold_s = statistics.median(cold["times"])
    return {
        "pages_ratio": cold["pages_ratio"] / raw["pages_ratio"],
        "recomputed_ratio": cold["recomputed"] / max(1, raw["recomputed"]),
        "jct_ratio": mean_s / mean_raw_s,
        "decode_ratio": cold["token_ms"] / raw["token_ms"],
        "unannounced_ratio": cold_s / (hot_s + context_bytes(tokens) / cold["decode_rate"]),
        "cold_ms": 1e3 * cold_s,
        "hot_ms": 1e3 * hot_s,
        "recomputed": cold["recomputed"],
        "recomputed_raw": raw["recomputed"],
        "mean_s": mean_s,
        "mean_raw_s": mean_raw_s,
        "pages_compressed": cold["compressed"],
        "tokens": tokens,
    }


def main(
    tokens: Tokens = 3000,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the gain from compressing CPU memory."""
    title = "CPU memory with idle pages compressed, relative to uncompressed"
    steps = 2 * (CONTEXTS * ROUNDS + 1 + MORE) + 2 * ROUNDS * HOT
    with served_benchmark(title, steps, model, as_json=as_json) as run:
        run.result = measure(run.model, tokens, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
