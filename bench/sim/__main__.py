"""Agent jobs on simulated GPUs, under vLLM's own scheduler.

python -m bench.sim table scheduling
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tiered_kv.bench.output import (
    AsJson,
    command_line,
    one_of,
    only_result_on_stdout,
    print_json,
    progress,
    run_command,
)
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.bench.sim.servers.servers import BASES, server
from tiered_kv.bench.sim.study import catalogue
from tiered_kv.bench.sim.study.catalogue import FOLD_SEEDS, PRESETS, STUDIES, TABLES
from tiered_kv.bench.sim.study.cells import CODING_AGENTS, Cell, Place, Source, running
from tiered_kv.bench.sim.study.report import plot, report
from tiered_kv.bench.sim.study.study import Study, run_study
from tiered_kv.bench.sim.workloads.generate import GENERATED
from tiered_kv.sizing.step_cost import GPUS

OUT = ROOT / ".sim"
TRACES = Path("../shared/traces")
SESSIONS = "claude_code_sessions.jsonl.gz"
RESULT = "result.json"


app = command_line("Simulate agent jobs on GPUs, under vLLM's own scheduler.")

POLICY_NAMES = (
    f"{', '.join(BASES)} or module:Class, optionally followed by +cpu or +cpu+ssd, and by @ and an "
    "eviction rule"
)
WORKLOAD_NAMES = f"{', '.join(GENERATED)} and {CODING_AGENTS}"

Gpu = Annotated[str, typer.Option(callback=one_of(GPUS), help=f"One of {', '.join(GPUS)}.")]
Model = Annotated[str, typer.Option(callback=one_of(MODELS), help=f"One of {', '.join(MODELS)}.")]
Ranks = Annotated[int, typer.Option(help="Number of GPUs.")]
CpuGib = Annotated[float, typer.Option(help="Size of the CPU tier, GiB.")]
SsdGib = Annotated[float, typer.Option(help="Size of the SSD tier, GiB.")]
Jobs = Annotated[int, typer.Option(help="Jobs per run.")]
Traces = Annotated[Path, typer.Option(help="Folder with recordings.")]
Processes = Annotated[int, typer.Option(help="Maximum number of concurrent runs.")]
Out = Annotated[Path, typer.Option(help="Run folder. Existing runs are not repeated.")]
CORES = os.cpu_count() or 1


def command(name: str | None = None) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Return a decorator that adds a command. On a failure, the command prints a message to
    standard error and exits with 1.
    """

    def added(function: Callable[..., int | None]) -> Callable[..., None]:
        @wraps(function)
        def run(**given: Any) -> None:
            # Only SIGTERM, so that a study in the background ignores Ctrl-C.
            stopped = "stopped; completed runs are kept"
            raise typer.Exit(
                run_command(
                    lambda: function(**given) or 0, FAILURES, stopped, signals=(signal.SIGTERM,)
                )
            )

        return app.command(name)(run)

    return added


@command()
def sweep(
    preset: Annotated[
        str | None,
        typer.Option(
            callback=one_of(PRESETS),
            help=(
                f"Run a predefined sweep: {', '.join(PRESETS)}. Ignores all other options except "
                "--traces, --processes, --out and --json."
            ),
        ),
    ] = None,
    workloads: Annotated[
        str, typer.Option(help=f"Comma-separated list of {WORKLOAD_NAMES}.")
    ] = "original",
    policies: Annotated[
        str, typer.Option(help=f"Comma-separated list of {POLICY_NAMES}.")
    ] = ",".join(catalogue.WITHOUT_OFFLOAD + catalogue.WITH_OFFLOAD),
    loads: Annotated[
        str,
        typer.Option(
            help="Comma-separated loads, as fractions of the load at which FCFS collapses."
        ),
    ] = ",".join(map(str, catalogue.LOADS)),
    seeds: Annotated[
        int, typer.Option(help="Runs per server and load, each with its own seed.")
    ] = 5,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            help="Size of the KV pool, tokens. Defaults to the VRAM that the weights leave free."
        ),
    ] = None,
    jobs: Jobs = 150,
    gpu: Gpu = "rtx4090-24",
    model: Model = "llama-3.1-8b",
    ranks: Ranks = 1,
    cpu_gib: CpuGib = 64.0,
    ssd_gib: SsdGib = 512.0,
    traces: Traces = TRACES,
    processes: Processes = CORES,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Compare policies under several loads on a machine."""
    if preset is not None:
        study = PRESETS[preset](str(traces / SESSIONS))
    else:
        place = Place(gpu, model, ranks, pool_tokens, cpu_gib, ssd_gib)
        place.machine()  # reports errors before anything runs
        servers = [server(name).name for name in policies.split(",")]
        scenes = [((place, _source(name, jobs, traces)), servers) for name in workloads.split(",")]
        study = catalogue.sweep("sweep", scenes, map(float, loads.split(",")), seeds)
    carry_out(study, processes, out, as_json=as_json)


@command()
def table(
    name: Annotated[
        str, typer.Argument(callback=one_of(TABLES), help=f"One of {', '.join(TABLES)}.")
    ],
    processes: Processes = CORES,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run one of the published tables."""
    carry_out(TABLES[name](""), processes, out, as_json=as_json)


