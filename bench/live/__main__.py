"""Plays agents' jobs on running servers, with or without tiered-kv, over their OpenAI-compatible
API.

    python -m bench.live --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --jps 0.5
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ParamSpec
from urllib.parse import urlsplit

import typer
from rich.console import Console

from tiered_kv.bench.agents.client import Api, Hints
from tiered_kv.bench.agents.jobs import digest
from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.results import Run
from tiered_kv.bench.agents.run_files import (
    Ledger,
    RunFileError,
    differing,
    read_plan,
    read_runs,
)
from tiered_kv.bench.live.live_jobs import load_jobs
from tiered_kv.bench.live.report import live_pairs, live_rows, plot_sweeps, readable
from tiered_kv.bench.live.rounds import Arriving, Load, Rounds, level_of
from tiered_kv.bench.live.servers import Target, served
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
    show,
    without_nan,
)
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.verify_pin import verify_running
from tiered_kv.bench.sim.workloads.generate import GENERATED
from tiered_kv.doctor.running_server import UnreachableError, base_of
from tiered_kv.formatting import count

OUT = ROOT / ".bench"
API_KEY = "OPENAI_API_KEY"
STOPPED = "stopped; continue with --resume"

P = ParamSpec("P")
app = command_line("Play agents' jobs on running servers, with or without tiered-kv.")

Out = Annotated[Path, typer.Option(help="Run folder.")]


def finished(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a function that returns an exit code into a command. On a failure, the command prints a
    message to standard error and exits with 1.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        failures = (*FAILURES, UnreachableError)
        if code := run_command(lambda: command(*args, **kwargs), failures, STOPPED):
            raise typer.Exit(code)

    return run


@app.callback(invoke_without_command=True)
@finished
def bench(
    context: typer.Context,
    url: Annotated[
        list[str], typer.Option(help="Server address. Repeat to compare several servers.")
    ] = [],  # noqa: B006 - typer only reads the default
    name: Annotated[
        list[str], typer.Option(help="Server name in the results. Repeat, in the order of --url.")
    ] = [],  # noqa: B006
    workload: Annotated[
        str, typer.Option(help=f"One of {', '.join(GENERATED)}, or the path of a recording.")
    ] = "original",
    jps: Annotated[
        list[float], typer.Option(min=1e-6, help="Job arrivals per second. Repeat for a sweep.")
    ] = [],  # noqa: B006
    sessions: Annotated[
        list[int], typer.Option(min=1, help="Number of concurrent jobs. Repeat for a sweep.")
    ] = [],  # noqa: B006
    duration: Annotated[
        float, typer.Option(min=0.1, help="Time during which jobs arrive in each run, seconds.")
    ] = 300.0,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of turns per job. Defaults to all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs per server and load.")] = 6,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Number of distinct jobs to generate. They repeat if a run needs more."
        ),
    ] = 200,
    scale: Annotated[
        float,
        typer.Option(min=1e-4, help="Scale factor for all lengths. Below 1, contexts are shorter."),
    ] = 1.0,
    longest: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum context length, tokens. Defaults to the server's limit."),
    ] = None,
    api: Annotated[Api, typer.Option(help="API route of the requests.")] = Api.CHAT,
    hints: Annotated[Hints, typer.Option(help="How requests carry the job id.")] = Hints.KV_PARAMS,
    plain: Annotated[
        bool, typer.Option("--plain", help="Send only fields of OpenAI's own API.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model name. Defaults to each server's first model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of jobs and arrivals.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the runs in --out.")
    ] = False,
    out: Out = OUT,
    as_json: AsJson = False,
) -> int:
    """Play the same jobs on every server in turn. Reads the API key from OPENAI_API_KEY."""
    if context.invoked_subcommand is not None:
        return 0
    if not url:
        raise typer.BadParameter("at least one server address is required", param_hint="--url")
    if len(name) > len(url):
        raise typer.BadParameter(
            f"{count(len(name), 'name')} for {count(len(url), 'server')}", param_hint="--name"
        )
    if bool(jps) == bool(sessions):
        raise typer.BadParameter("use either --jps or --sessions", param_hint="--jps")
    loads = [Load(Arriving.JPS, level, duration) for level in jps]
    loads += [Load(Arriving.SESSIONS, level, duration) for level in sessions]

    played = load_jobs(workload, count=jobs, seed=seed)
    plan = {
        "workload": played.name,
        "jobs": digest(played.jobs),
        "turns": turns,
        "scale": scale,
        "longest": longest,
        "seconds": duration,
        "seed": seed,
        "api": api.value,
        "hints": hints.value,
        "plain": plain,
    }
    key = os.environ.get(API_KEY) or "none"
    bases = [base_of(one) for one in url]
    targets = [
        Target(called, base, *served(base, model, key), api, hints, plain, key)
        for called, base in zip(_names(bases, name), bases, strict=True)
    ]
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("the servers' sizes", total=1)
        what, answered = "", 0

        def report(run: str) -> None:
            nonlocal what, answered
            what, answered = run, 0
            done, total = len(measuring.runs), measuring.total
            bar.update(task, completed=done, total=total, description=run)
            if bar.disable:
                print(run, file=sys.stderr, flush=True)

        def on_turn(_name: str, _turn: object) -> None:
            nonlocal answered
            answered += 1
            bar.update(task, description=f"{what}: {answered} turns")

        measuring = Rounds(
            targets=targets,
            loads=tuple(dict.fromkeys(loads)),
            jobs=played,
            rounds=rounds,
            seed=seed,
            scale=scale,
            turns=turns,
            longest=longest,
            ledger=Ledger(out, plan, resume=resume),
            report=report,
            on_turn=on_turn,
        )
        return measure(measuring, as_json)


@app.command()
@finished
def compare(
    one: Annotated[Path, typer.Argument(help="Run folder.")],
    other: Annotated[
        Path,
        typer.Argument(help="Run folder to compare with, measured with the same jobs and loads."),
    ],
    as_json: AsJson = False,
) -> int:
    """Compare two measurements run by run. The second measurement is reported relative to the
    first.
    """
    if one.resolve() == other.resolve():
        raise RunFileError(f"{one} and {other} are the same folder: pass two run folders")
    plans = [read_plan(folder) for folder in (one, other)]
    unlike = differing(*plans)
    if unlike:
        raise RunFileError(
            f"{one} and {other} cannot be compared: their {', '.join(unlike)} differ"
        )
    print_figures([run for folder in (one, other) for run in _named_by_folder(folder)], {}, as_json)
    return 0


@app.command("plot")
@finished
def draw(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder for the figures. Defaults to the first run folder.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Draw a sweep over arrival rates or over concurrent jobs, as PNG and SVG."""
    read = _runs if len(folders) == 1 else _named_by_folder
    rows = live_rows([run for folder in folders for run in read(folder)])
    paths = [str(path) for path in plot_sweeps(rows, to or folders[0])]
    print(json.dumps({"files": paths}) if as_json else "\n".join(paths))
    return 0


