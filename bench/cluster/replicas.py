"""Replicas of one model: servers with one core each, or data-parallel ranks of one server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.restore import BLOCK, ask, client_of, context_gib, settled
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer

RANKS = 2
RANK_HEADER = "X-data-parallel-rank"
STEPS = ("--max-num-batched-tokens", "256")
"""Maximum tokens per step. The connector's orders and reports travel with the engine's steps, and
one core computes 256 tokens in half a second."""
QUIET_POLLS = 10
"""Number of consecutive polls without a change after which a counter counts as settled. Together
they take more than a second, the time after which an unanswered write is retried."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A running server, its client, and its trace."""

    server: VllmServer
    client: httpx.Client
    trace: Path

    def ask(
        self, job: str, prompt: Sequence[int], tokens: int = 1, salt: str | None = None
    ) -> Answer:
        """Send a turn of a job; see ``bench.restore.ask``."""
        return ask(self.client, prompt, job, tokens, salt=salt, logprobs=1)

    def shared_pages(self) -> int:
        """Wait until the number of pages that the replica has written to the store stops growing,
        and return it.

        Raises:
            TimeoutError: the number keeps growing.
        """
        # Pages are counted when the last page of their batch is written, and bytes as they are
        # sent.
        names = ("pages_shared", "remote_bytes_written")
        return settled(self.client, *names, polls=QUIET_POLLS)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Model and size of each replica.

    Attributes:
        model: folder of the model.
        tokens: maximum context length.
        contexts: number of contexts that fit into CPU memory. Half of them fit into VRAM.
    """

    model: Path
    tokens: int
    contexts: int

    def options(self, place: str, trace: Path, store: str | None) -> ServerOptions:
        """Return the server options of a replica.

        Args:
            place: the replica's cores, in vLLM's notation.
            trace: path of the trace to write.
            store: address of the replica's remote store; None for no store.
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
    """Start replicas concurrently, one for each entry of ``stores``, and stop them when the block
    ends.

    Args:
        stores: address of each replica's remote store; None for no store.
        folder: folder for logs and traces.
        places: core index of each replica.
    """
    cores = sorted(os.sched_getaffinity(0))
    options = [
        shape.options(str(cores[core % len(cores)]), folder / f"trace-{at}.jsonl", store)
        for at, (store, core) in enumerate(zip(stores, places, strict=True))
    ]
    with started(options, folder) as running:
        yield running


@contextmanager
def started(options: Sequence[ServerOptions], folder: Path) -> Iterator[list[Replica]]:
    """Start servers concurrently, and stop them when the block ends.

    Args:
        options: options of each server, which must set ``TIERED_KV_TRACE``.
        folder: folder for the logs.
    """
    with ThreadPoolExecutor(len(options)) as pool, ExitStack() as stack:
        servers = list[VllmServer]()
        for at, one in enumerate(options):
            servers.append(VllmServer(one, folder / f"server-{at}.log"))
            stack.callback(servers[-1].stop)
        list(pool.map(VllmServer.start, servers))
        clients = [stack.enter_context(client_of(server)) for server in servers]
        traces = [Path(one.env["TIERED_KV_TRACE"]) for one in options]
        yield list(map(Replica, servers, clients, traces))


@contextmanager
def ranks_of_one_server(shape: Shape, store: str, folder: Path) -> Iterator[list[Replica]]:
    """Start one server with data-parallel ranks. Each rank is presented as a replica, which vLLM's
    header selects. All ranks write to one trace.
    """
    cores, trace = sorted(os.sched_getaffinity(0))[:RANKS], folder / "trace.jsonl"
    options = shape.options("|".join(map(str, cores)), trace, store)
    ranked = replace(options, extra_args=("--data-parallel-size", str(RANKS), *STEPS))
    with VllmServer(ranked, folder / "server.log") as server, ExitStack() as stack:
        headers = [{RANK_HEADER: str(rank)} for rank in range(RANKS)]
        clients = [stack.enter_context(client_of(server, one)) for one in headers]
        yield [Replica(server, client, trace) for client in clients]
