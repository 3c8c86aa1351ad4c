"""scripts/demo: agent jobs on stock vLLM, then the same jobs with the connector, side by side.

The machine is measured first, and the jobs are sized so that both servers together run for about
three and a half minutes. Both get the same model, the same cores and the same KV pool, which is too
small for the jobs: while an agent waits for its tool, others push its KV out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiered_kv.bench.demo.agents import (
    Job,
    JobPlan,
    differing_answers,
    in_other_order,
    make_jobs,
    source_files,
)
from tiered_kv.bench.demo.report import Comparison, Run
from tiered_kv.bench.demo.sizing import Sizing, plan_for, predict_s, size_for
from tiered_kv.bench.demo.speed import Speed, SpeedError, measure_speed
from tiered_kv.bench.demo.stage import DemoError, Place, Stage, shown
from tiered_kv.bench.demo.turns import TraceError, read_trace, sources_from_trace
from tiered_kv.bench.output import AsJson, print_json, run_benchmark, run_command
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.servers.dtypes import FLOAT32, DtypeError
from tiered_kv.bench.servers.model import NAME, ModelError, prepared_path, small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    ServerOptions,
    runs_on_cpu,
)

SECONDS = 210.0
"""Both servers' runs together, as planned."""

PATIENCE = 4.0
"""A client waits for so many times what both runs were to take: the machine may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A demo, as the command line asks for it. None where the machine decides.

    Attributes:
        model: folder or name.
        seconds: of both runs together.
        cpu_gib: size of the CPU tier.
    """

    model: str | None
    dtype: str | None
    seconds: float
    jobs: int | None
    turns: int | None
    seed: int
    cpu_gib: float | None
    out: Path
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that both servers are given alike.

    Attributes:
        model: folder or name. name: to show.
        dtype: of the model and its KV, by vLLM's name.
        cpu_gib: of the connector's CPU tier.
        patience_s: longest silence of a server that is borne.
    """

    model: str | Path
    name: str
    dtype: str
    plan: JobPlan
    jobs: Sequence[Job]
    sizing: Sizing
    cpu_gib: float
    patience_s: float

    def stock(self) -> ServerOptions:
        """Stock vLLM."""
        on_cpu = runs_on_cpu()
        return ServerOptions(
            model=self.model,
            kv_blocks=self.sizing.kv_blocks,
            block_size=self.sizing.block_size if on_cpu else None,
            max_model_len=self.sizing.max_model_len,
            dtype=self.dtype,
            enforce_eager=on_cpu,
            # What the CPU build sets aside; the pool may be larger in float32.
            env={"VLLM_CPU_KVCACHE_SPACE": str(max(2, math.ceil(self.cpu_gib)))},
        )

    def tiered(self, trace: Path) -> ServerOptions:
        """The same with the connector, which writes ``trace``."""
        stock = self.stock()
        tiers = {"TIERED_KV_CPU_GIB": f"{self.cpu_gib:g}", "TIERED_KV_TRACE": str(trace)}
        return replace(stock, kv_transfer_config=CONNECTOR, env={**stock.env, **tiers})


def compare(setting: Setting, out: Path, console: Console, place: Place) -> Comparison:
    """Both runs, and where their answers differ stock once more, its jobs in another order.

    Writes a log of each server and ``trace.jsonl`` into ``out``.

    Raises:
        DemoError: see ``Stage.run``.
        TraceError: the connector's trace does not account for every turn.
    """
    trace = out / "trace.jsonl"
    trace.unlink(missing_ok=True)
    jobs, max_tokens = setting.jobs, setting.plan.max_tokens

    def run(
        name: str, options: ServerOptions, log: str, jobs: Sequence[Job], before: Run | None = None
    ) -> Run:
        seen = before.results if before is not None else ()
        stage = Stage(name, options, out / log, console, place, setting.patience_s, seen)
        return stage.run(jobs, max_tokens)

    stock = run("stock vLLM", setting.stock(), "stock.log", jobs)
    tiered = run("tiered-kv", setting.tiered(trace), "tiered.log", jobs, before=stock)
    control = None
    if differing_answers(stock.results, tiered.results)[0]:
        console.print("Some answers differ. Do stock vLLM's own, with the jobs in another order?")
        control = run("stock again", setting.stock(), "again.log", in_other_order(jobs))
    return Comparison(
        model=setting.name,
        dtype=setting.dtype,
        jobs=setting.plan.jobs,
        turns=setting.plan.turns,
        pool_tokens=setting.sizing.pool_tokens,
        stock=stock,
        tiered=replace(tiered, sources=sources_from_trace(read_trace(trace), tiered.results)),
        control=control,
    )


def prepare(asked: Asked, console: Console) -> Setting:
    """Measure the machine, choose the jobs, and say both.

    Raises:
        ModelError: see ``small_model``.
        SpeedError: vLLM does not run the model.
    """
    on_cpu = runs_on_cpu()
    model, name = prepare_model(asked.model, console)
    # On a CPU float32 is exact enough that batches of another shape seldom change an answer.
    dtype = asked.dtype or (FLOAT32 if on_cpu else "auto")
    with console.status("Measuring this machine (35 seconds)"):
        speed = measure_speed(model, dtype)
    plan = choose_plan(asked, speed, stock_runs=1 if dtype == FLOAT32 else 2)
    jobs = make_jobs(plan, source_files())
    sizing = size_for(jobs, plan.max_tokens, 32 if on_cpu else 16)
    in_memory = sizing.contexts_tokens * speed.kv_token_bytes / 2**30
    device = f"{len(os.sched_getaffinity(0))} cores" if on_cpu else "the GPU"
    console.print(
        f"{name} in {dtype} on {device}: {speed.prefill_tokens_s:,.0f} prompt tokens a second, "
        f"{speed.decode_tokens_s:,.0f} answered. So {plan.jobs} agents with {plan.turns} turns "
        f"each, about {sizing.contexts_tokens:,} tokens of context in the end, and a KV pool of "
        f"{sizing.pool_tokens:,} tokens: about {predict_s(plan, speed) / 60:.1f} minutes for both "
        "servers.",
        soft_wrap=True,
    )
    return Setting(
        model=model,
        name=name,
        dtype=dtype,
        plan=plan,
        jobs=jobs,
        sizing=sizing,
        cpu_gib=asked.cpu_gib or max(0.5, math.ceil(12.5 * in_memory) / 10),
        patience_s=max(300.0, PATIENCE * predict_s(plan, speed)),
    )


def choose_plan(asked: Asked, speed: Speed, stock_runs: int) -> JobPlan:
    """The plan that fits the time, with as many jobs and turns as were asked for."""
    base = replace(JobPlan(), seed=asked.seed)
    if asked.turns:
        base = replace(base, turns=asked.turns)
    plan = plan_for(speed, asked.seconds, free_memory(), base, stock_runs)
    return replace(plan, jobs=asked.jobs or plan.jobs)


def prepare_model(given: str | None, console: Console) -> tuple[str | Path, str]:
    """The model to serve and its name: ``given``, or the small one, made if missing.

    Raises:
        ModelError: see ``small_model``.
    """
    if given is not None:
        path = Path(given).expanduser()
        return (path.resolve(), path.resolve().name) if path.is_dir() else (given, given)
    if prepared_path().is_dir():
        return prepared_path(), NAME
    with console.status(f"Preparing {NAME} (once, about half a minute)"):
        return small_model(), NAME


def demo(asked: Asked, place: Place) -> int:
    """Both runs, compared on standard output; 0."""
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(prepare(asked, console), out, console, place)
    if asked.as_json:
        print_json(comparison.as_json())
        return 0
    print(comparison.table(), "", sep="\n")
    for note in comparison.notes():
        print(f"- {note}")
    print(f"- logs and trace in {shown(out)}; {time.perf_counter() - began:.0f} s in all")
    print("", comparison.summary(), sep="\n")
    return 0


def main(
    model: Annotated[
        str | None, typer.Option(help=f"Folder or name of another model than {NAME}.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the model and its KV; float32 on a CPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time that both runs take together.")
    ] = SECONDS,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Agents; as many as fit that time if not given.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=1, help=f"Turns of an agent; {JobPlan().turns} if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the jobs.")] = 0,
    cpu_gib: Annotated[
        float | None,
        typer.Option(help="Size of the CPU tier, GiB; room for all jobs if not given."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of logs and trace.")] = ROOT / ".demo",
    as_json: AsJson = False,
) -> None:
    """Run the demo. Exit with 1 on a failure that the message explains."""
    asked = Asked(
        model=model,
        dtype=dtype,
        seconds=seconds,
        jobs=jobs,
        turns=turns,
        seed=seed,
        cpu_gib=cpu_gib,
        out=out,
        as_json=as_json,
    )
    place = Place()
    failures = (DemoError, DtypeError, ModelError, SpeedError, TraceError)
    raise typer.Exit(run_command(lambda: demo(asked, place), failures, place.stopped))


def free_memory() -> int:
    """Bytes that programs may still take, by /proc; half of the machine's where that is silent."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(
            next(line for line in lines if line.startswith("MemAvailable")).split()[1]
        )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


if __name__ == "__main__":
    run_benchmark(main, __doc__)
