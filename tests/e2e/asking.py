"""Requests to a real server, and readings of its metrics."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.doctor.running_server import events
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import TurnRecord

BLOCKS, BLOCK = 160, 32
"""KV pool of the servers that ``usage_in_gap`` measures: number of blocks, and tokens per block."""

PATIENCE_S = 540.0
"""Seconds to wait for a server, which takes minutes to start on a slow or busy machine."""

EVENT_S = 120.0
"""Seconds to wait for an event that follows soon after an answer."""

counter = itertools.count()


def ask(client: httpx.Client, prompt: Any, max_tokens: int = 4, **body: Any) -> dict[str, Any]:
    answer = client.post(
        "/v1/completions",
        json={
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        },
    )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def job(name: str, last: bool = False) -> dict[str, Any]:
    return {"kv_transfer_params": {"job_id": name, "is_last_step": last}}


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not on /metrics"
    return float(found[1])


def count(client: httpx.Client, name: str) -> float:
    """Return the value of the counter or gauge on ``/metrics``."""
    return events(client.get("/metrics").text)[name]


def tick(client: httpx.Client) -> None:
    """Send an unrelated request of one token, because hooks run and gauges change only during
    steps."""
    ask(client, [500 + next(counter)], max_tokens=1)


def usage_in_gap(client: httpx.Client) -> float:
    """Return ``vllm:kv_cache_usage_perc`` between requests.

    vLLM may set the gauge while the tick's own block is still allocated. The smallest of a few
    readings excludes that block.
    """
    readings = []
    for _ in range(3):
        tick(client)
        readings.append(metric(client, "vllm:kv_cache_usage_perc"))
    share = 1 / (BLOCKS - 1)
    return round(min(readings) / share) * share


def trace(server: VllmServer, there: Callable[[list[TurnRecord]], bool]) -> list[TurnRecord]:
    """Return the trace records once ``there`` accepts them, or after ``EVENT_S``. A turn is written
    when the job's next turn arrives, or immediately if it is declared the last."""
    path = Path(server.options.env["TIERED_KV_TRACE"])
    deadline = time.monotonic() + EVENT_S
    while True:
        found = list(TraceReader(path))
        if there(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