@command()
def folds(
    seeds: Annotated[
        int,
        typer.Option(
            min=2, max=len(FOLD_SEEDS), help="Runs per server and load, each with its own seed."
        ),
    ] = len(FOLD_SEEDS),
    traces: Traces = TRACES,
    processes: Processes = CORES,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Compare the default policy with all others, on machines, jobs and seeds not used for
    tuning."""
    study = catalogue.folds(str(traces / SESSIONS), FOLD_SEEDS[:seeds])
    carry_out(study, processes, out, as_json=as_json)


@command()
def study(
    name: Annotated[
        str, typer.Argument(callback=one_of(STUDIES), help=f"One of {', '.join(STUDIES)}.")
    ],
    traces: Traces = TRACES,
    processes: Processes = CORES,
    out: Out = OUT,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the figures. Defaults to the run folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a study of one question, such as the value of a tier or the effect of a limit."""
    asked = STUDIES[name](str(traces / SESSIONS))
    carry_out(asked, processes, out, as_json=as_json, draw_to=to or out)


@command()
def run(
    workload: Annotated[str, typer.Option(help=f"One of {WORKLOAD_NAMES}.")] = "original",
    policy: Annotated[str, typer.Option(help=f"One of {POLICY_NAMES}.")] = "occupancy",
    jobs_per_s: Annotated[float, typer.Option(help="Job arrivals per second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed of jobs and arrivals.")] = 0,
    jobs: Jobs = 50,
    gpu: Gpu = "rtx4090-24",
    model: Model = "llama-3.1-8b",
    ranks: Ranks = 1,
    cpu_gib: CpuGib = 64.0,
    ssd_gib: SsdGib = 512.0,
    traces: Traces = TRACES,
    as_json: AsJson = False,
) -> None:
    """Simulate a single run of one server, in this process."""
    with only_result_on_stdout():
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        place = Place(gpu, model, ranks, None, cpu_gib, ssd_gib)
        summary = Cell.of(place, _source(workload, jobs, traces), policy, jobs_per_s, seed).run()
    _print(summary, as_json=as_json)


@command()
def validate(
    traces: Traces = TRACES,
    out: Out = OUT,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the real runs in --out.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Validate against closed forms and a real server. Exits with 1 if the simulator disagrees."""
    with only_result_on_stdout():
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from tiered_kv.bench.sim.validate import validate

        result = validate(traces, out, _tell, resume=resume)
    _print(result, as_json=as_json)
    return int(result["mean_error"] > 0.15 or not (result["order_equal"] and result["conserved"]))


@command("plot")
def draw(
    to: Annotated[
        Path | None,
        typer.Option(help="Folder for the figures. Defaults to the run folder."),
    ] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Draw the last result as PNG and SVG."""
    paths = [str(path) for path in plot(_last_result(out), to or out)]
    print(json.dumps({"files": paths}) if as_json else "\n".join(paths))


@command("report")
def write_report(out: Out = OUT, as_json: AsJson = False) -> None:
    """Print the last result as Markdown."""
    text = report(_last_result(out))
    print(json.dumps({"markdown": text}) if as_json else text, end="")


def carry_out(
    study: Study, processes: int, out: Path, *, as_json: bool, draw_to: Path | None = None
) -> None:
    """Run a study, and store and print its result.

    Args:
        draw_to: folder of the drawing; None draws nothing.
    """
    with progress() as bar, only_result_on_stdout():
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("runs", total=study.total_runs)

        def tell(what: str) -> None:
            bar.update(task, description=what)
            if bar.disable:
                _tell(what)

        with running(processes, out / "cells", lambda _: bar.advance(task)) as bench:
            result = run_study(study, bench, tell)
    (out / RESULT).write_text(json.dumps(result))
    paths = [] if draw_to is None else plot(result, draw_to)
    if as_json:
        print_json(result)
        return
    print(report(result), *paths, sep="\n" if paths else "")
    if "scenes" in result:
        print(f"The runs are in {out}. To draw them: python -m bench.sim plot --out {out}")


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _source(name: str, jobs: int, traces: Path) -> Source:
    return Source(name, jobs, str(traces / SESSIONS) if name == CODING_AGENTS else "")


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        Console().print_json(data=result)


def _last_result(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    except OSError as error:
        raise ValueError(f"{folder} contains no result: run a study first ({error})") from error
    return found


if __name__ == "__main__":
    app()
