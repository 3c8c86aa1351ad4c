"""Agent jobs on simulated GPUs, under vLLM's own scheduler.

python -m bench.sim table scheduling
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.common.output import only_result_on_stdout, progress, run_command, show
from bench.common.paths import ROOT
from bench.common.sessions import recording
from bench.replay.failures import FAILURES
from bench.sim.engine.machines import GPUS, MODELS
from bench.sim.servers.servers import BASES, server
from bench.sim.study.cells import CODING_AGENTS, Bench, Cell, Place, Source
from bench.sim.study.plot import plot
from bench.sim.study.presets import LOADS, PRESETS, TABLES, WITH_OFFLOAD, WITHOUT_OFFLOAD
from bench.sim.study.report import report
from bench.sim.study.study import Study, run_study, total_cells
from bench.sim.workloads.generate import GENERATED

OUT = ROOT / ".sim"
TRACES = Path("../shared/traces")
SESSIONS = "claude_code_sessions.jsonl.gz"
RESULT = "result.json"


def carry_out(args: argparse.Namespace, study: Study) -> int:
    """Run a study, keep and print its result."""
    with progress() as bar:
        bar.disable = args.json or not sys.stderr.isatty()
        result = run_all(study, args, bar)
    (args.out / RESULT).write_text(json.dumps(result))
    if args.json:
        print(json.dumps(result))
    else:
        print(report(result), end="")
        print(f"\nruns in {args.out}; draw them with: python -m bench.sim plot --out {args.out}")
    return 0


def run_all(study: Study, args: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    """Run a study; each run counts on the bar."""
    task = bar.add_task("runs", total=total_cells(study))

    def tell(what: str) -> None:
        bar.update(task, description=what)
        if bar.disable:
            print(what, file=sys.stderr, flush=True)

    with Bench(args.processes, args.out / "cells", lambda _: bar.advance(task)) as bench:
        return run_study(study, bench, tell)


def sweep(args: argparse.Namespace) -> int:
    """A study as the command line asks for it, or the preset."""
    if args.preset is not None:
        return carry_out(args, PRESETS[args.preset](str(_sessions(args))))
    servers = tuple(server(name).name for name in args.policies.split(","))
    scenes = tuple((_place(args), _source(name, args)) for name in args.workloads.split(","))
    loads = tuple(float(load) for load in args.loads.split(","))
    return carry_out(args, Study(scenes, (servers,) * len(scenes), loads, args.seeds))


def _place(args: argparse.Namespace) -> Place:
    tiers = {"cpu_gib": args.cpu_gib, "ssd_gib": args.ssd_gib}
    made = Place(args.gpu, args.model, args.ranks, args.pool_tokens, **tiers)
    made.machine()  # says what is wrong with it before anything runs
    return made


def _source(name: str, args: argparse.Namespace) -> Source:
    return Source(name, args.jobs, str(_sessions(args)) if name == CODING_AGENTS else "")


def _sessions(args: argparse.Namespace) -> Path:
    folder: Path = args.traces
    return folder / SESSIONS


def table(args: argparse.Namespace) -> int:
    """One of the published tables."""
    return carry_out(args, TABLES[args.name]())


def validate(args: argparse.Namespace) -> int:
    """0 if the simulator can be believed."""
    with only_result_on_stdout():
        result = _validate(args)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print_json(data=result)
    good = result["mean_error"] <= 0.15 and result["order_equal"] and result["conserved"]
    return 0 if good else 1


def _validate(args: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import bench.sim.validate.validity as validity
    from bench.sim.validate.real import compare

    def tell(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    tell("closed forms")
    lost = validity.not_conserved()
    forms = {
        "job_alone_error": validity.job_alone_error(),
        "saturated_link_error": validity.saturated_link_error(),
    }
    fitted, compared = compare(
        recording(args.traces, "miniswe"), args.out, tell, resume=args.resume
    )
    pairs = [(one.real_s, one.simulated_s) for one in compared]
    return {
        "mean_error": max(abs(one.error) for one in compared),  # of means, the worst
        "order_equal": validity.equal_orders(pairs),
        "conserved": not lost,
        **forms,
        "lost": lost,
        "servers": [{**asdict(one), "error": one.error} for one in compared],
        "cost": asdict(fitted.cost),
        "overhead_s": fitted.overhead_s,
    }


def draw(args: argparse.Namespace) -> int:
    """Draw the result of a study."""
    paths = plot(_result(args.out)["rows"], args.to or args.out)
    print(
        json.dumps({"files": [str(p) for p in paths]}) if args.json else "\n".join(map(str, paths))
    )
    return 0


def write_report(args: argparse.Namespace) -> int:
    """Print the result of a study as Markdown."""
    said = report(_result(args.out))
    print(json.dumps({"markdown": said}) if args.json else said, end="")
    return 0


def time_held(args: argparse.Namespace) -> int:
    """What a scheduler step costs while many jobs are held."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from bench.sim.validate.held_cost import Crowd, measure

    with only_result_on_stdout():
        result = measure(Crowd())
    show("Time of a scheduler step with held jobs over none", result, args.json)
    return 0


