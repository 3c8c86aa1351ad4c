"""Agent jobs replayed on real servers: ``ab`` measures, ``plot`` draws, ``verify-pin`` checks.

python -m bench.replay ab --preset cpu
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.common.model import small_model
from bench.common.output import progress, run_command
from bench.common.paths import ROOT
from bench.common.server import machine_dtype
from bench.replay.play.drive import Hints
from tiered_kv.errors import ConfigError
from tiered_kv.policies import registry

from . import figures
from .ab import PRESETS, Harness, Preset, digest, total_runs, unequal
from .failures import FAILURES
from .jobs import Job, mini_swe_jobs, synthetic_jobs
from .kinds import make_kinds, size_for
from .ledger import Kept, Ledger, read_runs
from .measure import Replay, Workload, versions
from .names import BEYOND, BOUND, IDLE, PRESSURE, STOCK, TIERED
from .plot import plot
from .verify_pin import verify

OUT = ROOT / ".replay"
TRACES = Path("../shared/traces/miniswe.jsonl.gz")
LOADS = (IDLE, PRESSURE, BEYOND)
SERVERS = (STOCK, TIERED, BOUND)
SYNTHETIC_VOCABULARY = 40_000
"""Ids that every model of interest knows."""


def summary(
    kept: Sequence[Kept], not_started: Mapping[str, str], *, forced: bool
) -> dict[str, Any]:
    """What ``ab --json`` prints. Times in seconds; None stands for what was not measured."""
    runs = [one.run for one in kept]
    idle = figures.idle_ratio(runs)
    said = {
        "rows": [asdict(row) for row in figures.rows(runs, forced=forced)],
        "closed_mean": figures.closed(runs),
        "closed_p95": figures.closed(runs, 95),
        "idle_ratio": idle.ratio if idle else None,
        "idle_interval": [idle.low, idle.high] if idle else None,
        "not_started": dict(not_started),
        "notes": unequal(kept),
        "versions": dict(runs[-1].versions) if runs else {},
    }
    return {key: _no_nan(value) for key, value in said.items()}


def _no_nan(value: Any) -> Any:
    """JSON has no NaN: a mean over nothing is None."""
    if isinstance(value, dict):
        return {key: _no_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def table(result: Mapping[str, Any]) -> Table:
    """The rows of ``summary``, as many columns as a terminal holds."""
    shown = Table(
        title="Agent jobs on real servers",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("load", "server"):
        shown.add_column(name, no_wrap=True)
    for name in ("jobs", "mean s", "P50", "P95", "P99", "TTFT s", "again", "agrees"):
        shown.add_column(name, justify="right")
    last = None
    for row in result["rows"]:
        if last not in (None, row["load"]):
            shown.add_section()
        last = row["load"]
        total = row["jobs"] + len(row["unfinished"])
        verdict = {True: "yes", False: "NO", None: "-"}[row["agrees"]]
        shown.add_row(
            row["load"],
            row["server"],
            f"{row['jobs']}/{total}",
            *(_number(row[key]) for key in ("mean_s", "p50_s", "p95_s", "p99_s", "ttft_s")),
            f"{row['recomputed_fraction']:.3f}",
            verdict,
        )
    return shown


def lines(result: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    found = ["again: share of the prompt tokens computed once more; agrees: outputs with stock's"]
    for key, name in (("closed_mean", "mean"), ("closed_p95", "P95")):
        if result[key] is not None:
            share = result[key]
            found.append(f"of the gap between stock and the bound, {share:.2f} is closed ({name})")
    if result["idle_ratio"] is not None:
        low, high = result["idle_interval"]
        ratio = result["idle_ratio"]
        found.append(
            f"at idle, time over stock's: {ratio:.3f}, 95% interval {low:.3f} to {high:.3f}"
        )
    for row in result["rows"]:
        if row["unfinished"]:
            names = ", ".join(row["unfinished"])
            found.append(f"{row['server']} under {row['load']} did not finish {names}")
    found += [f"{name} does not serve here: {why}" for name, why in result["not_started"].items()]
    return found + [f"NOT EVENLY MEASURED: {note}" for note in result["notes"]]


def make_jobs(args: argparse.Namespace, preset: Preset, model: str | Path) -> list[Job]:
    """The jobs that the command line asks for."""
    if args.synthetic:
        return synthetic_jobs(count=preset.jobs, seed=args.seed, vocabulary=SYNTHETIC_VOCABULARY)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return mini_swe_jobs(
        args.traces, tokenizer, count=preset.jobs, turns=preset.turns, seed=args.seed
    )


def ab(args: argparse.Namespace) -> int:
    """Measure; 0 at its end, 130 when stopped, with what was measured until then."""
    preset = PRESETS[args.preset]
    model = args.model or small_model()
    jobs = make_jobs(args, preset, model)
    contexts = [sum(len(turn.added) + len(turn.answer) for turn in job.turns) for job in jobs]
    forced = not args.free
    kinds = make_kinds(
        model,
        size_for(contexts, preset.pool_tokens),
        policies=args.policy,
        ssd=args.ssd,
        forced=forced,
        alone=args.alone,
    )
    workload = Workload(tuple(jobs), preset.idle_jobs, args.seed, args.hints, forced)
    plan = {
        "jobs": digest(jobs),
        "preset": asdict(preset),
        "seed": args.seed,
        "hints": args.hints.value,
        "forced": forced,
        "alone": args.alone,
        "model": str(model),
        "versions": versions(),
    }
    ledger = Ledger(args.out, plan, resume=args.resume)
    stopped = False
    with progress() as bar:
        bar.disable = args.json or not sys.stderr.isatty()
        runs = bar.add_task("runs", total=total_runs(kinds, preset))
        turns = bar.add_task("turns of this run", total=sum(len(job.turns) for job in jobs))

        def tell(what: str) -> None:
            bar.update(runs, completed=len(harness.kept), description=what)
            bar.reset(turns)
            if bar.disable:
                print(what, file=sys.stderr, flush=True)

        replay = Replay(workload, args.out, on_turn=lambda: bar.advance(turns))
        harness = Harness(kinds, preset, replay, ledger, tell)
        try:
            harness.run_all()
        except KeyboardInterrupt:
            stopped = True
    result = summary(harness.kept, harness.not_started, forced=forced)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(table(result))
        for line in lines(result):
            print(f"- {line}")
        print(f"- every server computed in {machine_dtype()}")
        print(f"- runs and logs in {args.out}")
    if stopped:
        print("stopped; --resume goes on from here, no server is left", file=sys.stderr)
    return 130 if stopped else 0


def draw(args: argparse.Namespace) -> int:
    """Draw the runs of a folder."""
    runs = [kept.run for kept in read_runs(args.out)]
    runs.sort(key=lambda run: (_place(run.load, LOADS), _place(run.server, SERVERS)))
    paths = plot(figures.rows(runs, forced=False), args.to or args.out)
    if args.json:
        print(json.dumps({"files": [str(path) for path in paths]}))
    else:
        print(*paths, sep="\n")
    return 0


def check_pin(args: argparse.Namespace) -> int:
    """0 if the pin holds, 1 if not."""
    verdict = verify(args.model or small_model(), args.policy)
    held = [gap.first for gap in verdict.gaps]
    if args.json:
        said = {"holds": not verdict.faults, "held_blocks": held, "faults": verdict.faults}
        print(json.dumps({**said, "handed_over": verdict.handed_over}))
    else:
        for turn, blocks in enumerate(held, start=1):
            print(f"turn {turn}: {blocks} blocks held through the gap")
        print(f"the server computed in {machine_dtype()}")
        print("the pin holds" if not verdict.faults else "\n".join(verdict.faults))
    return 1 if verdict.faults else 0


def policy(name: str) -> str:
    """Check a policy's name; a word of the command line."""
    try:
        registry.policy(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits on errors and --help."""
    top = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    known = f"{', '.join(registry.POLICIES)} or module:Class"

    measure = commands.add_parser("ab", help="the same jobs on every kind of server")
    measure.set_defaults(run=ab)
    measure.add_argument("--preset", choices=PRESETS, default="cpu", help="(%(default)s)")
    measure.add_argument("--traces", type=Path, default=TRACES, help="sessions (%(default)s)")
    measure.add_argument("--synthetic", action="store_true", help="Continuum's jobs instead")
    measure.add_argument("--model", help="folder or name of another model than the small one")
    measure.add_argument(
        "--policy", action="append", default=[], type=policy, help=f"a further one: {known}"
    )
    measure.add_argument("--ssd", action="store_true", help="ours with an SSD tier as well")
    measure.add_argument("--alone", action="store_true", help="ours under vLLM's own scheduler")
    measure.add_argument(
        "--hints",
        type=Hints,
        choices=list(Hints),
        default=Hints.KV_PARAMS,
        metavar="{" + ",".join(hint.value for hint in Hints) + "}",
        help="how a job is named to the server (kv-params)",
    )
    measure.add_argument("--free", action="store_true", help="the model speaks for itself")
    measure.add_argument("--seed", type=int, default=0, help="of jobs, arrivals (%(default)s)")
    measure.add_argument("--resume", action="store_true", help="go on from the runs in --out")

    drawn = commands.add_parser("plot", help="draw the runs of a folder as PNG and SVG")
    drawn.set_defaults(run=draw)
    drawn.add_argument("--to", type=Path, help="folder of the drawings (that of the runs)")
    for command in (measure, drawn):
        command.add_argument("--out", type=Path, default=OUT, help="folder of the runs")

    pin = commands.add_parser("verify-pin", help="exit 1 unless a job's blocks stay in its gaps")
    pin.set_defaults(run=check_pin)
    pin.add_argument("--model", help="folder or name of another model than the small one")
    pin.add_argument("--policy", type=policy, help=f"another than the default: {known}")

    for command in (measure, drawn, pin):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return top.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 1 on a failure that the message on standard error explains."""
    args = parse_args(argv)
    return run_command(lambda: args.run(args), FAILURES, "stopped; no server is left running")


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
