"""scripts/demo: agent jobs on stock vLLM, then the same jobs with the connector.

The machine is measured first, and the jobs are sized so that both servers together run for about
three and a half minutes. Both servers get the same model, cores and KV pool size. The pool is too
small for the jobs: while an agent waits for its tool, other agents' requests evict its KV.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiered_kv.bench.agents.results import Kept
from tiered_kv.bench.agents.sources import with_sources
from tiered_kv.bench.demo.jobs import (
    JobPlan,
    in_other_order,
    make_jobs,
    plan_for,
    size_for,
    source_files,
)
from tiered_kv.bench.demo.report import Comparison, differing_answers
from tiered_kv.bench.demo.speed import SpeedError, measure_speed
from tiered_kv.bench.demo.stage import DemoError, Stage, shown
from tiered_kv.bench.output import AsJson, print_json, run_benchmark, run_command
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.kinds import with_connector
from tiered_kv.bench.servers.dtypes import FLOAT32, DtypeError
from tiered_kv.bench.servers.model import NAME, ModelError, prepared_path, small_model
from tiered_kv.bench.servers.vllm_server import ServerOptions, runs_on_cpu
from tiered_kv.machine import system_memory

SECONDS = 210.0
"""Planned duration of both servers' runs together, seconds."""
PATIENCE = 4.0
"""Maximum wait for a silent server, as a multiple of the planned duration, but at least five
minutes. It is generous because the machine may be busy."""
FAILURES = (DemoError, DtypeError, ModelError, SpeedError)


def prepare_model(given: str | None, console: Console) -> tuple[str | Path, str]:
    """Return the folder or hub name of the model to serve, and its display name. Prepares and uses
    the small model if ``given`` is None.

    Raises:
        ModelError: the small model is missing and cannot be prepared.
    """
    if given is not None:
        path = Path(given).expanduser()
        return (path.resolve(), path.resolve().name) if path.is_dir() else (given, given)
    if prepared_path().is_dir():
        return prepared_path(), NAME
    with console.status(f"Preparing {NAME} (once, about half a minute)"):
        return small_model(), NAME


def with_all_sources(kept: Kept, trace: Path) -> Kept:
    """Add to a run the tiers that its prompts came from, as recorded in the connector's trace.

    Raises:
        DemoError: the trace cannot be read, or does not cover every prompt token.
    """
    try:
        run = replace(kept.run, jobs=with_sources(kept.run.jobs, trace))
    except OSError as error:
        raise DemoError(f"the connector wrote no trace: {error}") from error
    for job in run.jobs:
        for turn in job.turns:
            if sum(turn.sources.values()) != turn.prompt_tokens:
                raise DemoError(
                    f"turn {turn.turn} of {job.name} had {turn.prompt_tokens} prompt tokens, but "
                    f"the trace {shown(trace)} reports {dict(turn.sources)}"
                )
    return replace(kept, run=run)


def main(
    model: Annotated[
        str | None, typer.Option(help=f"Model folder or name. Defaults to {NAME}.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type of the model and its KV. Defaults to float32 on a CPU."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Planned duration of both runs together, seconds.")
    ] = SECONDS,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of agents. Defaults to what fits in --seconds."),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns per agent.")] = JobPlan().turns,
    seed: Annotated[int, typer.Option(help="Seed of the jobs.")] = 0,
    cpu_gib: Annotated[
        float | None,
        typer.Option(help="Size of the CPU tier, GiB. Defaults to what all jobs need."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder for logs and trace.")] = ROOT / ".demo",
    as_json: AsJson = False,
) -> None:
    """Run the demo. Exits with 1 on a failure, after a message that explains it."""
    console = Console(stderr=True, highlight=False)
    stage = Stage(console)

    def compare() -> Comparison:
        folder = out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / "trace.jsonl"
        trace.unlink(missing_ok=True)
        on_cpu = runs_on_cpu()
        path, name = prepare_model(model, console)
        # On a CPU, float32 is so exact that a different batch shape seldom changes an answer.
        chosen = dtype or (FLOAT32 if on_cpu else "auto")
        with console.status("Measuring this machine (35 seconds)"):
            speed = measure_speed(path, chosen)
        stock_runs = 1 if chosen == FLOAT32 else 2
        base = JobPlan(seed=seed, turns=turns)
        plan = plan_for(speed, seconds, system_memory()[1], base, stock_runs)
        plan = replace(plan, jobs=jobs or plan.jobs)
        arrivals = make_jobs(plan, source_files())
        sizing = size_for(arrivals, 32 if on_cpu else 16)
        planned_s = plan.predict_s(speed)
        device = f"{len(os.sched_getaffinity(0))} cores" if on_cpu else "the GPU"
        console.print(
            f"{name} in {chosen} on {device}: {speed.prefill_tokens_s:,.0f} prompt tokens a second,"
            f" {speed.decode_tokens_s:,.0f} answered. The demo runs {plan.jobs} agents "
            f"with {plan.turns} turns"
            f" each, about {sizing.contexts_tokens:,} tokens of context at the end, and a KV pool "
            f"of {sizing.pool_tokens:,} tokens: about {planned_s / 60:.1f} minutes for both "
            "servers.",
            soft_wrap=True,
        )
        contexts_gib = sizing.contexts_tokens * speed.kv_token_bytes / 2**30
        gib = cpu_gib or max(0.5, math.ceil(12.5 * contexts_gib) / 10)
        stock = ServerOptions(
            model=path,
            kv_blocks=sizing.kv_blocks,
            block_size=sizing.block_size if on_cpu else None,
            max_model_len=sizing.max_model_len,
            dtype=chosen,
            enforce_eager=on_cpu,
            # GiB that vLLM's CPU build reserves. A float32 pool can be larger than the default.
            env={"VLLM_CPU_KVCACHE_SPACE": str(max(2, math.ceil(gib)))},
        )
        tiered = with_connector(stock, TIERED_KV_CPU_GIB=f"{gib:g}", TIERED_KV_TRACE=str(trace))
        patience_s = max(300.0, PATIENCE * planned_s)

        first = stage.run(
            "stock vLLM", stock, folder / "stock.log", arrivals, patience_s=patience_s
        )
        ended = sorted(first.run.turns, key=lambda turn: turn.sent_s + turn.latency_s)
        log = folder / "tiered.log"
        second = stage.run("tiered-kv", tiered, log, arrivals, patience_s=patience_s, before=ended)
        control = None
        if differing_answers(first.run, second.run)[0]:
            console.print(
                "Some answers differ. Checking whether stock vLLM's own answers differ when the "
                "jobs run in another order."
            )
            log, others = folder / "again.log", in_other_order(arrivals)
            control = stage.run("stock again", stock, log, others, patience_s=patience_s)
        return Comparison(
            model=name,
            dtype=chosen,
            turns=turns,
            pool_tokens=sizing.pool_tokens,
            stock=first,
            tiered=with_all_sources(second, trace),
            control=control,
        )

    def demo() -> int:
        began = time.perf_counter()
        comparison = compare()
        if as_json:
            print_json(comparison.as_json())
            return 0
        print(comparison.table(), "", sep="\n")
        for note in comparison.notes():
            print(f"- {note}")
        print(f"- logs and trace: {shown(out)}; total time: {time.perf_counter() - began:.0f} s")
        print("", comparison.summary(), sep="\n")
        return 0

    raise typer.Exit(run_command(demo, FAILURES, stage.stopped))


if __name__ == "__main__":
    run_benchmark(main, __doc__)
