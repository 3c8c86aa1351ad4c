"""The scripted run: agents under pressure on a real server, and all that it says of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiered_kv.bench.hybrid.agents import FIRST_WORD, Load, make_jobs
from tiered_kv.bench.replay.jobs import Job, Turn
from tiered_kv.bench.replay.kinds import BLOCK, SCHEDULER
from tiered_kv.bench.replay.play.drive import Hints, drive
from tiered_kv.bench.replay.results import JobDone
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.trace.steps.step_figures import StepFigures, step_figures
from tiered_kv.trace.steps.step_tracks import StepReader
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import TurnRecord

from .names import read_metrics

AGENTS = Load(
    jobs=9,
    turns=4,
    system=192,
    task=260,
    result=120,
    answer=24,
    gap_s=0.8,
    gap_spread=1.0,
    gap_limit_s=6.0,
    apart_s=0.4,
)
"""Jobs whose contexts, some 900 tokens each in the end, are three times the pool."""
POOL_BLOCKS = 80
CPU_TOKENS = 3_000
"""Tokens that CPU memory has room for: pages go down to SSD, and come up again."""
KV_ELEMENTS = 30 * 2 * 3 * 64
"""Numbers in the KV of a token of the small model."""
SHUTDOWN_S = 60
"""Time that the server is given to write what it knows."""
IDLE_CALLS = 40
SETTLE_S = 300.0
STATUS, JOBS = "/tiered_kv/status", "/tiered_kv/jobs?limit=1000"

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that was said of one run.

    Attributes:
        played: jobs as their clients saw them. left_open: those whose client never said that they
            were over.
        metrics: figures on ``/metrics`` in the end. status: the engine's answer to the route.
        open_jobs: the answer to the route of jobs.
        records, steps: the trace, once the server had ended.
        idle_ms: times of the route's calls while the server was idle.
    """

    played: Sequence[JobDone]
    left_open: Sequence[JobDone]
    metrics: dict[str, int]
    status: dict[str, Any]
    open_jobs: Sequence[dict[str, Any]]
    trace: Path
    records: Sequence[TurnRecord]
    steps: StepFigures
    idle_ms: Sequence[float]

    @property
    def idle_call_ms(self) -> float:
        """The time that 19 of 20 calls stay below."""
        return statistics.quantiles(self.idle_ms, n=20)[-1]


def run_script(model: Path, folder: Path, seed: int, tell: Callable[[str], None]) -> Seen:
    """Play the script on a server of its own, which has ended when this returns.

    Args:
        folder: gets the server's log, its trace and its pages on SSD.

    Raises:
        ServerError: the server did not start, or died.
        RuntimeError: a job failed, or the server did not come to rest.
    """
    trace = folder / "trace.jsonl"
    tell("the server starts")
    with VllmServer(_options(model, folder, trace), folder / "server.log") as server:
        tell("agents under pressure")
        played = asyncio.run(_play(server, make_jobs(AGENTS, seed), Hints.KV_PARAMS))
        tell("jobs that stay open")
        opened = _named("open", make_jobs(replace(AGENTS, jobs=3, turns=2), seed + 1))
        left_open = asyncio.run(_play(server, opened, Hints.SESSION))
        tell("the server comes to rest")
        asked = sum(len(job.turns) for job in (*played, *left_open))
        ticks = _settle(server, asked)
        status = _get(server, STATUS)["engines"][0]
        open_jobs = _get(server, JOBS)["jobs"]
        metrics = read_metrics(server.metrics_text())
        tell("calls of the idle server")
        idle_ms = [_call_ms(server) for _ in range(IDLE_CALLS)]
        tell("the server ends")
        server.check()
        _end(server)
    reader = TraceReader(trace)
    records = list(reader)
    if reader.bad_lines:
        raise RuntimeError(f"lines of the trace are no records: {reader.bad}")
    return Seen(
        played=(*played, *ticks),
        left_open=left_open,
        metrics=metrics,
        status=status,
        open_jobs=open_jobs,
        trace=trace,
        records=records,
        steps=step_figures(StepReader(trace)),
        idle_ms=idle_ms,
    )


def _options(model: Path, folder: Path, trace: Path) -> ServerOptions:
    dtype = machine_dtype()
    cpu_bytes = CPU_TOKENS * KV_ELEMENTS * (4 if dtype.name == "float32" else 2)
    return ServerOptions(
        model=model,
        kv_blocks=POOL_BLOCKS,
        block_size=BLOCK,
        max_model_len=POOL_BLOCKS * BLOCK // 2,
        dtype=dtype.name,
        kv_transfer_config=CONNECTOR,
        env={
            "TIERED_KV_CPU_GIB": f"{cpu_bytes / 2**30:.4f}",
            "TIERED_KV_SSD_PATH": str(folder / "ssd"),
            "TIERED_KV_SSD_GIB": "2",
            "TIERED_KV_TRACE": str(trace),
            "TIERED_KV_TRACE_STEPS": "1",
            "VLLM_PLUGINS": "tiered_kv",
        },
        extra_args=(
            "--enable-prefix-caching",
            *("--max-num-batched-tokens", "512"),
            *("--scheduler-cls", SCHEDULER),
            *("--shutdown-timeout", str(SHUTDOWN_S)),
        ),
    )


def _named(prefix: str, jobs: Sequence[Job]) -> tuple[Job, ...]:
    return tuple(replace(job, name=f"{prefix}-{job.name}") for job in jobs)


async def _play(server: VllmServer, jobs: Sequence[Job], hints: Hints) -> tuple[JobDone, ...]:
    arrivals = [AGENTS.apart_s * at for at in range(len(jobs))]
    done = await drive(
        server.url, MODEL_NAME, jobs, arrivals, hints=hints, force=False, logprobs=False
    )
    if failed := [f"{job.name}: {job.error}" for job in done if job.error is not None]:
        raise RuntimeError(f"jobs failed: {'; '.join(failed)}\n{server.log_tail()}")
    return done


def _settle(server: VllmServer, asked: int) -> list[JobDone]:
    """Ask for single tokens until nothing is under way, and what is counted is told: vLLM hands
    counters on with its steps. Returns these jobs, of a turn each."""
    ticks = list[JobDone]()
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        turn = Turn((FIRST_WORD + len(ticks),), (FIRST_WORD,), 0.0)
        ticks += asyncio.run(
            _play(server, [Job(f"tick-{len(ticks)}", "", (turn,))], Hints.KV_PARAMS)
        )
        time.sleep(0.5)
        metrics = read_metrics(server.metrics_text())
        queues = _get(server, STATUS)["engines"][0]["queues"]
        at_rest = not (queues["orders_in_flight"] or queues["running"] or queues["queued"])
        if at_rest and metrics["turns"] == asked + len(ticks):
            return ticks
    raise RuntimeError(f"the server does not come to rest: {queues}\n{server.log_tail()}")


def _end(server: VllmServer) -> None:
    """Have the server end by itself, and wait for it. The signal goes to the API server alone: an
    engine that gets it twice, from here and from there, is killed before it writes what it knows.

    Raises:
        RuntimeError: it does not end.
    """
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + SETTLE_S
    while group_members(server.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    if group_members(server.pid):
        raise RuntimeError(f"the server does not end.\n{server.log_tail()}")


def _get(server: VllmServer, path: str) -> dict[str, Any]:
    with _DIRECT.open(server.url + path, timeout=60) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found


def _call_ms(server: VllmServer) -> float:
    time.sleep(0.1)  # so that the engine sleeps again
    began = time.perf_counter()
    _get(server, STATUS)
    return 1e3 * (time.perf_counter() - began)
