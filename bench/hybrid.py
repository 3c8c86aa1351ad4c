"""Agents under memory pressure, on models with several KV groups: tiered-kv and stock vLLM.

    python -m bench.hybrid --json
    python -m bench.hybrid --only gemma3 --rounds 1
    python -m bench.hybrid --quick

A variant of ``bench.replay``: models with random weights, jobs of random tokens that share a system
prompt, and a KV pool that holds a third of the jobs' contexts. Stock vLLM caches sliding windows
and the states of recurrent layers only up to the end of a prompt; ``stock_dense`` caches them at
every block; ``bound`` is stock vLLM with a pool that holds all KV. ``reach`` is ``stock_dense``
with such a pool, but with no more concurrent requests than the small pool can hold: no policy that
keeps all KV can be faster. Answers are forced, so all servers get the same prompts, and their
logprobs can be compared. ``wrong_page_nats`` is the change that a wrong page causes in the logprobs
of stock vLLM's first answer. If this change is below the tolerance of ``agrees``, a wrong page
would go unnoticed.
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
"""GiB that the CPU build reserves before the pool size is known."""

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
"""Load whose final contexts have about 2,200 tokens."""
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
"""Small load for a smoke test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its KV groups: one group of full attention, and groups of sliding windows or of
    recurrent layers' states.

    Attributes:
        block: tokens per block, in every group.
        chunk: maximum tokens per prefill step.
        windows, states: number of groups of each type.
        window: window length, tokens.
        needs_bf16: True if vLLM's CPU build runs the model only in bf16.
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
        """Description of the KV groups for the results, such as "1 full, 3 with states"."""
        windows = f", {self.windows} with a window of {self.window}" if self.windows else ""
        return f"1 full{windows}" + (f", {self.states} with states" if self.states else "")

    def context_blocks(self, tokens: int) -> int:
        """Return the number of blocks that a context occupies until its next turn: all blocks of
        full attention, one window, and the final state together with the state that continues from
        it.
        """
        return self._blocks(tokens, self.window - 1, 2)

    def request_blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that a running request of ``tokens`` occupies."""
        return self._blocks(tokens, self.window - 1 + self.chunk, 3)

    def whole_blocks(self, tokens: int, turns: int) -> int:
        """Return the number of blocks that a job fills in all of its turns if nothing is evicted:
        blocks of full attention, one block of every window and state group for each of these, and
        the windows and states at the start and end of every turn.
        """
        full = -(-tokens // self.block)
        ends = 2 * turns * (self.context_blocks(tokens) - full)
        return full * (1 + self.windows + self.states) + ends

    def _blocks(self, tokens: int, reach: int, states: int) -> int:
        """Return the number of blocks of full attention, of windows that extend ``reach`` tokens
        back, and of ``states`` states in each state group.
        """
        window = -(-reach // self.block) + 1
        return -(-tokens // self.block) + self.windows * window + self.states * states


_TINY = {model.name: model for model in MODELS}
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"


def _wide(name: str, **settings: object) -> TinyModel:
    """Return a medium-sized variant of a model, with about 90 M parameters."""
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
    decoder_sparse_step=12,  # vLLM requires a layer with experts
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
"""Shapes of medium size: five window layers per full layer, as in Gemma; gated delta rule with full
attention; and Mamba 2 with full attention, for machines without bf16."""
_STATE_CHUNK = int(str(STATE_CHUNK["max_num_batched_tokens"]))
QUICK_SHAPES = (
    Shape(model=_TINY["gemma3"], block=128, chunk=512, windows=1, window=200),
    Shape(model=_TINY["qwen3_next"], block=384, chunk=512, states=3, needs_bf16=True),
    Shape(model=_TINY["granite4"], block=256, chunk=_STATE_CHUNK, states=3),
)
"""Shapes of the same types with tiny models, for ``--quick``."""


@dataclass(frozen=True, slots=True)
class Pools:
    """KV pool sizes and the maximum request length.

    Attributes:
        longest: maximum request length, tokens.
        pressed: blocks of the small pool.
        unlimited: blocks of the pool that holds all KV of all jobs.
    """

    longest: int
    pressed: int
    unlimited: int


def pools_for(shape: Shape, contexts: Sequence[int], turns: int) -> Pools:
    """Size a pool for a third of the jobs' contexts that still fits the longest request, and a pool
    that holds all KV of all jobs.

    Args:
        contexts: final context length of each job, tokens.
        turns: turns per job.
    """
    longest = -(-(max(contexts) + 1) // 256) * 256
    one = shape.request_blocks(longest) + 2  # vLLM reserves a block
    waiting = sum(map(shape.context_blocks, contexts))
    everything = sum(shape.whole_blocks(tokens, turns) for tokens in contexts)
    return Pools(longest, max(one, waiting // 3), everything + len(contexts) * one)


def make_servers(model: Path, dtype: str, shape: Shape, pools: Pools, *, alone: bool) -> list[Kind]:
    """Return the servers to compare: stock vLLM, tiered-kv, stock vLLM that caches windows and
    states at every block, and the two bounds ``reach`` and ``bound``.

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
    """Measure one model on every server in every round. Returns its row: ``replay.report.summary``
    and a description of the model.

    Args:
        folder: receives the weights and a log of every run.
        tick: called after every run.
        alone: run tiered-kv under vLLM's own scheduler.
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
    """Return the mean change that a wrong page in the middle of the prompt causes in the logprobs
    of a job's first answer, nats per token.
    """
    half = len(job.turns[0].added) // 2
    jobs = [
        replace(job, salt="right", turns=job.turns[:1]),
        mistaken(job, half, min(block, half)),
    ]
    work = drive(server.url, MODEL_NAME, jobs, None, hints=Hints.NONE, force=True, logprobs=True)
    right, wrong = (done.turns[0].logprobs for done in asyncio.run(work))
    return float(np.mean(np.abs(np.subtract(right, wrong))))


def mistaken(job: Job, at: int, count: int) -> Job:
    """Return a job's first turn with ``count`` tokens replaced, starting at ``at``, to imitate a
    wrong page.
    """
    first = job.turns[0]
    other = tuple(FIRST_WORD + token % (VOCABULARY - FIRST_WORD) for token in first.added)
    added = (*first.added[:at], *other[at : at + count], *first.added[at + count :])
    return Job(f"{job.name}-mistaken", "mistaken", (replace(first, added=added, gap_s=0.0),))


def chosen(every: Sequence[Shape], only: Sequence[str], *, bf16: bool) -> list[Shape]:
    """Select shapes by the names of their models. Without names, select the shapes without
    recurrent layers, and the shapes with recurrent layers that run fast on this machine.

    Args:
        bf16: True if the machine computes in bf16.

    Raises:
        typer.BadParameter: no shape has one of the names.
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
    """Compare servers on models with several KV groups."""
    every, load = (QUICK_SHAPES, QUICK) if quick else (MIDDLE_SHAPES, MIDDLE)
    began, dtype = time.monotonic(), machine_dtype()
    shapes = chosen(every, only or (), bf16=dtype.name == "bfloat16")
    count = 1 if quick else rounds
    steps = 5 * len(shapes) * count
    with (
        benchmark(
            "Models with several KV groups under memory pressure", steps, as_json=as_json
        ) as run,
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
