"""Agents' jobs played on servers that run already, ours or not, over their OpenAI-compatible API.

python -m bench.live --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --jps 0.5
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from tiered_kv.bench.agents.run_files import RunFileError, RunFiles, differing, read_plan
from tiered_kv.bench.live.chat_client import Api
from tiered_kv.bench.live.live_figures import live_pairs, live_rows
from tiered_kv.bench.live.live_jobs import load_jobs
from tiered_kv.bench.live.live_load import Arriving, Load
from tiered_kv.bench.live.live_plot import plot_sweeps
from tiered_kv.bench.live.live_report import lines, table
from tiered_kv.bench.live.live_rounds import Rounds, read_live_runs
from tiered_kv.bench.live.live_run import LiveRun
from tiered_kv.bench.live.server_page import ServerPageError
from tiered_kv.bench.live.targets import Target
from tiered_kv.bench.live.workload_statistics import (
    statistics_lines,
    statistics_table,
    workload_statistics,
)
from tiered_kv.bench.output import (
    AsJson,
    command_line,
    progress,
    run_command,
    without_nan,
)
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.ab import digest
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.play.drive import Hints
from tiered_kv.bench.replay.verify_pin import verify_running
from tiered_kv.bench.sim.workloads.generate import GENERATED
from tiered_kv.doctor.running_server import UnreachableError, base_of

OUT = ROOT / ".bench"
API_KEY = "OPENAI_API_KEY"
STOPPED = "stopped; --resume goes on from here"

app = command_line("Agents' jobs played on running servers, ours or not.")

Out = Annotated[Path, typer.Option(help="Folder of the runs.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A measurement, as the command line asks for it."""

    targets: tuple[Target, ...]
    loads: tuple[Load, ...]
    workload: str
    jobs: int
    turns: int | None
    scale: float
    longest: int | None
    rounds: int
    seed: int
    resume: bool
    out: Path
    as_json: bool


def finish(command: Callable[[], int]) -> None:
    """Carry a command out.

    Raises:
        typer.Exit: always, with 1 on a failure that the message on standard error explains.
    """
    failures = (*FAILURES, ServerPageError, UnreachableError)
    raise typer.Exit(run_command(command, failures, STOPPED))


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    url: Annotated[
        list[str], typer.Option(help="Address of a server; once for each that is compared.")
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    name: Annotated[
        list[str], typer.Option(help="Name of a server in the results, in the order of --url.")
    ] = [],  # noqa: B006
    workload: Annotated[
        str, typer.Option(help=f"One of {', '.join(GENERATED)}, or the path of a recording.")
    ] = "original",
    jps: Annotated[
        list[float], typer.Option(min=1e-6, help="Jobs that arrive a second; more for a sweep.")
    ] = [],  # noqa: B006
    sessions: Annotated[
        list[int], typer.Option(min=1, help="Jobs that are live at once; more for a sweep.")
    ] = [],  # noqa: B006
    duration: Annotated[
        float, typer.Option(min=0.1, help="Seconds of a run for which jobs begin.")
    ] = 300.0,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Turns of a job at most; all if none.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of a load on a server.")] = 6,
    jobs: Annotated[int, typer.Option(min=1, help="Generated jobs, before they come again.")] = 200,
    scale: Annotated[
        float, typer.Option(min=1e-4, help="Factor of all sizes; below 1 for small contexts.")
    ] = 1.0,
    longest: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of a context; as the server says if none."),
    ] = None,
    api: Annotated[Api, typer.Option(help="Route that is asked.")] = Api.CHAT,
    hints: Annotated[
        Hints, typer.Option(help="How a job is named to the server.")
    ] = Hints.KV_PARAMS,
    plain: Annotated[
        bool, typer.Option("--plain", help="Send only what OpenAI's own API knows.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; the servers' only one if none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of jobs and arrivals.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the runs in --out.")] = False,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Play the same jobs on every server in turn. A key is read from OPENAI_API_KEY."""
    if context.invoked_subcommand is not None:
        return
    if not url:
        raise typer.BadParameter("write the address of a running server", param_hint="--url")
    if len(name) > len(url):
        raise typer.BadParameter(f"{len(name)} names, but {len(url)} servers", param_hint="--name")
    if bool(jps) == bool(sessions):
        raise typer.BadParameter("write either --jps or --sessions", param_hint="--jps")
    loads = [Load(Arriving.JPS, level, duration) for level in jps]
    loads += [Load(Arriving.SESSIONS, level, duration) for level in sessions]

    def measured() -> int:
        common = (model, api, hints, plain, os.environ.get(API_KEY) or "none")
        bases = [base_of(one) for one in url]
        targets = tuple(
            Target(called, base, *common)
            for called, base in zip(_names(bases, name), bases, strict=True)
        )
        return measure(
            Asked(
                targets=targets,
                loads=tuple(dict.fromkeys(loads)),
                workload=workload,
                jobs=jobs,
                turns=turns,
                scale=scale,
                longest=longest,
                rounds=rounds,
                seed=seed,
                resume=resume,
                out=out,
                as_json=as_json,
            )
        )

    finish(measured)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(help="Folder of runs.")],
    other: Annotated[Path, typer.Argument(help="Another, of the same jobs and loads.")],
    as_json: AsJson = False,
) -> None:
    """Compare two measurements in pairs. The first is what the other is told against."""

    def compared() -> int:
        if one.resolve() == other.resolve():
            raise RunFileError(f"{one} and {other} are one folder: name two measurements")
        plans = [read_plan(folder) for folder in (one, other)]
        unlike = differing(*plans)
        if unlike:
            raise RunFileError(
                f"{one} and {other} cannot be compared: their {', '.join(unlike)} differ"
            )
        show([run for folder in (one, other) for run in _told_by_folder(folder)], {}, as_json)
        return 0

    finish(compared)


@app.command("plot")
def draw(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder of the drawings; the first of the runs if none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a sweep as PNG and SVG: over arrival rates, or over live sessions."""

    def drawn() -> int:
        read = read_live_runs if len(folders) == 1 else _told_by_folder
        rows = live_rows([run for folder in folders for run in read(folder)])
        paths = [str(path) for path in plot_sweeps(rows, to or folders[0])]
        print(json.dumps({"files": paths}) if as_json else "\n".join(paths))
        return 0

    finish(drawn)


