"""The five servers that are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tiered_kv.bench.replay.kinds import CPU_GIB, RAW_LOGPROBS, REACH_SCHEDULER, SCHEDULER, Kind
from tiered_kv.bench.replay.play.forcing import SERVER_ARGS, server_env
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions

from .shapes import Pools, Shape

OURS, STOCK, DENSE = "ours", "stock", "stock_dense"
REACH, UNLIMITED = "reach", "unlimited"
RESERVED_GIB = "4"
"""GiB that the CPU build sets aside before the pool's size is known."""


def make_servers(model: Path, dtype: str, shape: Shape, pools: Pools, *, alone: bool) -> list[Kind]:
    """Stock, stock that keeps every window and state, ours, and two bounds: stock with room for
    everything, and one that keeps everything too, but runs no more at once than the small pool
    holds.

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
    within = ("--scheduler-cls", REACH_SCHEDULER)
    few = ("--additional-config", json.dumps({"reach_blocks": pools.pressed}))
    return [
        Kind(STOCK, stock),
        Kind(OURS, ours),
        Kind(DENSE, replace(stock, extra_args=dense)),
        Kind(REACH, replace(unlimited, extra_args=(*dense, *within, *few))),
        Kind(UNLIMITED, unlimited),
    ]