@app.command()
@finished
def statistics(
    workload: Annotated[
        str, typer.Argument(help=f"A recording, or one of {', '.join(GENERATED)}.")
    ],
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs in a generated workload.")] = 200,
    seed: Annotated[int, typer.Option(help="Random seed of a generated workload.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Show the turns, tokens, gaps and tools of a workload."""
    found = workload_statistics(load_jobs(workload, count=jobs, seed=seed))
    if as_json:
        print(json.dumps(found))
        return 0
    Console().print(statistics_table(found))
    for line in statistics_lines(found):
        print(f"- {line}")
    return 0


@app.command("verify-pin")
@finished
def check_pin(
    url: Annotated[str, typer.Option(help="Address of a server without other clients.")],
    as_json: AsJson = False,
) -> int:
    """Verify that a job's blocks stay in VRAM between turns; exits with 1 if not."""
    return verify_running(base_of(url)).show(as_json)


def measure(measuring: Rounds, as_json: bool) -> int:
    """Measure and show the results. Returns the exit code: 0 on completion, and 130 after an
    interrupt, when the results so far are shown.
    """
    stopped = False
    try:
        measuring.prepare()
        measuring.run_all()
    except KeyboardInterrupt:
        stopped = True
    print_figures(measuring.runs, measuring.jobs.left_out, as_json)
    if stopped:
        print(STOPPED, file=sys.stderr)
    return 130 if stopped else 0


def print_figures(runs: Sequence[Run], left_out: Mapping[str, LeftOut], as_json: bool) -> None:
    """Print the figures of runs on standard output."""
    result = {
        "servers": live_rows(runs),
        "pairs": live_pairs(runs),
        "left_out": {reason: asdict(found) for reason, found in left_out.items()},
    }
    shown = without_nan(result) if as_json else readable(result)
    show("Jobs on running servers", shown, as_json)


def _names(bases: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a name for every server: the given name, or its host and port. Equal names get a
    number."""
    names: list[str] = []
    for at, base in enumerate(bases):
        wanted = given[at] if at < len(given) else urlsplit(base).netloc.rpartition("@")[2]
        wanted = wanted.replace("/", "_")
        name, number = wanted, 2
        while name in names:
            name, number = f"{wanted}-{number}", number + 1
        names.append(name)
    return names


def _runs(folder: Path) -> list[Run]:
    """Read the runs in a folder, sorted by load, round and server.

    Raises:
        RunFileError: there are no runs, or one belongs to ``replay``.
    """
    try:
        runs = [kept.run for kept in read_runs(folder)]
        return sorted(runs, key=lambda run: (level_of(run.load), run.round, run.server))
    except ValueError as error:
        raise RunFileError(
            f"{folder} contains runs that `tiered-kv bench` did not write: {error}"
        ) from error


def _named_by_folder(folder: Path) -> list[Run]:
    """Read the runs in a folder, and prefix the server names with the folder's path. If the runs
    are of only one server, that server's name becomes the folder's path.
    """
    runs = _runs(folder)
    several = len({run.server for run in runs}) > 1
    return [
        replace(run, server=f"{folder}/{run.server}" if several else str(folder)) for run in runs
    ]


if __name__ == "__main__":
    app()