@app.command()
def statistics(
    workload: Annotated[
        str, typer.Argument(help=f"A recording, or one of {', '.join(GENERATED)}.")
    ],
    jobs: Annotated[int, typer.Option(min=1, help="How many, of a generated workload.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of a generated workload.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Tell the turns, tokens, gaps and tools of a workload."""

    def told() -> int:
        found = workload_statistics(load_jobs(workload, count=jobs, seed=seed))
        if as_json:
            print(json.dumps(found))
            return 0
        Console().print(statistics_table(found))
        for line in statistics_lines(found):
            print(f"- {line}")
        return 0

    finish(told)


@app.command("verify-pin")
def check_pin(
    url: Annotated[str, typer.Option(help="Address of a server that serves nobody else.")],
    as_json: AsJson = False,
) -> None:
    """Exit with 1 unless a job's blocks stay in VRAM while its tool runs."""

    def checked() -> int:
        verdict = verify_running(base_of(url))
        print(json.dumps(verdict.as_json()) if as_json else "\n".join(verdict.lines()))
        return 1 if verdict.faults else 0

    finish(checked)


def measure(asked: Asked) -> int:
    """Measure. Returns 0 at its end, and 130 when stopped, with the results until then shown."""
    jobs = load_jobs(asked.workload, count=asked.jobs, seed=asked.seed)
    first = asked.targets[0]
    plan = {
        "workload": jobs.name,
        "jobs": digest(jobs.jobs),
        "turns": asked.turns,
        "scale": asked.scale,
        "longest": asked.longest,
        "seconds": asked.loads[0].seconds,
        "seed": asked.seed,
        "api": first.api.value,
        "hints": first.hints.value,
        "plain": first.plain,
    }
    files = RunFiles(asked.out, plan, resume=asked.resume)
    stopped = False
    with progress() as bar:
        bar.disable = asked.as_json or not sys.stderr.isatty()
        task = bar.add_task("the servers' sizes", total=1)
        what, turns = "", 0

        def tell(run: str) -> None:
            nonlocal what, turns
            what, turns = run, 0
            bar.update(task, completed=len(measuring.runs), total=measuring.total, description=run)
            if bar.disable:
                print(run, file=sys.stderr, flush=True)

        def on_turn() -> None:
            nonlocal turns
            turns += 1
            bar.update(task, description=f"{what}: {turns} turns")

        measuring = Rounds(
            asked.targets,
            asked.loads,
            jobs,
            rounds=asked.rounds,
            seed=asked.seed,
            scale=asked.scale,
            turns=asked.turns,
            longest=asked.longest,
            files=files,
            tell=tell,
            on_turn=on_turn,
        )
        try:
            measuring.prepare()
            measuring.run_all()
        except KeyboardInterrupt:
            stopped = True
    left_out = {reason: asdict(found) for reason, found in measuring.jobs.left_out.items()}
    show(measuring.runs, left_out, asked.as_json)
    if stopped:
        print(STOPPED, file=sys.stderr)
    return 130 if stopped else 0


def show(runs: Sequence[LiveRun], left_out: dict[str, Any], as_json: bool) -> None:
    """Print the figures of runs on standard output."""
    result = {"servers": live_rows(runs), "pairs": live_pairs(runs), "left_out": left_out}
    if as_json:
        print(json.dumps(without_nan(result)))
        return
    Console().print(table(result))
    for line in lines(result):
        print(f"- {line}")


def _names(bases: Sequence[str], given: Sequence[str]) -> list[str]:
    """A name for every server: as given, else its host and port; a number sets equal ones apart."""
    names: list[str] = []
    for at, base in enumerate(bases):
        wanted = given[at] if at < len(given) else urlsplit(base).netloc.rpartition("@")[2]
        wanted = wanted.replace("/", "_")
        name, number = wanted, 2
        while name in names:
            name, number = f"{wanted}-{number}", number + 1
        names.append(name)
    return names


def _told_by_folder(folder: Path) -> list[LiveRun]:
    """Runs, their servers named by the folder: alone where it has only one."""
    runs = read_live_runs(folder)
    several = len({run.server for run in runs}) > 1
    return [
        replace(run, server=f"{folder}/{run.server}" if several else str(folder)) for run in runs
    ]


if __name__ == "__main__":
    app()