def run_one(args: argparse.Namespace) -> int:
    """A single run, in this process."""
    with only_result_on_stdout():
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        source = _source(args.workload, args)
        cell = Cell.of(_place(args), source, args.policy, args.jobs_per_s, args.seed)
        summary = cell.run()
    if args.json:
        print(json.dumps(summary))
    else:
        Console().print_json(data=summary)
    return 0


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"no result in {folder}: run sweep or table first ({error})") from error
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits on errors and --help."""
    top = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    default = "(%(default)s)"
    policies = f"of {', '.join(BASES)} or module:Class; then +cpu or +cpu+ssd, then @RULE {default}"
    workloads = f"of {', '.join(GENERATED)} and {CODING_AGENTS} {default}"
    compared = ",".join(WITHOUT_OFFLOAD + WITH_OFFLOAD)
    loads = f"shares of the load at which FCFS collapses {default}"

    swept = commands.add_parser("sweep", help="policies under loads on a machine")
    swept.set_defaults(run=sweep)
    swept.add_argument("--preset", choices=PRESETS, help="every machine and model instead")
    swept.add_argument("--workloads", default="original", help=workloads)
    swept.add_argument("--policies", default=compared, help=policies)
    swept.add_argument("--loads", default=",".join(map(str, LOADS)), help=loads)
    swept.add_argument("--seeds", type=int, default=5, help=default)
    swept.add_argument("--pool-tokens", type=int, help="of the KV pool (what the weights leave)")
    swept.add_argument("--jobs", type=int, default=150, help=f"of a run {default}")

    told = commands.add_parser("table", help="a published table")
    told.set_defaults(run=table, traces=TRACES)
    told.add_argument("name", choices=TABLES)

    single = commands.add_parser("run", help="a single run")
    single.set_defaults(run=run_one, pool_tokens=None)
    single.add_argument("--workload", default="original", help=workloads)
    single.add_argument("--policy", default="occupancy", help=policies)
    single.add_argument("--jobs-per-s", type=float, default=1.0, help=default)
    single.add_argument("--seed", type=int, default=0, help=default)
    single.add_argument("--jobs", type=int, default=50, help=default)

    for command in (swept, single):
        command.add_argument("--gpu", default="rtx4090-24", choices=GPUS, help=default)
        command.add_argument("--model", default="llama-3.1-8b", choices=MODELS, help=default)
        command.add_argument("--ranks", type=int, default=1, help=f"GPUs {default}")
        command.add_argument("--cpu-gib", type=float, default=64.0, help=f"of the tier {default}")
        command.add_argument("--ssd-gib", type=float, default=512.0, help=f"of the tier {default}")

    believed = commands.add_parser("validate", help="against closed forms and a real server")
    believed.set_defaults(run=validate)
    believed.add_argument("--resume", action="store_true", help="go on from the real runs in --out")

    timed = commands.add_parser("held", help="the time of a scheduler step with 400 held jobs")
    timed.set_defaults(run=time_held)

    drawn = commands.add_parser("plot", help="draw a result as PNG and SVG")
    drawn.set_defaults(run=draw)
    drawn.add_argument("--to", type=Path, help="folder of the drawings (that of the result)")
    written = commands.add_parser("report", help="a result as Markdown")
    written.set_defaults(run=write_report)

    for command in (swept, single, believed):
        command.add_argument("--traces", type=Path, default=TRACES, help=f"folder {default}")
    for command in (swept, told):
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1, help=default)
    for command in (swept, told, believed, drawn, written):
        what = f"folder of the runs; those that are there are not made again {default}"
        command.add_argument("--out", type=Path, default=OUT, help=what)
    for command in (swept, told, single, believed, timed, drawn, written):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return top.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 1 on a failure that the message on standard error explains."""
    args = parse_args(argv)
    return run_command(
        lambda: args.run(args),
        FAILURES,
        "stopped; the runs that ended are kept",
        signals=(signal.SIGTERM,),  # a study in the background outlives a Ctrl-C
    )


if __name__ == "__main__":
    sys.exit(main())
