"""Agents under pressure on models of several KV groups: ours, stock vLLM, and bounds.

    python -m bench.hybrid --json
    python -m bench.hybrid --only gemma3 --rounds 1
    python -m bench.hybrid --quick

A preset of the replay: models with random weights, jobs of random tokens that share a system
prompt, and a KV pool that holds a third of the jobs' contexts. Stock vLLM caches no window and no
state behind a prompt's end; ``stock_dense`` caches those of every block; ``unlimited`` is stock
with a pool that holds everything. ``reach`` is ``stock_dense`` with such a pool, but runs no more
concurrently than the small pool holds: a policy that loses nothing could be as fast. Answers are
forced, so that all servers get the same prompts, and logprobs show whether they agree.
``prompt_tokens_computed`` is each server's own count on ``/metrics``.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.figures import compare, completions, mean, unequal
from tiered_kv.bench.agents.forcing import SERVER_ARGS, server_env
from tiered_kv.bench.agents.jobs import FIRST_WORD, Job, Load, make_jobs
from tiered_kv.bench.agents.paired import drawn_order
from tiered_kv.bench.agents.player import drive
from tiered_kv.bench.agents.results import Kept, Run
from tiered_kv.bench.models.catalogue import MODELS, STATE_CHUNK, VOCABULARY, TinyModel
from tiered_kv.bench.models.weights import write_model
from tiered_kv.bench.output import AsJson, run_benchmark, run_command, show, without_nan
from tiered_kv.bench.replay.agreement import Difference, difference, widest, within
from tiered_kv.bench.replay.failures import FAILURES
from tiered_kv.bench.replay.kinds import CPU_GIB, RAW_LOGPROBS, REACH_SCHEDULER, SCHEDULER, Kind
from tiered_kv.bench.replay.measure import MeasureError, Replay, Workload
from tiered_kv.bench.replay.names import PRESSURE
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.doctor.running_server import events, totals

OURS, STOCK, DENSE = "ours", "stock", "stock_dense"
REACH, UNLIMITED = "reach", "unlimited"
RESERVED_GIB = "4"
"""GiB that the CPU build sets aside before the pool's size is known."""
BF16 = "bfloat16"
"""The dtype of machines that run models with ``needs_bf16``."""

MIDDLE = Load(
    jobs=6,
    turns=5,
    system=512,
    task=500,
    result=250,
    answer=32,
    gap_s=2.5,
    gap_spread=0.7,
    gap_limit_s=10.0,
    apart_s=2.0,
)
"""Contexts of about 2,200 tokens at the end."""
QUICK = Load(
    jobs=5,
    turns=3,
    system=256,
    task=300,
    result=150,
    answer=16,
    gap_s=0.5,
    gap_spread=0.5,
    gap_limit_s=2.0,
    apart_s=0.3,
)
"""Enough to see that everything works."""

_TINY = {model.name: model for model in MODELS}
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"

_WIDE: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 768**-0.5,
}
"""Fields of the middle-sized models: some 90 M parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its KV groups, as vLLM makes them of its layers.

    Attributes:
        block: tokens of a block, in every group.
        chunk: most tokens of a prefill's step.
        full, windows, states: numbers of groups with full attention, with a sliding window and
            with states.
        window: length of the windows, tokens.
        needs_bf16: True if vLLM's CPU build runs the model in bf16 alone.
    """

    model: TinyModel
    block: int
    chunk: int
    full: int = 1
    windows: int = 0
    window: int = 0
    states: int = 0
    needs_bf16: bool = False

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def groups(self) -> str:
        """The groups in words."""
        said = [f"{self.full} full"]
        if self.windows:
            said.append(f"{self.windows} with a window of {self.window}")
        if self.states:
            said.append(f"{self.states} with states")
        return ", ".join(said)

    def context_blocks(self, tokens: int) -> int:
        """Blocks that a context waits in until its next turn: all of full attention, a window,
        and the state at its end with the one that goes on from it."""
        window = math.ceil((self.window - 1) / self.block) + 1 if self.windows else 0
        return self._full(tokens) + self.windows * window + self.states * 2

    def request_blocks(self, tokens: int) -> int:
        """Most blocks that a request of ``tokens`` takes while it runs."""
        reach = self.window - 1 + self.chunk
        window = math.ceil(reach / self.block) + 1 if self.windows else 0
        return self._full(tokens) + self.windows * window + self.states * 3

    def whole_blocks(self, tokens: int, turns: int) -> int:
        """Blocks that a job fills in all of its turns, if nothing is ever evicted: a window and
        states at every turn's ends, and those of every block where all are kept."""
        ends = 2 * turns * (self.context_blocks(tokens) - self._full(tokens))
        dense = math.ceil(tokens / self.block) * (self.windows + self.states)
        return self._full(tokens) + ends + dense

    def _full(self, tokens: int) -> int:
        return self.full * math.ceil(tokens / self.block)


