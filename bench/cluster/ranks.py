"""Two data-parallel ranks of one server, each asked by vLLM's header."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tiered_kv.bench.restore import BLOCK, context_gib
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer

from .replicas import STEPS, TIMEOUT_S, Replica, Shape
from .turns import WARM_UP, ask

RANKS = 2
RANK_HEADER = "X-data-parallel-rank"


@contextmanager
def ranks_of_one_server(shape: Shape, store: str, folder: Path) -> Iterator[list[Replica]]:
    """The ranks, each as a replica of its own. All write to one trace."""
    cores = sorted(os.sched_getaffinity(0))
    each = context_gib(shape.model, shape.tokens)
    trace = folder / "trace.jsonl"
    options = ServerOptions(
        model=shape.model,
        block_size=BLOCK,
        kv_blocks=max(2, shape.contexts // 2) * (shape.tokens // BLOCK + 2),
        max_model_len=shape.tokens,
        kv_transfer_config=CONNECTOR,
        env={
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores[:RANKS]),
            "TIERED_KV_CPU_GIB": f"{shape.contexts * each:.4f}",
            "TIERED_KV_TRACE": str(trace),
            "TIERED_KV_REMOTE": store,
        },
        extra_args=("--data-parallel-size", str(RANKS), *STEPS),
    )
    with VllmServer(options, folder / "server.log") as server:
        clients = [
            httpx.Client(base_url=server.url, timeout=TIMEOUT_S, headers={RANK_HEADER: str(rank)})
            for rank in range(RANKS)
        ]
        try:
            for client in clients:
                ask(client, "warm-up", WARM_UP)
            yield [Replica(server, client, trace) for client in clients]
        finally:
            for client in clients:
                client.close()
