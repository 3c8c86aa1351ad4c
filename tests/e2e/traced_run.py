"""Runs agents under memory pressure on a real server with every tier, and compares each figure
across all sources that report it.

The sources are the clients, the trace, ``trace analyze``, ``/metrics``, the routes, and vLLM's own
counters.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.jobs import FIRST_WORD, Job, Load, Turn, make_jobs
from tiered_kv.bench.agents.player import drive, request_id
from tiered_kv.bench.agents.results import JobDone
from tiered_kv.bench.agents.sources import client_name
from tiered_kv.bench.models.catalogue import VOCABULARY
from tiered_kv.bench.replay.kinds import BLOCK, SCHEDULER
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.doctor.running_server import events, totals
from tiered_kv.trace.analysis import Figures, analyze
from tiered_kv.trace.steps.step_figures import StepFigures, step_figures
from tiered_kv.trace.steps.step_tracks import StepReader
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import PinEnd, StoryEnd, TurnRecord
from tiered_kv.trace.turn_table import TurnTable

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
"""Load of the run. The jobs' contexts, about 900 tokens each at the end, are three times the
pool."""
POOL_BLOCKS = 80
CPU_TOKENS = 3_000
"""Capacity of CPU memory in tokens, so small that pages are demoted to SSD and promoted again."""
KV_ELEMENTS = 30 * 2 * 3 * 64
"""Number of elements in the KV of one token of the small model."""
IDLE_CALLS = 40
SETTLE_S = 300.0
STATUS, JOBS = "/tiered_kv/status", "/tiered_kv/jobs?limit=1000"
OF_VLLM = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "answer_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""vLLM's own counters, by the names that this module uses."""
FAULTS = (
    "save_failures",
    "restore_failures",
    "demotion_failures",
    "promotion_failures",
    "compression_failures",
    "ssd_errors",
    "hook_errors",
    "trace_dropped",
)
"""Counters that stay 0 unless something fails."""
HAPPENED = (
    "prompt_tokens_vram",
    "prompt_tokens_cpu",
    "prompt_tokens_ssd",
    "pages_promoted_used",
    "pages_demoted",
    "pages_evicted",
    "pins",
)
"""Counters that the run must move, because figures that are all 0 agree trivially."""
MOST_NAMED = 5
"""Maximum number of differing turns that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that was reported about one run.

    Attributes:
        played: jobs as their clients saw them.
        left_open: jobs whose client never marked a turn as the last.
        metrics: figures on ``/metrics`` at the end; 0 for missing ones.
        status: the engine's answer to the status route.
        open_jobs: the answer to the jobs route.
        records, steps: the trace, read after the server had exited.
        idle_ms: durations of calls of the status route while the server was idle.
    """

    played: Sequence[JobDone]
    left_open: Sequence[JobDone]
    metrics: Mapping[str, int]
    status: dict[str, Any]
    open_jobs: Sequence[dict[str, Any]]
    records: Sequence[TurnRecord]
    steps: StepFigures
    idle_ms: Sequence[float]

    @property
    def idle_call_ms(self) -> float:
        """95th percentile of the durations in ``idle_ms``."""
        return statistics.quantiles(self.idle_ms, n=20)[-1]

    @property
    def preemptions(self) -> int:
        """Number of preemptions in the trace."""
        return sum(one.preempted.count for one in self.records)


# -- the run ------------------------------------------------------------------------


def run_script(model: Path, folder: Path, seed: int, tell: Callable[[str], None]) -> Seen:
    """Play the agents on a server, which has exited when this returns.

    Args:
        folder: receives the server's log, its trace and its pages on SSD.

    Raises:
        ServerError: the server did not start, or died.
        RuntimeError: a job failed, or the server did not become idle.
    """
    trace = folder / "trace.jsonl"
    tell("the server starts")
    with VllmServer(_options(model, folder, trace), folder / "server.log") as server:
        tell("agents under pressure")
        played = _play(server, make_jobs(AGENTS, seed, VOCABULARY), Hints.KV_PARAMS)
        tell("jobs that stay open")
        jobs = make_jobs(replace(AGENTS, jobs=3, turns=2), seed + 1, VOCABULARY)
        opened = [replace(job, name=f"open-{job.name}") for job in jobs]
        left_open = _play(server, opened, Hints.SESSION)
        tell("the server becomes idle")
        ticks = _settle(server, sum(len(job.turns) for job in (*played, *left_open)))
        status = _engine(server)
        open_jobs = json.loads(server.get(JOBS))["jobs"]
        metrics = read_metrics(server.metrics_text())
        tell("calls of the idle server")
        idle_ms = [_call_ms(server) for _ in range(IDLE_CALLS)]
        tell("the server exits")
        server.check()
        server.quit(SETTLE_S)
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
        records=records,
        steps=step_figures(StepReader(trace)),
        idle_ms=idle_ms,
    )


