"""Consistency of the trace with all other figures that a server reports, and the trace's cost.

    python -m bench.trace --json

Agents run under memory pressure on a real server with every tier: their contexts are pinned,
restored from CPU memory and from SSD, promoted and evicted, and some jobs are left open. Afterwards
the sums of the trace, of ``trace analyze``, of ``/metrics``, of the routes and of the clients must
be equal. The agents come from ``tests/e2e/test_traced_run.py``, so this benchmark needs a checkout.

- ``disagreements``: number of figures whose reports differ; ``accounts``: number of figures
  compared; ``details``: all reports of the figures that differ.
- ``on_ratio``: time per scheduler step with the trace, divided by the time without it (64 decoding
  requests, as in ``bench.overhead``); ``on_control``: the ratio of two engines without the trace;
  ``steps_ratio`` and ``steps_control``: the same with every step in the trace.
- ``idle_call_ms``: 95th percentile of a route's response time while the server is idle.
- ``analyze_s``, ``analyze_cpu_s``, ``analyze_mib``: ``trace analyze`` of ``analyze_turns`` turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, Tick, run_benchmark, served_benchmark
from tiered_kv.bench.overhead import CYCLE, ratios, scheduler_step
from tiered_kv.bench.paths import needs_checkout
from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)

TURNS_OF_A_JOB = 10
DRAWN = 1000
FILE_BYTES = 1 << 30
"""Size limit of a trace file. It is larger than on a server, so that no turn is deleted."""
TOOLS = ("pytest", "ls", "cat", "git", "sed", "grep", "python", "make")
ANALYZE = """
import json, re, sys, time
from pathlib import Path
from tiered_kv.cli.app import app
try:
    app(["trace", "analyze", sys.argv[1], "--json"])
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps([time.process_time(), int(peak[1]) / 1024]), file=sys.stderr)
"""
"""Program that analyses a trace, and then prints its own CPU seconds and peak memory in MiB. The
resource usage that the kernel reports would include memory of the parent process."""


def compare(model: Path, folder: Path, seed: int, tick: Tick) -> dict[str, Any]:
    """Run the agents, and compare all reports. Returns the numbers of compared and differing
    figures, and further counts.
    """
    with needs_checkout():
        from tests.e2e.traced_run import accounts, run_script
    seen = run_script(model, folder, seed, tick)
    every = accounts(seen)
    differing = [one.to_json() for one in every if not one.agrees]
    return {
        "disagreements": len(differing),
        "details": differing,
        "accounts": len(every),
        "turns": len(seen.records),
        "steps": seen.steps.steps,
        "preemptions": seen.preemptions,
        "pins": seen.metrics["pins"],
        "tokens_cpu": seen.metrics["prompt_tokens_cpu"] - seen.metrics["prompt_tokens_ssd"],
        "tokens_ssd": seen.metrics["prompt_tokens_ssd"],
        "pages_promoted": seen.metrics["pages_promoted"],
        "idle_call_ms": seen.idle_call_ms,
    }


def step_cost(engines: int, tick: Tick, *, steps: bool) -> tuple[float, float]:
    """Return the ratio of scheduler step times with the trace to those without it, and the control.

    Args:
        engines: number of engines per variant.
        steps: True to trace every step too.
    """
    rounds, off = [], dict[str, Any](cpu_gib=0.05)
    for first in range(engines):
        with tempfile.TemporaryDirectory() as folder:
            on = {**off, "trace": f"{folder}/trace.jsonl", "trace_steps": steps}
            extras = {"stock": off, "control": off, "connector": on}
            rounds.append(scheduler_step(first, tick, extras))
    return ratios(rounds, CYCLE)


def analyze_many(turns: int, folder: Path, seed: int) -> dict[str, Any]:
    """Write a trace with ``turns`` turns, and analyse it in a separate process. Returns the costs.

    Raises:
        RuntimeError: the analysis failed.
    """
    path = folder / "large.jsonl"
    header = TraceHeader(
        version="bench",
        started=1.79e9,
        clock=0.0,
        model="model",
        policy="occupancy",
        block_size=16,
        vram_blocks=4096,
    )
    file, records = TraceFile(path, header.to_line(), FILE_BYTES), _records(turns, seed)
    while lines := [one.to_line() for one in islice(records, DRAWN)]:
        file.append(lines)
    file.close()
    began = time.perf_counter()
    command = [sys.executable, "-c", ANALYZE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"the analysis failed:\n{done.stderr[-2000:]}")
    cpu_s, mib = json.loads(done.stderr.splitlines()[-1])
    return {
        "analyze_s": seconds,
        "analyze_cpu_s": cpu_s,
        "analyze_mib": mib,
        "analyze_turns": json.loads(done.stdout)["turns"],
        "analyze_bytes": sum(one.stat().st_size for one in folder.glob("large.jsonl*")),
    }


def _records(turns: int, seed: int) -> Iterator[TurnRecord]:
    """Yield records of turns as on a busy server: numbers with many digits, typical client ids, and
    decisions with all their costs.
    """
    rng = np.random.default_rng(seed)
    for at in range(turns):
        if not at % DRAWN:
            drawn = rng.random((DRAWN, 12))
        one = drawn[at % DRAWN].tolist()
        job, number = divmod(at, TURNS_OF_A_JOB)
        last, tool = number == TURNS_OF_A_JOB - 1, TOOLS[at % len(TOOLS)]
        prompt = 2_000 + int(30_000 * one[0])
        vram, cpu, ssd = (int(prompt * share / 3) for share in one[1:4])
        pinned = one[4] < 0.5 and not last
        gap_s, cost_s = 6 * one[7], 0.01 * one[11]
        back = GapStory(StoryEnd.RETURNED, gap_s, pinned, one[8] * pinned, cost_s)
        yield TurnRecord(
            job=f"0199c7a4-5b7e-7d31-a7c2-{job:012x}",
            turn=number + 1,
            request=f"chatcmpl-{at:032x}-0-0123abcd",
            arrived=1.79e9 + at / 20,
            finish="FINISHED_STOPPED",
            tool=("bash", tool, f"{tool} <path>"),
            times=TurnTimes(0.0, one[5], 1 + one[5], 1.1 + one[5], 2 + one[6], 4 + 9 * one[6]),
            tokens=TurnTokens(prompt, vram, cpu, ssd, prompt - vram - cpu - ssd, 0, 700, 200),
            decision=PricedDecision(
                tier="pin" if pinned else "cpu",
                gap_class="fast" if pinned else "slow",
                ttl_s=60.0 * pinned,
                q50_s=4 * one[7],
                q90_s=30 * one[7],
                benefit_s=one[8],
                restore_s=one[8] / 2,
                recompute_s=3 * one[8],
                cpu_s=one[8] / 2,
                tiers_s={"ssd": one[8]},
                cpu_stay_s=100 * one[9],
                survival=one[9],
                queue_s=one[10],
                vram_price=cost_s,
            ),
            pin=PinStory(prompt // 16, gap_s, PinEnd.RETURNED) if pinned else PinStory(),
            pages=PageMoves(ssd // 16, 131_072 * (ssd // 16), ssd // 16, 0, cpu // 16),
            gap=GapStory(StoryEnd.OVER) if last else back,
        )


def main(
    engines: Annotated[
        int, typer.Option(help="Number of engines per variant when measuring step times.")
    ] = 6,
    turns: Annotated[int, typer.Option(help="Number of turns in the large trace.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Random seed of the agents.")] = 0,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Check the trace and measure its cost. Exits with 1 if figures disagree."""
    title = "The trace, compared with all other figures"
    with (
        tempfile.TemporaryDirectory(prefix="trace-") as name,
        served_benchmark(title, 6 + 2 * engines, model, as_json=as_json) as run,
    ):
        found = compare(run.model, Path(name), seed, run.tick)
        on_ratio, on_control = step_cost(engines, run.tick, steps=False)
        steps_ratio, steps_control = step_cost(engines, run.tick, steps=True)
        run.tick("a large trace")
        run.result = {
            **found,
            "on_ratio": on_ratio,
            "on_control": on_control,
            "steps_ratio": steps_ratio,
            "steps_control": steps_control,
            "engines": engines,
            **analyze_many(turns, Path(name), seed),
        }
    if found["disagreements"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
