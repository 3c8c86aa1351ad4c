"""Agent jobs on simulated GPUs, under vLLM's own scheduler.

python -m bench.sim table scheduling
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tiered_kv.bench.agents.sessions import recording
from tiered_kv.bench.output import (
    AsJson,
    command_line,
    one_of,
    only_result_on_stdout,
    progress,
    run_command,
    show,
)
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.bench.sim.servers.servers import BASES, server
from tiered_kv.bench.sim.studies.bars import draw_bars
from tiered_kv.bench.sim.studies.catalogue import STUDIES
from tiered_kv.bench.sim.studies.comparison import markdown, run_comparison
from tiered_kv.bench.sim.study.cells import CODING_AGENTS, Bench, Cell, Place, Source
from tiered_kv.bench.sim.study.folds import SEEDS, every_fold, run_folds
from tiered_kv.bench.sim.study.plot import plot
from tiered_kv.bench.sim.study.presets import LOADS, PRESETS, TABLES, WITH_OFFLOAD, WITHOUT_OFFLOAD
from tiered_kv.bench.sim.study.report import report
from tiered_kv.bench.sim.study.study import Study, run_study, total_cells
from tiered_kv.bench.sim.workloads.generate import GENERATED
from tiered_kv.sizing.step_cost import GPUS

OUT = ROOT / ".sim"
TRACES = Path("../shared/traces")
SESSIONS = "claude_code_sessions.jsonl.gz"
RESULT = "result.json"


app = command_line("Agent jobs on simulated GPUs, under vLLM's own scheduler.")

POLICY_NAMES = f"{', '.join(BASES)} or module:Class; then +cpu or +cpu+ssd, then @RULE"
WORKLOAD_NAMES = f"{', '.join(GENERATED)} and {CODING_AGENTS}"

Gpu = Annotated[str, typer.Option(callback=one_of(GPUS), help=f"One of {', '.join(GPUS)}.")]
Model = Annotated[str, typer.Option(callback=one_of(MODELS), help=f"One of {', '.join(MODELS)}.")]
Ranks = Annotated[int, typer.Option(help="GPUs.")]
CpuGib = Annotated[float, typer.Option(help="Size of the CPU tier, GiB.")]
SsdGib = Annotated[float, typer.Option(help="Size of the SSD tier, GiB.")]
Jobs = Annotated[int, typer.Option(help="Jobs of a run.")]
Traces = Annotated[Path, typer.Option(help="Folder of recordings.")]
Processes = Annotated[int, typer.Option(help="Runs at the same time.")]
Out = Annotated[
    Path, typer.Option(help="Folder of the runs. Those that are there are not made again.")
]
CORES = os.cpu_count() or 1


def finish(command: Callable[[], int]) -> None:
    """Carry a command out.

    Raises:
        typer.Exit: always, with 1 on a failure that the message on standard error explains.
    """
    # A study in the background outlives a Ctrl-C.
    stopped = "stopped; the runs that ended are kept"
    raise typer.Exit(run_command(command, FAILURES, stopped, signals=(signal.SIGTERM,)))


@app.command()
def sweep(
    preset: Annotated[
        str | None,
        typer.Option(
            callback=one_of(PRESETS),
            help=f"Machines and models of a preset instead: {', '.join(PRESETS)}.",
        ),
    ] = None,
    workloads: Annotated[str, typer.Option(help=f"Of {WORKLOAD_NAMES}.")] = "original",
    policies: Annotated[str, typer.Option(help=f"Of {POLICY_NAMES}.")] = ",".join(
        WITHOUT_OFFLOAD + WITH_OFFLOAD
    ),
    loads: Annotated[
        str, typer.Option(help="Shares of the load at which FCFS collapses.")
    ] = ",".join(map(str, LOADS)),
    seeds: Annotated[int, typer.Option(help="Runs of a cell, each with a seed.")] = 5,
    pool_tokens: Annotated[
        int | None, typer.Option(help="Size of the KV pool; what the weights leave if none.")
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
    """Run policies under loads on a machine."""

    def study() -> Study:
        if preset is not None:
            return PRESETS[preset](str(traces / SESSIONS))
        place = _checked(Place(gpu, model, ranks, pool_tokens, cpu_gib, ssd_gib))
        servers = tuple(server(name).name for name in policies.split(","))
        scenes = tuple((place, _source(name, jobs, traces)) for name in workloads.split(","))
        shares = tuple(float(load) for load in loads.split(","))
        return Study(scenes, (servers,) * len(scenes), shares, seeds)

    finish(lambda: carry_out(study(), processes, out, as_json=as_json))


@app.command()
def table(
    name: Annotated[
        str, typer.Argument(callback=one_of(TABLES), help=f"One of {', '.join(TABLES)}.")
    ],
    processes: Processes = CORES,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run one of the published tables."""
    finish(lambda: carry_out(TABLES[name](), processes, out, as_json=as_json))


