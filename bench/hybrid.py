"""Agents under memory pressure, on models with several KV groups: tiered-kv and stock vLLM.

    python -m bench.hybrid --json
    python -m bench.hybrid --only gemma3 --rounds 1
    python -m bench.hybrid --quick

A preset of the replay: models with random weights, jobs of random tokens that share a system
prompt, and a KV pool that holds a third of the jobs' contexts. Stock vLLM caches no window and no
state behind a prompt's end; ``stock_dense`` caches those of every block; ``bound`` is stock with a
pool that holds everything. ``reach`` is ``stock_dense`` with such a pool, but runs no more
concurrently than the small pool holds: a policy that loses nothing could be as fast. Answers are
forced, so that all servers get the same prompts, and logprobs show whether they agree.
``wrong_page_nats`` is what a wrong page changes in stock's first answer: with less than the
tolerance of ``agrees`` it would not be seen.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.forcing import SERVER_ARGS, server_env
from tiered_kv.bench.agents.jobs import FIRST_WORD, Job, Load, make_jobs
from tiered_kv.bench.agents.paired import drawn_order
from tiered_kv.bench.agents.player import drive
from tiered_kv.bench.agents.results import Kept
from tiered_kv.bench.models.catalogue import MODELS, STATE_CHUNK, VOCABULARY, TinyModel
from tiered_kv.bench.models.weights import write_model
from tiered_kv.bench.output import AsJson, benchmark, run_benchmark
from tiered_kv.bench.replay.kinds import (
    RAW_LOGPROBS,
    SCHEDULER,
    Kind,
    with_args,
    with_connector,
    within_reach,
)
from tiered_kv.bench.replay.measure import MeasureError, Replay, Workload
from tiered_kv.bench.replay.names import BOUND, PRESSURE, REACH, STOCK, TIERED
from tiered_kv.bench.replay.report import readable, summary
from tiered_kv.bench.servers.vllm_server import (
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)

DENSE = f"{STOCK}_dense"
RESERVED_GIB = "4"
"""GiB that the CPU build sets aside before the pool's size is known."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its KV groups: one of full attention, and some of windows or states.

    Attributes:
        block: tokens of a block, in every group.
        chunk: most tokens of a prefill's step.
        windows, states: numbers of groups. window: length of the windows, tokens.
        needs_bf16: True if vLLM's CPU build runs the model in bf16 alone.
    """

    model: TinyModel
    block: int
    chunk: int
    windows: int = 0
    window: int = 0
    states: int = 0
    needs_bf16: bool = False

    @property
    def groups(self) -> str:
        """The groups in words."""
        windows = f", {self.windows} with a window of {self.window}" if self.windows else ""
        return f"1 full{windows}" + (f", {self.states} with states" if self.states else "")

    def context_blocks(self, tokens: int) -> int:
        """Blocks that a context waits in until its next turn: all of full attention, a window,
        and the state at its end with the one that goes on from it."""
        return self._blocks(tokens, self.window - 1, 2)

    def request_blocks(self, tokens: int) -> int:
        """Most blocks that a request of ``tokens`` takes while it runs."""
        return self._blocks(tokens, self.window - 1 + self.chunk, 3)

    def whole_blocks(self, tokens: int, turns: int) -> int:
        """Blocks that a job fills in all of its turns, if nothing is ever evicted: a window and
        states at every turn's ends, and those of every block where all are kept."""
        full = -(-tokens // self.block)
        ends = 2 * turns * (self.context_blocks(tokens) - full)
        return full * (1 + self.windows + self.states) + ends

    def _blocks(self, tokens: int, reach: int, states: int) -> int:
        """Blocks of full attention, of windows that ``reach`` back, and of states."""
        window = -(-reach // self.block) + 1
        return -(-tokens // self.block) + self.windows * window + self.states * states


_TINY = {model.name: model for model in MODELS}
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"


def _wide(name: str, **settings: object) -> TinyModel:
    """A model of a middle size, some 90 M parameters."""
    wide = {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "initializer_range": 768**-0.5,
    }
    return replace(_TINY[name], settings={**_TINY[name].settings, **wide, **settings})


_GEMMA = _wide(
    "gemma3",
    sliding_window=256,
    layer_types=[*[_SLIDING] * 5, _FULL] * 2,
    query_pre_attn_scalar=64,
)
_QWEN = _wide(
    "qwen3_next",
    layer_types=[_STATE, _STATE, _STATE, _FULL] * 3,
    linear_num_key_heads=6,
    linear_num_value_heads=12,
    decoder_sparse_step=12,  # vLLM wants one layer with experts
    moe_intermediate_size=768,
    shared_expert_intermediate_size=768,
)
_GRANITE = _wide(
    "granite4",
    layer_types=["mamba", "mamba", "mamba", "attention"] * 3,
    num_local_experts=0,
    shared_intermediate_size=2304,
    mamba_n_heads=24,
    mamba_d_head=64,
    mamba_chunk_size=128,
    attention_multiplier=0.125,
)
MIDDLE_SHAPES = (
    Shape(model=_GEMMA, block=128, chunk=512, windows=5, window=256),
    Shape(model=_QWEN, block=128, chunk=512, states=3, needs_bf16=True),
    Shape(model=_GRANITE, block=256, chunk=256, states=3),
)
"""Gemma's five windows to one full layer; gated delta rule and full attention; Mamba 2 and full
attention, where the machine has no bf16."""
_STATE_CHUNK = int(str(STATE_CHUNK["max_num_batched_tokens"]))
QUICK_SHAPES = (
    Shape(model=_TINY["gemma3"], block=128, chunk=512, windows=1, window=200),
    Shape(model=_TINY["qwen3_next"], block=384, chunk=512, states=3, needs_bf16=True),
    Shape(model=_TINY["granite4"], block=256, chunk=_STATE_CHUNK, states=3),
)
"""One tiny shape of each kind, for ``--quick``."""


@dataclass(frozen=True, slots=True)
class Pools:
    """KV pools, in blocks, and the longest request, in tokens."""

    longest: int
    pressed: int
    unlimited: int


def pools_for(shape: Shape, contexts: Sequence[int], turns: int) -> Pools:
    """A pool for a third of the jobs' contexts, which still holds the longest request, and one
    for everything."""
    longest = -(-(max(contexts) + 1) // 256) * 256
    one = shape.request_blocks(longest) + 2  # vLLM keeps a block for itself
    waiting = sum(map(shape.context_blocks, contexts))
    everything = sum(shape.whole_blocks(tokens, turns) for tokens in contexts)
    return Pools(longest, max(one, waiting // 3), everything + len(contexts) * one)


def make_servers(model: Path, dtype: str, shape: Shape, pools: Pools, *, alone: bool) -> list[Kind]:
    """Stock vLLM, tiered-kv, stock vLLM that keeps every window and state, and two bounds.

    Args:
        alone: run tiered-kv under vLLM's own scheduler instead of ``ContinuumScheduler``.
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
            *("--max-num-batched-tokens", str(shape.chunk), "--max-num-seqs", "8"),
            *RAW_LOGPROBS,
            *SERVER_ARGS,
        ),
    )
    ours = stock if alone else with_args(stock, "--scheduler-cls", SCHEDULER)
    unlimited = replace(stock, kv_blocks=pools.unlimited)
    densely = ("--prefix-cache-retention-interval", "None")
    return [
        Kind(STOCK, stock),
        Kind(TIERED, with_connector(ours)),
        Kind(DENSE, with_args(stock, *densely)),
        Kind(REACH, within_reach(with_args(unlimited, *densely), pools.pressed)),
        Kind(BOUND, unlimited),
    ]


def compare_servers(
    shape: Shape,
    load: Load,
    seed: int,
    folder: Path,
    rounds: int,
    tick: Callable[[str], None],
    *,
    alone: bool,
) -> dict[str, Any]:
    """Measure one model on every server in every round; return its row: ``replay.report.summary``
    and the model.

    Args:
        folder: gets the weights, and a log of every run.
        tick: called after every run.
    """
    name, dtype = shape.model.name, machine_dtype().name
    jobs = make_jobs(load, seed, VOCABULARY)
    pools = pools_for(shape, [job.context for job in jobs], load.turns)
    kinds = make_servers(write_model(shape.model, folder, dtype), dtype, shape, pools, alone=alone)
    mistakes = list[float]()

    def after(server: VllmServer) -> None:
        if server.options == kinds[0].options and not mistakes:
            mistakes.append(mistake_nats(server, jobs[0], shape.block))

    workload = Workload(jobs, 1, seed, Hints.KV_PARAMS, forced=True)
    replay = Replay(workload, folder / name, after=after)
    kept, failed = list[Kept](), dict[str, str]()
    for number in range(rounds):
        for kind in drawn_order(kinds, seed, number):
            if kind.name not in failed:
                try:
                    kept.append(replay(kind, PRESSURE, number, 1 / load.apart_s))
                except MeasureError as error:
                    failed[kind.name] = str(error).partition("\n")[0]
                tick(f"{name}, round {number + 1}, {kind.name}")
    return {
        "model": name,
        "groups": shape.groups,
        "block_tokens": shape.block,
        "pool_blocks": pools.pressed,
        "wrong_page_nats": mistakes[0] if mistakes else None,
        **summary(kept, failed, forced=True),
    }


def mistake_nats(server: VllmServer, job: Job, block: int) -> float:
    """Mean change of the logprobs of a job's first answer, nats a token, by a wrong page in the
    middle of its prompt."""
    half = len(job.turns[0].added) // 2
    jobs = [
        replace(job, salt="right", turns=job.turns[:1]),
        mistaken(job, half, min(block, half)),
    ]
    work = drive(server.url, MODEL_NAME, jobs, None, hints=Hints.NONE, force=True, logprobs=True)
    right, wrong = (done.turns[0].logprobs for done in asyncio.run(work))
    return float(np.mean(np.abs(np.subtract(right, wrong))))


def mistaken(job: Job, at: int, count: int) -> Job:
    """A job's first turn with ``count`` tokens replaced from ``at`` on, which imitates a wrong
    page."""
    first = job.turns[0]
    other = tuple(FIRST_WORD + token % (VOCABULARY - FIRST_WORD) for token in first.added)
    added = (*first.added[:at], *other[at : at + count], *first.added[at + count :])
    return Job(f"{job.name}-mistaken", "mistaken", (replace(first, added=added, gap_s=0.0),))


def chosen(every: Sequence[Shape], only: Sequence[str], *, bf16: bool) -> list[Shape]:
    """Shapes with these names. Without names: one with windows, and the one with states that runs
    fast on the machine.

    Raises:
        typer.BadParameter: no shape has such a name.
    """
    names = [shape.model.name for shape in every]
    if unknown := [name for name in only if name not in names]:
        raise typer.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(names)}")
    if only:
        return [shape for shape in every if shape.model.name in only]
    return [shape for shape in every if not shape.states or shape.needs_bf16 == bf16]


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Model. Repeat for several. Defaults to two that suit the machine."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs per server, alternating.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: tiny models, few turns.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Run tiered-kv under vLLM's own scheduler.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of jobs and arrivals.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for logs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare servers on models of several KV groups."""
    every, load = (QUICK_SHAPES, QUICK) if quick else (MIDDLE_SHAPES, MIDDLE)
    began, dtype = time.monotonic(), machine_dtype()
    shapes = chosen(every, only or (), bf16=dtype.name == "bfloat16")
    count = 1 if quick else rounds
    steps = 5 * len(shapes) * count
    with (
        benchmark("Models of several KV groups under pressure", steps, as_json=as_json) as run,
        tempfile.TemporaryDirectory(prefix="hybrid-") as scratch,
    ):
        folder = logs or Path(scratch)
        rows = [
            compare_servers(shape, load, seed, folder, count, run.tick, alone=alone)
            for shape in shapes
        ]
        run.result = {
            "rows": rows,
            "dtype": str(dtype),
            "quick": quick,
            "seconds": round(time.monotonic() - began, 1),
        }
        if not as_json:
            run.result = {row["model"]: readable(row) for row in rows}


if __name__ == "__main__":
    run_benchmark(main, __doc__)
