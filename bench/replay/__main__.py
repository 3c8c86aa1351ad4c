"""Agent jobs replayed on real servers: ``ab`` measures, ``plot`` draws, ``verify-pin`` checks.

python -m bench.replay ab --preset cpu
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.bench.common.model import small_model
from tiered_kv.bench.common.output import AsJson, command_line, one_of, progress, run_command
from tiered_kv.bench.common.paths import ROOT
from tiered_kv.bench.common.server import machine_dtype
from tiered_kv.bench.replay import figures
from tiered_kv.bench.replay.ab import PRESETS, Harness, Preset, digest, total_runs, unequal
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.jobs import Job, mini_swe_jobs, synthetic_jobs
from tiered_kv.bench.replay.kinds import make_kinds, size_for
from tiered_kv.bench.replay.ledger import Kept, Ledger, read_runs
from tiered_kv.bench.replay.measure import Replay, Workload, versions
from tiered_kv.bench.replay.names import BEYOND, BOUND, IDLE, PRESSURE, STOCK, TIERED
from tiered_kv.bench.replay.play.drive import Hints
from tiered_kv.bench.replay.plot import plot
from tiered_kv.bench.replay.verify_pin import verify
from tiered_kv.errors import ConfigError
from tiered_kv.policies import registry

OUT = ROOT / ".replay"
TRACES = Path("../shared/traces/miniswe.jsonl.gz")
LOADS = (IDLE, PRESSURE, BEYOND)
SERVERS = (STOCK, TIERED, BOUND)
SYNTHETIC_VOCABULARY = 40_000
"""Ids that every model of interest knows."""


KNOWN = f"{', '.join(registry.POLICIES)} or module:Class"

app = command_line("Agent jobs replayed on real servers.")

Model = Annotated[
    str | None, typer.Option(help="Folder or name of another model than the small one.")
]
Out = Annotated[Path, typer.Option(help="Folder of the runs.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A comparison, as the command line asks for it.

    Attributes:
        preset: name of one of ``PRESETS``.
        policies: further policies of ours, by name.
        free: True if the model speaks for itself.
    """

    preset: str
    traces: Path
    synthetic: bool
    model: str | None
    policies: Sequence[str]
    ssd: bool
    alone: bool
    hints: Hints
    free: bool
    seed: int
    resume: bool
    out: Path
    as_json: bool


def check_policy(said: str | None) -> str | None:
    """Refuse a policy that is not there."""
    if said is not None:
        try:
            registry.policy(said)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
    return said


def check_policies(said: list[str]) -> list[str]:
    """Refuse policies that are not there."""
    for name in said:
        check_policy(name)
    return said


def finish(command: Callable[[], int]) -> None:
    """Carry a command out.

    Raises:
        typer.Exit: always, with 1 on a failure that the message on standard error explains.
    """
    raise typer.Exit(run_command(command, FAILURES, "stopped; no server is left running"))


