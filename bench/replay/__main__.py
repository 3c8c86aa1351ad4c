"""Agent jobs replayed on real servers: ``ab`` measures, ``plot`` draws, ``verify-pin`` checks.

python -m bench.replay ab --preset cpu
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.jobs import RecordedJobs, digest, mini_swe_jobs, synthetic_jobs
from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.run_files import Ledger, read_runs
from tiered_kv.bench.output import AsJson, command_line, one_of, progress, run_command, show
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.replay.ab import PRESETS, Harness, Preset, total_runs
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.kinds import ROUND, Kind, longest_context, make_kinds, size_for
from tiered_kv.bench.replay.measure import Replay, Workload, versions
from tiered_kv.bench.replay.names import CALIBRATION
from tiered_kv.bench.replay.report import plot, readable, rows, summary
from tiered_kv.bench.replay.verify_pin import verify
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import machine_dtype
from tiered_kv.errors import ConfigError
from tiered_kv.policies import registry

OUT = ROOT / ".replay"
TRACES = Path("../shared/traces/miniswe.jsonl.gz")
SYNTHETIC_VOCABULARY = 40_000
"""Token ids below this number are in every relevant model's vocabulary."""
KNOWN = f"{', '.join(registry.POLICIES)} or module:Class"

P = ParamSpec("P")
STOPPED = "stopped; no server is left running"

app = command_line("Replay agent jobs on real servers.")

Model = Annotated[
    str | None, typer.Option(help="Model folder or name. Defaults to the small model.")
]
Out = Annotated[Path, typer.Option(help="Run folder.")]


def check_policies(names: list[str]) -> list[str]:
    """Return the names if all are known policies. Raises ``typer.BadParameter`` otherwise."""
    try:
        for name in names:
            registry.policy(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return names


def check_policy(name: str | None) -> str | None:
    """Return the name if it is None or a known policy. Raises ``typer.BadParameter`` otherwise."""
    check_policies([] if name is None else [name])
    return name


def finished(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a function that returns an exit code into a command. On a failure, the command prints a
    message to standard error and exits with 1.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if code := run_command(lambda: command(*args, **kwargs), FAILURES, STOPPED):
            raise typer.Exit(code)

    return run


@app.command()
@finished
def ab(
    preset: Annotated[
        str | None,
        typer.Option(
            callback=one_of(PRESETS),
            help=f"One of {', '.join(PRESETS)}. Defaults to cpu, or to peers with --peers.",
        ),
    ] = None,
    traces: Annotated[Path, typer.Option(help="File with recorded sessions.")] = TRACES,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="Play Continuum's synthetic jobs instead of recorded sessions."
        ),
    ] = False,
    model: Model = None,
    policy: Annotated[
        list[str],
        typer.Option(callback=check_policies, help=f"Also run this policy: {KNOWN}. Repeatable."),
    ] = [],  # noqa: B006 - typer only reads it
    ssd: Annotated[
        bool, typer.Option("--ssd", help="Also run tiered-kv with an SSD tier.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Run tiered-kv under vLLM's own scheduler.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Add vLLM's router and LMCache (scripts/install-peers).")
    ] = False,
    hints: Annotated[Hints, typer.Option(help="How requests carry the job id.")] = Hints.KV_PARAMS,
    free: Annotated[
        bool, typer.Option("--free", help="Let the model generate its own answers.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of jobs and arrivals.")] = 0,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds of each load except idle. Defaults to the preset's value."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the runs in --out.")
    ] = False,
    out: Out = OUT,
    as_json: AsJson = False,
) -> int:
    """Play the same jobs on several servers, one after another, and compare the servers."""
    chosen = PRESETS[preset or ("peers" if peers else "cpu")]
    chosen = replace(chosen, rounds=rounds or chosen.rounds)

    served = model or small_model()
    recorded = make_jobs(chosen, served, None if synthetic else traces, seed)
    jobs = recorded.jobs
    kinds = make_kinds(
        served,
        size_for([job.context for job in jobs], chosen.pool_tokens),
        policies=policy,
        ssd=ssd,
        forced=not free,
        own_scheduler=alone,
        peers=peers,
    )
    workload = Workload(tuple(jobs), chosen.idle_jobs, seed, hints, forced=not free)
    plan = {
        "jobs": digest(jobs),
        "preset": {key: value for key, value in asdict(chosen).items() if key != "rounds"},
        "seed": seed,
        "hints": hints.value,
        "forced": not free,
        "alone": alone,
        "model": str(served),
        "versions": versions(),
    }
    ledger = Ledger(out, plan, resume=resume)
    return measure(kinds, chosen, workload, ledger, recorded.left_out, out, as_json)


@app.command("plot")
@finished
def draw(
    to: Annotated[
        Path | None, typer.Option(help="Folder for the figures. Defaults to the run folder.")
    ] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> int:
    """Draw the runs of a folder as PNG and SVG."""
    runs = [kept.run for kept in read_runs(out) if kept.run.load != CALIBRATION]
    paths = [str(path) for path in plot(rows(runs, forced=False), to or out)]
    print(json.dumps({"files": paths}) if as_json else "\n".join(paths))
    return 0


@app.command("verify-pin")
@finished
def check_pin(
    model: Model = None,
    policy: Annotated[
        str | None,
        typer.Option(
            callback=check_policy, help=f"Policy to verify instead of the default: {KNOWN}."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Verify that a job's blocks stay pinned between turns; exits with 1 if not."""
    return verify(model or small_model(), policy).show(as_json)


def make_jobs(preset: Preset, model: str | Path, traces: Path | None, seed: int) -> RecordedJobs:
    """Create jobs from the recording ``traces``, or Continuum's synthetic jobs if it is None."""
    if traces is None:
        made = synthetic_jobs(count=preset.jobs, seed=seed, vocabulary=SYNTHETIC_VOCABULARY)
        return RecordedJobs(made, {})
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(str(model)).get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    longest = sys.maxsize if most is None else int(most) // ROUND * ROUND - 1
    return mini_swe_jobs(
        traces,
        AutoTokenizer.from_pretrained(str(model)),
        count=preset.jobs,
        turns=preset.turns,
        seed=seed,
        longest=min(longest_context(preset.pool_tokens), longest),
    )


def measure(
    kinds: Sequence[Kind],
    preset: Preset,
    workload: Workload,
    ledger: Ledger,
    left_out: Mapping[str, LeftOut],
    out: Path,
    as_json: bool,
) -> int:
    """Measure and show the results. Returns the exit code: 0 on completion, and 130 after an
    interrupt, when the results so far are shown.
    """
    stopped = False
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        runs = bar.add_task("runs", total=total_runs(kinds, preset))
        turns = bar.add_task(
            "turns of this run", total=sum(len(job.turns) for job in workload.jobs)
        )

        def report(what: str) -> None:
            bar.update(runs, completed=len(harness.kept), description=what)
            bar.reset(turns)
            if bar.disable:
                print(what, file=sys.stderr, flush=True)

        replay = Replay(workload, out, on_turn=lambda: bar.advance(turns))
        harness = Harness(kinds, preset, replay, ledger, seed=workload.seed, report=report)
        try:
            harness.run_all()
        except KeyboardInterrupt:
            stopped = True
    result = summary(harness.kept, harness.not_started, forced=workload.forced, left_out=left_out)
    if not as_json:
        result = readable(result) | {"dtype": str(machine_dtype()), "runs and logs": str(out)}
    show("Agent jobs on real servers", result, as_json)
    if stopped:
        print("stopped; continue with --resume; no server is left running", file=sys.stderr)
    return 130 if stopped else 0


if __name__ == "__main__":
    app()
