"""Replicas of one model: servers on a core each, or data-parallel ranks of one server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from tiered_kv.bench.restore import BLOCK, TIMEOUT_S, context_gib
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer

from .turns import WARM_UP, ask

RANKS = 2
RANK_HEADER = "X-data-parallel-rank"
STEPS = ("--max-num-batched-tokens", "256")
"""Orders and reports are sent with the engine's steps. One core computes 256 tokens in half a
second."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A running server, its client, and its trace."""

    server: VllmServer
    client: httpx.Client
    trace: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of each replica.

    Attributes:
        tokens: longest context.
        contexts: number that fits into CPU memory; half of it fits into VRAM.
    """

    model: Path
    tokens: int
    contexts: int

    def options(self, place: str, trace: Path, store: str | None) -> ServerOptions:
        """Options of a replica.

        Args:
            place: its cores, in vLLM's notation.
            store: address of its remote store, if it has one.
        """
        return ServerOptions(
            model=self.model,
            block_size=BLOCK,
            kv_blocks=max(2, self.contexts // 2) * (self.tokens // BLOCK + 2),
            max_model_len=self.tokens,
            kv_transfer_config=CONNECTOR,
            env={
                "VLLM_CPU_OMP_THREADS_BIND": place,
                "TIERED_KV_CPU_GIB": f"{self.contexts * context_gib(self.model, self.tokens):.4f}",
                "TIERED_KV_TRACE": str(trace),
                **({} if store is None else {"TIERED_KV_REMOTE": store}),
            },
            extra_args=STEPS,
        )


@contextmanager
def replicas(
    shape: Shape, stores: Sequence[str | None], folder: Path, places: Sequence[int] = (0, 1)
) -> Iterator[list[Replica]]:
    """Replicas, started concurrently, one for each address of a remote store; None has none.

    Args:
        places: for each, the index of its core.
    """
    cores = sorted(os.sched_getaffinity(0))
    servers = [
        VllmServer(
            shape.options(str(cores[core % len(cores)]), folder / f"trace-{at}.jsonl", store),
            folder / f"server-{at}.log",
        )
        for at, (store, core) in enumerate(zip(stores, places, strict=True))
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(VllmServer.start, servers))
        yield [_replica(stack, server, {}) for server in servers]


@contextmanager
def ranks_of_one_server(shape: Shape, store: str, folder: Path) -> Iterator[list[Replica]]:
    """Data-parallel ranks of one server, each as a replica that is addressed by vLLM's header. All
    write to one trace."""
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    options = shape.options("|".join(map(str, cores)), folder / "trace.jsonl", store)
    ranked = replace(options, extra_args=("--data-parallel-size", str(RANKS), *STEPS))
    with ExitStack() as stack:
        server = stack.enter_context(VllmServer(ranked, folder / "server.log"))
        yield [_replica(stack, server, {RANK_HEADER: str(rank)}) for rank in range(RANKS)]


def _replica(stack: ExitStack, server: VllmServer, headers: Mapping[str, str]) -> Replica:
    client = httpx.Client(base_url=server.url, timeout=TIMEOUT_S, headers=headers)
    ask(stack.enter_context(client), "warm-up", WARM_UP)
    return Replica(server, client, Path(server.options.env["TIERED_KV_TRACE"]))