def read_metrics(text: str) -> Mapping[str, int]:
    """Return the connector's counters and gauges, and some of vLLM's, summed over engines."""
    by_sample = totals(text)
    found = {**events(text), **{name: by_sample.get(key, 0.0) for name, key in OF_VLLM.items()}}
    return Counter({name: round(value) for name, value in found.items()})


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
            *("--shutdown-timeout", "60"),
        ),
    )


def _play(server: VllmServer, jobs: Sequence[Job], hints: Hints) -> tuple[JobDone, ...]:
    arrivals = [AGENTS.apart_s * at for at in range(len(jobs))]
    playing = drive(
        server.url, MODEL_NAME, jobs, arrivals, hints=hints, force=False, logprobs=False
    )
    done = asyncio.run(playing)
    if failed := [f"{job.name}: {job.error}" for job in done if job.error is not None]:
        raise RuntimeError(f"jobs failed: {'; '.join(failed)}\n{server.log_tail()}")
    return done


def _settle(server: VllmServer, asked: int) -> list[JobDone]:
    """Send requests of one token until no copy runs and every turn is counted, because vLLM updates
    counters only during steps. Returns the jobs of these requests, with one turn each."""
    ticks = list[JobDone]()
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        turn = Turn((FIRST_WORD + len(ticks),), (FIRST_WORD,), 0.0)
        ticks += _play(server, [Job(f"tick-{len(ticks)}", "", (turn,))], Hints.KV_PARAMS)
        time.sleep(0.5)
        turns, queues = read_metrics(server.metrics_text())["turns"], _engine(server)["queues"]
        busy = queues["orders_in_flight"] or queues["running"] or queues["queued"]
        if not busy and turns == asked + len(ticks):
            return ticks
    raise RuntimeError(f"the server does not become idle: {queues}\n{server.log_tail()}")


def _engine(server: VllmServer) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(server.get(STATUS))["engines"][0]
    return status


def _call_ms(server: VllmServer) -> float:
    time.sleep(0.1)  # wait until the engine is idle again
    began = time.perf_counter()
    server.get(STATUS)
    return 1e3 * (time.perf_counter() - began)


# -- figures of a run ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """One figure as reported by each source.

    Attributes:
        figures: value of the figure, by source.
        about: details that help to explain a disagreement.
    """

    what: str
    figures: Mapping[str, object]
    about: object = None

    @property
    def agrees(self) -> bool:
        """True if all sources report the same value."""
        first, *others = self.figures.values()
        return all(other == first for other in others)

    def to_json(self) -> dict[str, object]:
        """Return the account as a dict, without None values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def accounts(seen: Seen) -> list[Account]:
    """Return all accounts of a run."""
    figures = analyze(TurnTable(seen.records))
    parts = (_tokens, _turns, _pins_and_pages, _jobs)
    return [account for part in parts for account in part(seen, figures)] + list(_steps(seen))


def disagreements(seen: Seen) -> list[str]:
    """Return the names of the figures whose sources disagree."""
    return [one.what for one in accounts(seen) if not one.agrees]


def _account(what: str, about: object = None, /, **figures: object) -> Account:
    return Account(what, figures, about)


def _answered(seen: Seen) -> dict[str, tuple[int, ...]]:
    """Return, by request, the turn number and token counts (prompt, found, answer) of each turn as
    its client saw it."""
    return {
        request_id(job.name, turn.turn): (
            turn.turn,
            turn.prompt_tokens,
            turn.cached_tokens,
            turn.output_tokens,
        )
        for job in (*seen.played, *seen.left_open)
        for turn in job.turns
    }


def _traced(seen: Seen) -> dict[str, tuple[int, ...]]:
    """Return, by request, the turn number and token counts of each turn in the trace."""
    return {
        client_name(one.request) or one.request: (
            one.turn,
            one.tokens.prompt,
            one.tokens.vram + one.tokens.cpu + one.tokens.ssd,
            one.tokens.output,
        )
        for one in seen.records
    }


def _tokens(seen: Seen, figures: Figures) -> Iterator[Account]:
    metrics, counters, prompts = seen.metrics, seen.status["counters"], figures.prompts
    _, prompt, found, answer = (sum(part) for part in zip(*_answered(seen).values(), strict=True))
    _, *traced = (sum(part) for part in zip(*_traced(seen).values(), strict=True))

    def counted(by: Mapping[str, int]) -> int:
        """Return the tokens of all prompts. Tokens from SSD count as CPU memory, because they pass
        through it."""
        return sum(by[f"prompt_tokens_{source}"] for source in ("vram", "cpu", "recomputed"))

    yield _account(
        "tokens of prompts",
        client=prompt,
        trace=traced[0],
        analyze=prompts.tokens,
        metrics=counted(metrics),
        status=counted(counters),
        vllm=metrics["prompt_tokens"],
    )
    yield _account(
        "tokens of prompts that were found",
        client=found,
        trace=traced[1],
        metrics=metrics["prompt_tokens_vram"] + metrics["prompt_tokens_cpu"],
        vllm=metrics["cached_tokens"],
    )
    yield _account(
        "tokens of answers", client=answer, trace=traced[2], vllm=metrics["answer_tokens"]
    )
    parts = [one.tokens for one in seen.records]
    ssd = sum(one.ssd for one in parts)
    for source, tokens, share in (
        ("vram", sum(one.vram for one in parts), prompts.vram),
        ("cpu", sum(one.cpu for one in parts) + ssd, (prompts.cpu or 0.0) + (prompts.ssd or 0.0)),
        ("ssd", ssd, prompts.ssd),
        ("recomputed", sum(one.recomputed for one in parts), prompts.recomputed),
    ):
        yield _account(
            f"tokens of prompts, {source}",
            trace=tokens,
            analyze=round((share or 0.0) * prompts.tokens),
            metrics=metrics[f"prompt_tokens_{source}"],
            status=counters[f"prompt_tokens_{source}"],
        )