@app.command()
def folds(
    seeds: Annotated[
        int, typer.Option(min=2, max=len(SEEDS), help="Runs of a cell, each with a seed.")
    ] = len(SEEDS),
    traces: Traces = TRACES,
    processes: Processes = CORES,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Compare with every other policy on machines, jobs and seeds that nothing was tuned on."""

    def compared() -> int:
        def tell(what: str) -> None:
            print(what, file=sys.stderr, flush=True)

        chosen = SEEDS[:seeds]
        with only_result_on_stdout(), Bench(processes, out / "cells") as bench:
            result = run_folds(every_fold(str(traces / SESSIONS)), bench, tell, chosen)
        _say(result, as_json=as_json)
        return 0

    finish(compared)


@app.command()
def study(
    name: Annotated[
        str, typer.Argument(callback=one_of(STUDIES), help=f"One of {', '.join(STUDIES)}.")
    ],
    traces: Traces = TRACES,
    processes: Processes = CORES,
    out: Out = OUT,
    to: Annotated[
        Path | None, typer.Option(help="Folder of the drawing; that of the runs if none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one question: what a part, a tier, a limit or a machine is worth."""

    def compared() -> int:
        def tell(what: str) -> None:
            print(what, file=sys.stderr, flush=True)

        asked = STUDIES[name](str(traces / SESSIONS))
        with only_result_on_stdout(), Bench(processes, out / "cells") as bench:
            result = run_comparison(asked, bench, tell)
        drawn = draw_bars(result, (to or out) / f"study-{name}")
        if as_json:
            print(json.dumps(result))
        else:
            print(markdown(result), end="")
            print("\n" + "\n".join(map(str, drawn)))
        return 0

    finish(compared)


@app.command()
def run(
    workload: Annotated[str, typer.Option(help=f"Of {WORKLOAD_NAMES}.")] = "original",
    policy: Annotated[str, typer.Option(help=f"Of {POLICY_NAMES}.")] = "occupancy",
    jobs_per_s: Annotated[float, typer.Option(help="Rate of arrivals.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of jobs and arrivals.")] = 0,
    jobs: Jobs = 50,
    gpu: Gpu = "rtx4090-24",
    model: Model = "llama-3.1-8b",
    ranks: Ranks = 1,
    cpu_gib: CpuGib = 64.0,
    ssd_gib: SsdGib = 512.0,
    traces: Traces = TRACES,
    as_json: AsJson = False,
) -> None:
    """Run a single cell, in this process."""

    def simulate() -> int:
        with only_result_on_stdout():
            os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
            source = _source(workload, jobs, traces)
            place = _checked(Place(gpu, model, ranks, None, cpu_gib, ssd_gib))
            summary = Cell.of(place, source, policy, jobs_per_s, seed).run()
        _say(summary, as_json=as_json)
        return 0

    finish(simulate)


@app.command()
def validate(
    traces: Traces = TRACES,
    out: Out = OUT,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the real runs in --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare with closed forms and a real server. Exit with 1 if they disagree."""

    def judge() -> int:
        with only_result_on_stdout():
            result = compared(traces, out, resume=resume)
        _say(result, as_json=as_json)
        good = result["mean_error"] <= 0.15 and result["order_equal"] and result["conserved"]
        return 0 if good else 1

    finish(judge)


@app.command()
def held(as_json: AsJson = False) -> None:
    """Time a scheduler step with 400 held jobs."""

    def measured() -> int:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from tiered_kv.bench.sim.validate.held_cost import Crowd, measure

        with only_result_on_stdout():
            result = measure(Crowd())
        show("Time of a scheduler step with held jobs over none", result, as_json)
        return 0

    finish(measured)


@app.command("plot")
def draw(
    to: Annotated[
        Path | None, typer.Option(help="Folder of the drawings; that of the result if none.")
    ] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Draw a result as PNG and SVG."""

    def drawn() -> int:
        paths = [str(path) for path in plot(_result(out)["rows"], to or out)]
        print(json.dumps({"files": paths}) if as_json else "\n".join(paths))
        return 0

    finish(drawn)


@app.command("report")
def write_report(out: Out = OUT, as_json: AsJson = False) -> None:
    """Print a result as Markdown."""

    def written() -> int:
        said = report(_result(out))
        print(json.dumps({"markdown": said}) if as_json else said, end="")
        return 0

    finish(written)


def carry_out(study: Study, processes: int, out: Path, *, as_json: bool) -> int:
    """Run a study, keep and print its result. Each run counts on a bar. Returns 0."""
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("runs", total=total_cells(study))

        def tell(what: str) -> None:
            bar.update(task, description=what)
            if bar.disable:
                print(what, file=sys.stderr, flush=True)

        with Bench(processes, out / "cells", lambda _: bar.advance(task)) as bench:
            result = run_study(study, bench, tell)
    (out / RESULT).write_text(json.dumps(result))
    if as_json:
        print(json.dumps(result))
    else:
        print(report(result), end="")
        print(f"\nruns in {out}; draw them with: python -m bench.sim plot --out {out}")
    return 0


def compared(traces: Path, out: Path, *, resume: bool) -> dict[str, Any]:
    """Compare the simulator with closed forms and a real server."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import tiered_kv.bench.sim.validate.validity as validity
    from tiered_kv.bench.sim.validate.real import compare

    def tell(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    tell("closed forms")
    lost = validity.not_conserved()
    forms = {
        "job_alone_error": validity.job_alone_error(),
        "saturated_link_error": validity.saturated_link_error(),
    }
    fitted, servers, notes = compare(recording(traces, "miniswe"), out, tell, resume=resume)
    pairs = [(one.real_s, one.simulated_s) for one in servers]
    return {
        "mean_error": max(abs(one.error) for one in servers),  # of means, the worst
        "order_equal": validity.equal_orders(pairs),
        "conserved": not lost,
        **forms,
        "lost": lost,
        "servers": [{**asdict(one), "error": one.error} for one in servers],
        "cost": asdict(fitted.cost),
        "overhead_s": fitted.overhead_s,
        "notes": notes,  # the real runs were not evenly measured
    }


def _checked(place: Place) -> Place:
    place.machine()  # says what is wrong with it before anything runs
    return place


def _source(name: str, jobs: int, traces: Path) -> Source:
    return Source(name, jobs, str(traces / SESSIONS) if name == CODING_AGENTS else "")


def _say(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        Console().print_json(data=result)


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"no result in {folder}: run sweep or table first ({error})") from error
    return found


if __name__ == "__main__":
    app()
