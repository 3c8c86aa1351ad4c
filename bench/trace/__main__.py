"""Figures of the trace against all others that a server gives, and what the trace costs.

    python -m bench.trace --json

Agents under pressure play a script on a real server with every tier: their contexts are pinned,
restored from CPU memory and from SSD, promoted and evicted. Some jobs are left open. In the end
the sums of the trace, of ``trace analyze``, of ``/metrics``, of the routes and of what the clients
saw must be the same.

- ``disagreements``: figures of which two tell different things; ``accounts``: figures compared;
  ``details``: what each said of those that differ.
- ``on_ratio``: a scheduler's step with the trace over one without (64 requests that answer, as in
  ``bench.overhead``), ``on_control`` two engines without, ``steps_ratio`` and ``steps_control`` the
  same with every step in the trace. ``off_us``: the dearest hook without a trace.
- ``idle_call_ms``: the time that 19 of 20 calls of a route take while the server is idle.
- ``analyze_s``, ``analyze_cpu_s``, ``analyze_mib``: ``trace analyze`` of ``analyze_turns`` turns.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    only_result_on_stdout,
    progress,
    run_benchmark,
    show,
)
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import machine_dtype
from tiered_kv.bench.trace.accounts import accounts
from tiered_kv.bench.trace.large import analyze_many
from tiered_kv.bench.trace.script import run_script
from tiered_kv.bench.trace.step_cost import off_us, step_cost

Tell = Callable[[str], None]


def compare(model: Path, folder: Path, seed: int, tell: Tell) -> dict[str, Any]:
    """Play the script, and compare what everybody says of it."""
    seen = run_script(model, folder, seed, tell)
    every = accounts(seen)
    differing = [one.to_json() for one in every if not one.agrees]
    return {
        "disagreements": len(differing),
        "details": differing,
        "accounts": len(every),
        "turns": len(seen.records),
        "steps": seen.steps.steps,
        "preemptions": sum(one.preempted.count for one in seen.records),
        "pins": seen.metrics["pins"],
        "tokens_cpu": seen.metrics["prompt_tokens_cpu"] - seen.metrics["prompt_tokens_ssd"],
        "tokens_ssd": seen.metrics["prompt_tokens_ssd"],
        "pages_promoted": seen.metrics["pages_promoted"],
        "idle_call_ms": seen.idle_call_ms,
    }


def cost(engines: int, tell: Tell) -> dict[str, Any]:
    """Measure steps with and without the trace."""
    turns, steps = (step_cost(engines, tell, steps=steps) for steps in (False, True))
    return {
        "on_ratio": turns.ratio,
        "on_control": turns.control,
        "steps_ratio": steps.ratio,
        "steps_control": steps.control,
        "off_us": off_us(),
        "engines": engines,
    }


def large(turns: int, seed: int, tell: Tell) -> dict[str, Any]:
    """Measure the analysis of a large trace."""
    tell("a large trace")
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        found = analyze_many(turns, Path(folder), seed)
    return {
        "analyze_s": found.seconds,
        "analyze_cpu_s": found.cpu_s,
        "analyze_mib": found.mib,
        "analyze_turns": found.turns,
        "analyze_bytes": found.nbytes,
    }


def main(
    engines: Annotated[int, typer.Option(help="Engines of each kind, for the steps.")] = 6,
    turns: Annotated[int, typer.Option(help="Turns of the large trace.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the agents.")] = 0,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare figures, and measure. Exit with 1 if figures disagree."""
    with (
        only_result_on_stdout(),
        progress() as bar,
        tempfile.TemporaryDirectory(prefix="trace-") as folder,
    ):
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("", total=6 + 2 * engines)

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what)

        found = compare(model or small_model(), Path(folder), seed, tell)
        found |= cost(engines, tell) | large(turns, seed, tell)
    show("The trace against all other figures", {**found, "dtype": str(machine_dtype())}, as_json)
    if found["disagreements"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