def _named(name: str, **settings: object) -> TinyModel:
    tiny = _TINY[name]
    return replace(tiny, settings={**tiny.settings, **_WIDE, **settings})


MIDDLE_SHAPES = (
    Shape(
        model=_named(
            "gemma3",
            sliding_window=256,
            layer_types=[*[_SLIDING] * 5, _FULL] * 2,
            query_pre_attn_scalar=64,
        ),
        block=128,
        chunk=512,
        windows=5,
        window=256,
    ),
    Shape(
        model=_named(
            "qwen3_next",
            layer_types=[_STATE, _STATE, _STATE, _FULL] * 3,
            linear_num_key_heads=6,
            linear_num_value_heads=12,
            decoder_sparse_step=12,  # vLLM wants one layer with experts
            moe_intermediate_size=768,
            shared_expert_intermediate_size=768,
        ),
        block=128,
        chunk=512,
        states=3,
        needs_bf16=True,
    ),
    Shape(
        model=_named(
            "granite4",
            layer_types=["mamba", "mamba", "mamba", "attention"] * 3,
            num_local_experts=0,
            shared_intermediate_size=2304,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_chunk_size=128,
            attention_multiplier=0.125,
        ),
        block=256,
        chunk=256,
        states=3,
    ),
)
"""Gemma's five windows to one full layer; gated delta rule and full attention; Mamba 2 and full
attention, where the machine has no bf16."""

QUICK_SHAPES = (
    Shape(model=_TINY["gemma3"], block=128, chunk=512, windows=1, window=200),
    Shape(model=_TINY["qwen3_next"], block=384, chunk=512, states=3, needs_bf16=True),
    Shape(
        model=_TINY["granite4"],
        block=256,
        chunk=int(str(STATE_CHUNK["max_num_batched_tokens"])),
        states=3,
    ),
)
"""One tiny shape of each kind, for ``--quick``."""


@dataclass(frozen=True, slots=True)
class Pools:
    """KV pools, in blocks, and the longest request, in tokens."""

    longest: int
    pressed: int
    unlimited: int