def _turns(seen: Seen, figures: Figures) -> Iterator[Account]:
    answered, traced = _answered(seen), _traced(seen)
    yield _account(
        "turns",
        client=len(answered),
        trace=len(seen.records),
        analyze=figures.turns,
        metrics=seen.metrics["turns"],
        status=seen.status["counters"]["turns"],
        vllm=seen.metrics["requests"],
    )
    differing = [
        {"request": name, "client": answered.get(name), "trace": traced.get(name)}
        for name in answered.keys() | traced.keys()
        if answered.get(name) != traced.get(name)
    ]
    yield _account(
        "turns that client and trace report differently",
        differing[:MOST_NAMED] or None,
        found=len(differing),
        expected=0,
    )
    yield _account("preemptions", trace=seen.preemptions, vllm=seen.metrics["preemptions"])


def _pins_and_pages(seen: Seen, figures: Figures) -> Iterator[Account]:
    metrics, counters, gauges = seen.metrics, seen.status["counters"], seen.status["gauges"]
    recorded = (event for job in recorder_events(seen.records).values() for event in job)
    yield _account(
        "pins",
        trace=sum(one.pin.end is not None for one in seen.records),
        analyze=sum(one.pins for one in figures.pins.values()),
        recorder=sum("pinned_time" in event for event in recorded),
        metrics=metrics["pins"],
        status=counters["pins"],
    )
    # Pins that existed at the last poll have since expired, or ended with the engine.
    ends = (figures.pins.get(end.value) for end in (PinEnd.CLOSED, PinEnd.EXPIRED))
    yield _account(
        "pins that expired, or were held to the end",
        analyze=sum(end.pins for end in ends if end is not None),
        status=counters["pins_ended_expired"] + seen.status["pins"]["jobs"],
    )
    yield _account(
        "promoted pages",
        trace=sum(one.pages.promoted + one.pages.ahead for one in seen.records),
        analyze=figures.promotions.pages,
        metrics=metrics["pages_promoted"],
        status=counters["pages_promoted"],
    )
    yield _account(
        "promoted pages that were used",
        analyze=figures.promotions.used,
        metrics=metrics["pages_promoted_used"],
        status=counters["pages_promoted_used"],
    )
    of_jobs = sum(one.pages.evicted.get("cpu", 0) for one in seen.records)
    excess = max(0, of_jobs - metrics["pages_evicted"])
    yield _account("evictions of jobs' pages beyond all evictions", found=excess, expected=0)
    for name in ("cpu_pages", "ssd_pages", "pinned_blocks", "jobs"):
        yield _account(f"gauge {name}", metrics=metrics[name], status=gauges[name])
    for name in ("pages_evicted", "pages_demoted", "pages_restored", "jobs_held"):
        yield _account(name, metrics=metrics[name], status=counters[name])


def _jobs(seen: Seen, figures: Figures) -> Iterator[Account]:
    yield _account(
        "jobs",
        client=len(seen.played) + len(seen.left_open),
        analyze=figures.jobs.jobs,
        recorder=len(recorder_events(seen.records)),
    )
    yield _account(
        "open jobs and their turns",
        client={job.name: len(job.turns) for job in seen.left_open},
        jobs={job["id"]: job["turn"] for job in seen.open_jobs},
        trace={one.job: one.turn for one in seen.records if one.gap.end is StoryEnd.CLOSED},
    )
    yield _account(
        "number of open jobs",
        client=len(seen.left_open),
        status=seen.status["jobs"]["known"],
        analyze=figures.jobs.waiting,
    )


def _steps(seen: Seen) -> Iterator[Account]:
    if not seen.preemptions:  # after a preemption, some tokens are computed twice
        yield _account(
            "tokens of prompts that were computed",
            steps=seen.steps.prefill_tokens,
            trace=sum(one.tokens.recomputed for one in seen.records),
        )
        yield _account(
            "tokens of answers but for the first ones",
            steps=seen.steps.decode_tokens,
            trace=sum(one.tokens.output for one in seen.records) - len(seen.records),
        )
    counters = seen.status["counters"]
    never = [name for name in HAPPENED if not counters[name]]
    yield _account("counters that did not move", found=never, expected=[])
    wrong = [name for name in FAULTS if counters[name] or seen.metrics[name]]
    yield _account("faults", found=wrong, expected=[])