@app.command()
def ab(
    preset: Annotated[
        str, typer.Option(callback=one_of(PRESETS), help=f"One of {', '.join(PRESETS)}.")
    ] = "cpu",
    traces: Annotated[Path, typer.Option(help="File of sessions.")] = TRACES,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Play Continuum's jobs instead.")
    ] = False,
    model: Model = None,
    policy: Annotated[
        list[str], typer.Option(callback=check_policies, help=f"A further policy: {KNOWN}.")
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    ssd: Annotated[bool, typer.Option("--ssd", help="Give ours an SSD tier as well.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Run ours under vLLM's own scheduler.")
    ] = False,
    hints: Annotated[
        Hints, typer.Option(help="How a job is named to the server.")
    ] = Hints.KV_PARAMS,
    free: Annotated[bool, typer.Option("--free", help="Let the model speak for itself.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of jobs and arrivals.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the runs in --out.")] = False,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Measure the same jobs on every kind of server."""
    asked = Asked(
        preset=preset,
        traces=traces,
        synthetic=synthetic,
        model=model,
        policies=policy,
        ssd=ssd,
        alone=alone,
        hints=hints,
        free=free,
        seed=seed,
        resume=resume,
        out=out,
        as_json=as_json,
    )
    finish(lambda: compare(asked))


@app.command("plot")
def draw(
    to: Annotated[
        Path | None, typer.Option(help="Folder of the drawings; that of the runs if none.")
    ] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Draw the runs of a folder as PNG and SVG."""

    def drawn() -> int:
        runs = [kept.run for kept in read_runs(out)]
        runs.sort(key=lambda run: (_place(run.load, LOADS), _place(run.server, SERVERS)))
        paths = [str(path) for path in plot(figures.rows(runs, forced=False), to or out)]
        print(json.dumps({"files": paths}) if as_json else "\n".join(paths))
        return 0

    finish(drawn)


@app.command("verify-pin")
def check_pin(
    model: Model = None,
    policy: Annotated[
        str | None,
        typer.Option(callback=check_policy, help=f"Another policy than the default: {KNOWN}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Exit with 1 unless a job's blocks stay in its gaps."""

    def checked() -> int:
        verdict = verify(model or small_model(), policy)
        held = [gap.first for gap in verdict.gaps]
        if as_json:
            said = {"holds": not verdict.faults, "held_blocks": held, "faults": verdict.faults}
            print(json.dumps({**said, "handed_over": verdict.handed_over}))
        else:
            for turn, blocks in enumerate(held, start=1):
                print(f"turn {turn}: {blocks} blocks held through the gap")
            print(f"the server computed in {machine_dtype()}")
            print("the pin holds" if not verdict.faults else "\n".join(verdict.faults))
        return 1 if verdict.faults else 0

    finish(checked)


def make_jobs(asked: Asked, preset: Preset, model: str | Path) -> list[Job]:
    """Make the jobs that the command line asks for."""
    if asked.synthetic:
        return synthetic_jobs(count=preset.jobs, seed=asked.seed, vocabulary=SYNTHETIC_VOCABULARY)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return mini_swe_jobs(
        asked.traces, tokenizer, count=preset.jobs, turns=preset.turns, seed=asked.seed
    )


def compare(asked: Asked) -> int:
    """Measure. Returns 0 at its end, and 130 when stopped, with the results until then shown."""
    preset = PRESETS[asked.preset]
    model = asked.model or small_model()
    jobs = make_jobs(asked, preset, model)
    contexts = [sum(len(turn.added) + len(turn.answer) for turn in job.turns) for job in jobs]
    forced = not asked.free
    kinds = make_kinds(
        model,
        size_for(contexts, preset.pool_tokens),
        policies=asked.policies,
        ssd=asked.ssd,
        forced=forced,
        alone=asked.alone,
    )
    workload = Workload(tuple(jobs), preset.idle_jobs, asked.seed, asked.hints, forced)
    plan = {
        "jobs": digest(jobs),
        "preset": asdict(preset),
        "seed": asked.seed,
        "hints": asked.hints.value,
        "forced": forced,
        "alone": asked.alone,
        "model": str(model),
        "versions": versions(),
    }
    ledger = Ledger(asked.out, plan, resume=asked.resume)
    stopped = False
    with progress() as bar:
        bar.disable = asked.as_json or not sys.stderr.isatty()
        runs = bar.add_task("runs", total=total_runs(kinds, preset))
        turns = bar.add_task("turns of this run", total=sum(len(job.turns) for job in jobs))

        def tell(what: str) -> None:
            bar.update(runs, completed=len(harness.kept), description=what)
            bar.reset(turns)
            if bar.disable:
                print(what, file=sys.stderr, flush=True)

        replay = Replay(workload, asked.out, on_turn=lambda: bar.advance(turns))
        harness = Harness(kinds, preset, replay, ledger, tell)
        try:
            harness.run_all()
        except KeyboardInterrupt:
            stopped = True
    result = summary(harness.kept, harness.not_started, forced=forced)
    if asked.as_json:
        print(json.dumps(result))
    else:
        Console().print(table(result))
        for line in lines(result):
            print(f"- {line}")
        print(f"- every server computed in {machine_dtype()}")
        print(f"- runs and logs in {asked.out}")
    if stopped:
        print("stopped; --resume goes on from here, no server is left", file=sys.stderr)
    return 130 if stopped else 0


def summary(
    kept: Sequence[Kept], not_started: Mapping[str, str], *, forced: bool
) -> dict[str, Any]:
    """Result as ``ab --json`` prints it. Times in seconds; None if not measured."""
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
    """Lines below the table."""
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


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    app()