def pools_for(shape: Shape, contexts: list[int], load: Load) -> Pools:
    """A pool for a third of the jobs' contexts, which still holds the longest request, and one
    for everything."""
    longest = -(-(max(contexts) + 1) // 256) * 256
    one = shape.request_blocks(longest) + 2  # vLLM keeps a block for itself
    waiting = sum(shape.context_blocks(tokens) for tokens in contexts)
    everything = sum(shape.whole_blocks(tokens, load.turns) for tokens in contexts)
    return Pools(longest, max(one, waiting // 3), everything + len(contexts) * one)


def make_servers(model: Path, dtype: str, shape: Shape, pools: Pools, *, alone: bool) -> list[Kind]:
    """Stock, ours, stock that keeps every window and state, and two bounds.

    Args:
        alone: ours runs under vLLM's own scheduler, not under ``ContinuumScheduler``.
    """
    stock = ServerOptions(
        model=model,
        kv_blocks=pools.pressed,
        block_size=shape.block,
        max_model_len=pools.longest,
        dtype=dtype,
        env={**server_env(), "VLLM_CPU_KVCACHE_SPACE": RESERVED_GIB},
        extra_args=(
            "--enable-prefix-caching",
            *("--max-num-batched-tokens", str(shape.chunk)),
            *("--max-num-seqs", "8"),
            *RAW_LOGPROBS,
            *SERVER_ARGS,
        ),
    )
    dense = (*stock.extra_args, "--prefix-cache-retention-interval", "None")
    ours = replace(
        stock,
        extra_args=(*stock.extra_args, *(() if alone else ("--scheduler-cls", SCHEDULER))),
        kv_transfer_config=CONNECTOR,
        env={**stock.env, "TIERED_KV_CPU_GIB": f"{CPU_GIB:g}"},
    )
    unlimited = replace(stock, kv_blocks=pools.unlimited)
    few = ("--additional-config", json.dumps({"reach_blocks": pools.pressed}))
    reach = (*dense, "--scheduler-cls", REACH_SCHEDULER, *few)
    return [
        Kind(STOCK, stock),
        Kind(OURS, ours),
        Kind(DENSE, replace(stock, extra_args=dense)),
        Kind(REACH, replace(unlimited, extra_args=reach)),
        Kind(UNLIMITED, unlimited),
    ]


def read_counts(metrics: str) -> Counter[str]:
    """Counters of a server, from its start: tokens of all prompts, of those the tokens that it
    computed and that a connector restored, requests preempted, and times that it stood still.

    Raises:
        ValueError: vLLM does not report where prompts' tokens come from.
    """
    sources = Counter[str]()
    for source, value in _BY_SOURCE.findall(metrics):
        sources[source] += int(float(value))
    if "local_compute" not in sources:
        raise ValueError("the server's metrics lack vllm:prompt_tokens_by_source_total")
    return Counter(
        prompt=sources.total(),
        computed=sources["local_compute"],
        restored=sources["external_kv_transfer"],
        preempted=int(totals(metrics).get("vllm:num_preemptions_total", 0)),
        stuck=int(events(metrics).get("watchdog_barks", 0)),
    )


_BY_SOURCE = re.compile(r'^vllm:prompt_tokens_by_source_total{.*source="(\w+)".*} (\S+)$', re.M)
_GROUPS = re.compile(r"kv cache group sizes \(([0-9, ]+)\)")


def group_blocks(log: str) -> list[int]:
    """Tokens of a block of each KV group, as vLLM logs them; empty if it does not."""
    found = _GROUPS.search(log)
    return [int(size) for size in found[1].split(",") if size.strip()] if found else []


@dataclass(frozen=True, slots=True)
class Played:
    """One run, and what the server counted in it (see ``read_counts``)."""

    kept: Kept
    counts: Counter[str]

    @property
    def run(self) -> Run:
        return self.kept.run


def make_row(
    model: str, groups: str, played: Sequence[Played], mistake: float | None = None
) -> dict[str, Any]:
    """Row as ``--json`` prints it; times in seconds, None where nothing was measured.

    Args:
        mistake: what a wrong page changes in stock's answer, mean nats a token.
    """
    by_server: dict[str, list[Played]] = {}
    for one in played:
        by_server.setdefault(one.run.server, []).append(one)
    runs = [one.run for one in played]
    found, usual = differences(runs)
    over: dict[str, object] = {}
    for name, server in (
        ("stock", STOCK),
        ("dense", DENSE),
        ("reach", REACH),
        ("unlimited", UNLIMITED),
    ):
        compared = compare(runs, OURS, server)
        span = [min(compared.rounds), max(compared.rounds)] if compared else None
        over |= {
            f"ours_over_{name}": compared.mean.value if compared else None,
            f"ours_over_{name}_range": span,
        }
    return {
        "model": model,
        "groups": groups,
        "servers": {name: _server(found) for name, found in by_server.items()},
        **over,
        "answers_equal": within(found, usual) if found and usual else None,
        "answers": {
            "tokens": found.tokens if found else 0,
            "ours_worst_turn_nats": found.worst_turn if found else None,
            "stock_worst_turn_nats": usual.worst_turn if usual else None,
            "wrong_page_nats": mistake,
        },
        "notes": notes(played),
    }


def differences(runs: Sequence[Run]) -> tuple[Difference | None, Difference | None]:
    """Differences of ours from stock, and of stock from itself, each the widest over all runs:
    stock, keeping densely or with room for everything, cuts prompts in as many ways."""
    reference = next((run for run in runs if run.server == STOCK), None)
    if reference is None:
        return None, None
    found: dict[bool, list[Difference]] = {True: [], False: []}
    for run in runs:
        one = difference(run, reference) if run is not reference else None
        if one is not None:
            found[run.server == OURS].append(one)
    ours, usual = (widest(found[key]) if found[key] else None for key in (True, False))
    return ours, usual


def notes(played: Sequence[Played]) -> list[str]:
    """Reasons to doubt the row, a sentence each."""
    failed = [
        f"{one.run.server}, round {one.run.round + 1}: {job.name} ended with {job.error}"
        for one in played
        for job in one.run.jobs
        if job.error is not None
    ]
    counted = []
    for what, text in (
        ("preempted", "requests were preempted"),
        ("stuck", "times it stood still for half a minute"),
    ):
        totals_of = Counter[str]()
        for one in played:
            totals_of[one.run.server] += one.counts[what]
        counted += [f"{server}: {count} {text}" for server, count in totals_of.items() if count]
    return [*unequal([one.kept for one in played]), *failed, *counted]


def _server(played: Sequence[Played]) -> Mapping[str, Any]:
    times = [mean(completions(one.run)) for one in played]
    counts = {
        name: round(mean(one.counts[name] for one in played)) for name in ("computed", "restored")
    }
    return {
        "mean_job_s": mean(times),
        "mean_job_s_range": [min(times), max(times)],
        "mean_ttft_s": mean(mean(turn.ttft_s for turn in one.run.turns) for one in played),
        **{f"prompt_tokens_{name}": count for name, count in counts.items()},
        "prompt_tokens": round(mean(one.counts["prompt"] for one in played)),
        "rounds": len(played),
    }


def compare_servers(
    shape: Shape, load: Load, seed: int, folder: Path, rounds: int, *, alone: bool
) -> dict[str, Any]:
    """Measure one model on every server in every round; return its row.

    Args:
        folder: gets the weights, and a log of every run.

    Raises:
        ServerError, OSError: see ``Replay``.
    """
    jobs, counts, blocks = make_jobs(load, seed, VOCABULARY), list[Counter[str]](), list[int]()
    mistake: float | None = None
    kind: Kind

    def look(server: VllmServer) -> None:
        """Read the server's counters, before what is measured and after it."""
        nonlocal mistake, blocks
        counts.append(read_counts(server.metrics_text()))
        blocks = group_blocks(server.log_text())
        if len(counts) == 2 and kind.name == STOCK and mistake is None:
            half = len(jobs[0].turns[0].added) // 2
            right = replace(jobs[0], salt="right", turns=jobs[0].turns[:1])
            wrong = mistaken(jobs[0], half, min(shape.block, half))
            mistake = mean_difference(*(_logprobs(server, one) for one in (right, wrong)))

    dtype = machine_dtype().name
    workload = Workload(jobs, 1, seed, Hints.KV_PARAMS, forced=True)
    replay = Replay(workload, folder / shape.name, look=look)
    model = write_model(shape.model, folder, dtype)
    pools = pools_for(shape, [job.context for job in jobs], load)
    kinds = make_servers(model, dtype, shape, pools, alone=alone)
    played, failed = list[Played](), dict[str, str]()
    for number in range(rounds):
        for kind in drawn_order(kinds, seed, number):
            if kind.name in failed:
                continue
            report(f"{shape.name}, round {number + 1}, {kind.name}")
            counts.clear()
            try:
                kept = replay(kind, PRESSURE, number, 1 / load.apart_s)
            except MeasureError as error:
                failed[kind.name] = str(error).partition("\n")[0]
                report(str(error))
            else:
                before, after = counts
                played.append(Played(kept, after - before))
    row = make_row(shape.name, shape.groups, played, mistake)
    row |= {"block_tokens": blocks, "pool_blocks": pools.pressed}
    row["notes"] += [f"{name} failed: {why}" for name, why in failed.items()]
    return row


def mistaken(job: Job, at: int, count: int) -> Job:
    """A job's first turn, with other tokens in ``count`` places from ``at`` on: what a wrong page
    would be."""
    first = job.turns[0]
    other = tuple(FIRST_WORD + token % (VOCABULARY - FIRST_WORD) for token in first.added)
    added = (*first.added[:at], *other[at : at + count], *first.added[at + count :])
    return Job(f"{job.name}-mistaken", "mistaken", (replace(first, added=added, gap_s=0.0),))


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Mean difference of two answers' logprobs, nats; None of nothing."""
    pairs = list(zip(one, other, strict=True))
    return mean(abs(a - b) for a, b in pairs) if pairs else None


def _logprobs(server: VllmServer, job: Job) -> tuple[float, ...]:
    work = drive(server.url, MODEL_NAME, [job], [0.0], hints=Hints.NONE, force=True, logprobs=True)
    (done,) = asyncio.run(work)
    return done.turns[0].logprobs


def chosen(every: Sequence[Shape], only: Sequence[str], *, bf16: bool) -> list[Shape]:
    """Shapes of these names; if there are none, one with windows, and the one with states that
    runs fast on the machine.

    Raises:
        typer.BadParameter: no shape has such a name.
    """
    names = [shape.name for shape in every]
    if unknown := [name for name in only if name not in names]:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(names)}")
    if only:
        return [shape for shape in every if shape.name in only]
    return [shape for shape in every if not shape.states or shape.needs_bf16 == bf16]


def report(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


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
    every, load = (QUICK_SHAPES, QUICK) if quick else (MIDDLE_SHAPES, MIDDLE)

    def compared() -> int:
        began, dtype = time.monotonic(), machine_dtype()
        rows = []
        with tempfile.TemporaryDirectory(prefix="hybrid-") as name:
            for shape in chosen(every, only or (), bf16=dtype.name == BF16):
                folder, count = logs or Path(name), 1 if quick else rounds
                rows.append(compare_servers(shape, load, seed, folder, count, alone=alone))
                report(json.dumps(without_nan(rows[-1])))
        result = {
            "rows": rows,
            "dtype": str(dtype),
            "quick": quick,
            "seconds": round(time.monotonic() - began, 1),
        }
        show("Models of several KV groups under pressure", without_nan(result), as_json)
        return 0

    raise typer.Exit(run_command(compared, FAILURES, "stopped; no server is left running"))


if __name__ == "__main__":
    run_benchmark(main, __doc__)
