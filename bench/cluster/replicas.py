"""Replicas: servers of one model, each on a core of its own, started side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tiered_kv.bench.restore import BLOCK, context_gib
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer

from .turns import WARM_UP, ask

TIMEOUT_S = 600.0
STEPS = ("--max-num-batched-tokens", "256")
"""Orders and reports go with the engine's steps. One core computes 256 tokens in half a second."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that answers, its client, and its trace."""

    server: VllmServer
    client: httpx.Client
    trace: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of each replica.

    Attributes:
        tokens: longest context.
        contexts: that many fit into CPU memory, and half as many into VRAM.
    """

    model: Path
    tokens: int
    contexts: int


@contextmanager
def replicas(
    shape: Shape, stores: Sequence[str | None], folder: Path, places: Sequence[int] = (0, 1)
) -> Iterator[list[Replica]]:
    """Replicas, one for each address of a remote store; None has none.

    Args:
        places: for each, which of the machine's cores it gets.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = context_gib(shape.model, shape.tokens)
    servers: list[VllmServer] = []
    traces: list[Path] = []
    for at, (store, core) in enumerate(zip(stores, places, strict=True)):
        place = folder / f"replica-{at}"
        place.mkdir()
        traces.append(place / "trace.jsonl")
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
            "TIERED_KV_CPU_GIB": f"{shape.contexts * each:.4f}",
            "TIERED_KV_TRACE": str(traces[-1]),
        }
        if store is not None:
            env["TIERED_KV_REMOTE"] = store
        options = ServerOptions(
            model=shape.model,
            block_size=BLOCK,
            kv_blocks=max(2, shape.contexts // 2) * (shape.tokens // BLOCK + 2),
            max_model_len=shape.tokens,
            kv_transfer_config=CONNECTOR,
            env=env,
            extra_args=STEPS,
        )
        servers.append(VllmServer(options, place / "server.log"))
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(VllmServer.start, servers))
        found = []
        for server, trace in zip(servers, traces, strict=True):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=TIMEOUT_S))
            ask(client, "warm-up", WARM_UP)
            found.append(Replica(server, client, trace))
        yield found
