"""scripts/demo: agent jobs on stock vLLM, then the same jobs with the connector, side by side.

Both servers get the same model, the same cores and the same KV pool, which is too small for the
jobs: while an agent waits for its tool, others push its KV out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bench.agents import ROOT, AgentError, Job, JobPlan, make_jobs, run_jobs, source_files
from bench.load import cores_of_others, read_clock
from bench.model import NAME, ModelError, prepared_path, small_model
from bench.output import run_command
from bench.report import Comparison, Run
from bench.server import CONNECTOR, ServerError, ServerOptions, VllmServer, runs_on_cpu
from bench.turns import TraceError, read_trace, sources_from_trace, sources_from_usage

POOL_SHARE = 0.4
"""The pool's size, as a share of what the jobs' contexts are together at their end."""

USUAL_START_S = 30.0
"""How long a server takes to start on two cores; only the progress bar uses it."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """KV pool and longest request, from the jobs.

    Attributes:
        max_model_len: tokens.
        kv_blocks: blocks of ``block_size`` tokens.
    """

    max_model_len: int
    kv_blocks: int
    block_size: int

    @property
    def pool_tokens(self) -> int:
        """The pool's size in tokens."""
        return self.kv_blocks * self.block_size


def size_for(jobs: Sequence[Job], max_tokens: int, block_size: int) -> Sizing:
    """A pool too small for ``jobs`` together but large enough for any one of them."""
    contexts = [job.estimate_tokens(max_tokens) for job in jobs]
    longest = -(-int(max(contexts) * 1.15) // 256) * 256
    # vLLM keeps a block for itself, and one request of maximum length must fit.
    tokens = max(int(sum(contexts) * POOL_SHARE), longest + 2 * block_size)
    return Sizing(longest, -(-tokens // block_size), block_size)


class Stage:
    """One server's part of the demo, with its progress on ``console``."""

    def __init__(self, name: str, options: ServerOptions, log_path: Path, console: Console) -> None:
        self._name = name
        self._console = console
        self._options = options
        self._log_path = log_path

    def run(self, jobs: Sequence[Job], max_tokens: int) -> Run:
        """Start the server, run the jobs, stop the server.

        ``sources`` of the result are what the server reports as usage.

        Raises:
            ServerError: it did not start, or died; with the tail of its log.
            AgentError: it runs but answered a request with an error.
        """
        with _progress(self._console) as progress:
            starting = progress.add_task(f"{self._name}: server starts", total=USUAL_START_S)

            def on_wait(seconds: float) -> None:
                progress.update(starting, completed=min(seconds, USUAL_START_S * 0.97))

            server = VllmServer(self._options, self._log_path, on_wait=on_wait)
            with server:
                progress.update(starting, completed=USUAL_START_S)
                total = sum(len(job.steps) for job in jobs)
                turns = progress.add_task(f"{self._name}: turns", total=total)
                began = time.perf_counter()
                clock = read_clock(server.pid or 0)
                try:
                    results = asyncio.run(
                        run_jobs(
                            server.url,
                            jobs,
                            max_tokens=max_tokens,
                            on_turn=lambda _: progress.advance(turns),
                        )
                    )
                except AgentError as error:
                    server.check()
                    raise AgentError(f"{error}\n{server.log_tail()}") from error
                wall_s = time.perf_counter() - began
                return Run(
                    results=results,
                    sources=sources_from_usage(results),
                    wall_s=wall_s,
                    reserved_cpus=server.reserved_cpus,
                    other_cores=cores_of_others(clock, read_clock(server.pid or 0)),
                )


def compare(
    model: str | Path, name: str, plan: JobPlan, out: Path, cpu_gib: float, console: Console
) -> Comparison:
    """Both runs. Writes ``stock.log``, ``tiered.log`` and ``trace.jsonl`` into ``out``.

    Raises:
        ServerError, AgentError: see ``Stage.run``.
        TraceError: the connector's trace does not account for every turn.
    """
    on_cpu = runs_on_cpu()
    jobs = make_jobs(plan, source_files())
    sizing = size_for(jobs, plan.max_tokens, 32 if on_cpu else 16)
    contexts = sum(job.estimate_tokens(plan.max_tokens) for job in jobs)
    device = "CPU" if on_cpu else "CUDA"
    console.print(
        f"{plan.jobs} agents, {plan.turns} turns each, about {contexts:,} tokens of context in the "
        f"end; a KV pool of {sizing.pool_tokens:,} tokens; {name} on {device}.",
        soft_wrap=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    trace = out / "trace.jsonl"
    trace.unlink(missing_ok=True)
    stock = ServerOptions(
        model=model,
        kv_blocks=sizing.kv_blocks,
        block_size=sizing.block_size if on_cpu else None,
        max_model_len=sizing.max_model_len,
        enforce_eager=on_cpu,
    )
    tiered = replace(
        stock,
        kv_transfer_config=CONNECTOR,
        env={"TIERED_KV_CPU_GIB": f"{cpu_gib:g}", "TIERED_KV_TRACE": str(trace)},
    )
    stock_run = Stage("stock vLLM", stock, out / "stock.log", console).run(jobs, plan.max_tokens)
    tiered_run = Stage("tiered-kv", tiered, out / "tiered.log", console).run(jobs, plan.max_tokens)
    traced = sources_from_trace(read_trace(trace), tiered_run.results)
    return Comparison(
        model=name,
        jobs=plan.jobs,
        turns=plan.turns,
        pool_tokens=sizing.pool_tokens,
        stock=stock_run,
        tiered=replace(tiered_run, sources=traced),
    )


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


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits on errors and --help."""
    plan = JobPlan()
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--model", help=f"folder or name of another model than {NAME}")
    parser.add_argument("--jobs", type=_positive, default=plan.jobs, help="(%(default)s)")
    parser.add_argument("--turns", type=_positive, default=plan.turns, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=plan.seed, help="of the jobs (%(default)s)")
    parser.add_argument("--cpu-gib", type=float, default=2.0, help="CPU tier, GiB (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="logs and trace go here")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser.parse_args(argv)


def demo(args: argparse.Namespace) -> int:
    """Both runs, compared on standard output; 0."""
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    plan = replace(JobPlan(), jobs=args.jobs, turns=args.turns, seed=args.seed)
    model, name = prepare_model(args.model, console)
    comparison = compare(model, name, plan, args.out.resolve(), args.cpu_gib, console)
    if args.json:
        print(json.dumps(comparison.as_json()))
        return 0
    print(comparison.table(), "", sep="\n")
    for note in comparison.notes():
        print(f"- {note}")
    out = args.out.resolve()
    shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    print(f"- logs and trace in {shown}; {time.perf_counter() - began:.0f} s in all")
    print("", comparison.summary(), sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when it came to its end, 1 on a failure that the message explains."""
    args = parse_args(argv)
    failures = (ModelError, ServerError, AgentError, TraceError)
    return run_command(lambda: demo(args), failures, "stopped; no server is left running")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


if __name__ == "__main__":
    sys.exit(main())
