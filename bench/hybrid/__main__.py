"""Agents under pressure on models of several KV groups: ours beside stock vLLM and two bounds.

    python -m bench.hybrid --json
    python -m bench.hybrid --only gemma3 --rounds 1
    python -m bench.hybrid --quick

Models with random weights, served over HTTP. Jobs of several turns share a system prompt; while a
tool runs, other jobs need the KV pool, which holds a third of the jobs' contexts. Stock vLLM caches
no window and no state behind a prompt's end; ``stock_dense`` caches those of every block;
``unlimited`` is stock with a pool that holds everything. ``reach`` holds everything, keeps what
``stock_dense`` does, and runs no more at once than the small pool holds: a policy that loses
nothing could be as fast. Answers are forced, so that all servers get the same prompts, and logprobs
tell whether they agree. Of ``prompt_tokens_computed`` each server tells on ``/metrics``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.hybrid import shapes
from tiered_kv.bench.hybrid.agents import MIDDLE, QUICK, Load, contexts, make_jobs, mistaken
from tiered_kv.bench.hybrid.counts import Counts, group_blocks, read_counts
from tiered_kv.bench.hybrid.row import Played, make_row, mean_difference
from tiered_kv.bench.hybrid.servers import STOCK, make_servers
from tiered_kv.bench.hybrid.shapes import Shape, pools_for
from tiered_kv.bench.models.weights import write_model
from tiered_kv.bench.output import (
    AsJson,
    run_benchmark,
    run_command,
    show,
    without_nan,
)
from tiered_kv.bench.replay.ab import alternate
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.jobs import Job
from tiered_kv.bench.replay.kinds import Kind
from tiered_kv.bench.replay.measure import MeasureError, Replay, Workload
from tiered_kv.bench.replay.names import PRESSURE
from tiered_kv.bench.replay.play.drive import Hints, drive
from tiered_kv.bench.replay.results import JobDone
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer, machine_dtype

Tell = Callable[[str], None]


class Comparison:
    """One model on all servers.

    Args:
        folder: gets the weights, and a log of every run.
        tell: told of every run before it starts.
    """

    def __init__(self, shape: Shape, load: Load, seed: int, folder: Path, tell: Tell) -> None:
        self._shape = shape
        self._load = load
        self._jobs = make_jobs(load, seed)
        self._folder = folder
        self._tell = tell
        self._replay = Replay(
            Workload(self._jobs, 1, seed, Hints.KV_PARAMS, forced=True),
            folder / shape.name,
            look=self._look,
        )
        self._seen: list[Counts] = []
        self._blocks: list[int] = []
        self._after: Callable[[VllmServer], None] | None = None
        self._mistake: float | None = None

    def row(self, rounds: int, *, alone: bool) -> dict[str, Any]:
        """Measure every server in every round.

        Raises:
            ServerError, OSError: see ``Replay``.
        """
        dtype = machine_dtype().name
        model = write_model(self._shape.model, self._folder, dtype)
        pools = pools_for(self._shape, contexts(self._jobs), self._load)
        kinds = make_servers(model, dtype, self._shape, pools, alone=alone)
        played, failed = list[Played](), dict[str, str]()
        for number in range(rounds):
            for kind in alternate(kinds, number):
                if kind.name in failed:
                    continue
                self._tell(f"{self._shape.name}, round {number + 1}, {kind.name}")
                try:
                    played.append(self._one(kind, number))
                except MeasureError as error:
                    failed[kind.name] = str(error).partition("\n")[0]
                    self._tell(str(error))
        row = make_row(self._shape.name, self._shape.groups, played, self._mistake)
        row |= {"block_tokens": self._blocks, "pool_blocks": pools.pressed}
        row["notes"] += [f"{name} failed: {why}" for name, why in failed.items()]
        return row

    def _one(self, kind: Kind, number: int) -> Played:
        self._seen.clear()
        first = kind.name == STOCK and self._mistake is None
        self._after = self._make_mistake if first else None
        kept = self._replay(kind, PRESSURE, number, 1 / self._load.apart_s)
        before, after = self._seen
        return Played(kept, after - before)

    def _look(self, server: VllmServer) -> None:
        self._seen.append(read_counts(server.metrics_text()))
        self._blocks = group_blocks(server.log_text())
        if len(self._seen) == 2 and self._after is not None:
            self._after(server)

    def _make_mistake(self, server: VllmServer) -> None:
        """Ask a job's first turn as it is, and with other words in one block of it."""
        job, block = self._jobs[0], min(self._shape.block, len(self._jobs[0].turns[0].added) // 2)
        right = Job(job.name, "right", (job.turns[0],))
        wrong = mistaken(job, len(job.turns[0].added) // 2, block)
        self._mistake = mean_difference(_answered(server, right), _answered(server, wrong))


def _answered(server: VllmServer, job: Job) -> tuple[JobDone, ...]:
    work = drive(server.url, MODEL_NAME, [job], [0.0], hints=Hints.NONE, force=True, logprobs=True)
    return asyncio.run(work)


def chosen(every: Sequence[Shape], only: Sequence[str], *, bf16: bool) -> list[Shape]:
    """Shapes of these names; those that suit the machine if there are none.

    Raises:
        typer.BadParameter: no shape has such a name.
    """
    names = [shape.name for shape in every]
    if unknown := [name for name in only if name not in names]:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(names)}")
    if only:
        return [shape for shape in every if shape.name in only]
    return list(shapes.suited(tuple(every), bf16=bf16))


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="A model; two that suit the machine if none is named.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every server, in turn.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models, few turns: whether everything works.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Run ours under vLLM's own scheduler.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of jobs and arrivals.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder in which logs are kept.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare servers on models of several KV groups."""
    every, load = (shapes.QUICK, QUICK) if quick else (shapes.MIDDLE, MIDDLE)

    def compared() -> int:
        began, dtype = time.monotonic(), machine_dtype()
        models = chosen(every, only or (), bf16=dtype.name == shapes.BF16)
        with tempfile.TemporaryDirectory(prefix="hybrid-") as name:
            folder = logs or Path(name)
            rows = [
                _compare(shape, load, seed, folder, 1 if quick else rounds, alone)
                for shape in models
            ]
        result = {
            "rows": rows,
            "dtype": str(dtype),
            "quick": quick,
            "seconds": round(time.monotonic() - began, 1),
        }
        show("Models of several KV groups under pressure", without_nan(result), as_json)
        return 0

    raise typer.Exit(run_command(compared, FAILURES, "stopped; no server is left running"))


def _compare(
    shape: Shape, load: Load, seed: int, folder: Path, rounds: int, alone: bool
) -> dict[str, Any]:
    def tell(said: str) -> None:
        print(said, file=sys.stderr, flush=True)

    row = Comparison(shape, load, seed, folder, tell).row(rounds, alone=alone)
    tell(json.dumps(without_nan(row)))
    return row


if __name__ == "__main__":
    run_benchmark(main, __doc__)
