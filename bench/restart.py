"""Time to first token from CPU memory that outlived a killed engine.

    python -m bench.restart --json

A real server keeps its CPU memory in a file. Eight contexts of 3,000 tokens are sent and saved.
While other clients decode, the server's processes are killed. The server is then restarted and
warmed up with an unrelated request. ``adopted``: fraction of the pages in CPU memory that the next
engine finds. ``first_ratio``: median time to first token when each context first returns, over the
median when it returns again. Both come from CPU memory; a context from any other source is an
error. ``jobs_found``: fraction of contexts whose job continued with its second turn.
``tails_found``: fraction of contexts whose last tokens, which fill no block, were found too.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
from tiered_kv.bench.restore import (
    CONTEXTS,
    CPU,
    ask,
    client_of,
    context_gib,
    is_from,
    job_of,
    median_ms,
    settled,
    small_pool,
    texts,
)
from tiered_kv.bench.servers.vllm_server import VllmServer
from tiered_kv.trace.trace_reader import TraceReader

DECODING = 2
ADOPTED = re.compile(r"CPU memory has (\d+) pages (?:of|from) the previous engine")


@contextmanager
def decoding(server: VllmServer) -> Iterator[None]:
    """Run clients that keep a server decoding, until the block kills the server."""

    def decode(at: int) -> None:
        with suppress(httpx.HTTPError), client_of(server) as client:
            while True:
                ask(client, [1_000 + at] * 100, f"decodes-{at}", 800)

    clients = [threading.Thread(target=decode, args=(at,)) for at in range(DECODING)]
    for client in clients:
        client.start()
    yield
    for client in clients:
        client.join()


def from_cpu(client: httpx.Client, prompt: list[int]) -> Answer:
    """Send a context whose KV should be in CPU memory. Returns the answer.

    Raises:
        RuntimeError: the context did not come from CPU memory.
    """
    answer = ask(client, prompt)
    if not is_from(answer, CPU):
        raise RuntimeError(f"a context did not come from CPU memory: {answer.sources}")
    return answer


def measure(model: Path, tokens: int, folder: Path, tick: Tick) -> dict[str, Any]:
    """Kill a server, and measure what the next server finds. Returns the figures that the module
    docstring explains.

    Args:
        folder: folder for the memory file.

    Raises:
        RuntimeError: a context does not come from CPU memory after the restart.
    """
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.jsonl"
        env = {
            "TIERED_KV_CPU_GIB": f"{1.5 * (CONTEXTS + 1) * context_gib(model, tokens):.4f}",
            "TIERED_KV_CPU_PATH": str(folder),
            "TIERED_KV_TRACE": str(trace),
        }
        with VllmServer(small_pool(model, tokens, env), Path(name) / "server.log") as server:
            with client_of(server) as client:
                tick("saving contexts")
                prompts = texts(client, CONTEXTS, tokens)
                for prompt in prompts:
                    ask(client, prompt)
                (held,) = settled(client, "cpu_pages")
            tick("killing the server")
            with decoding(server):
                time.sleep(2.0)
                assert server.pid is not None
                os.killpg(server.pid, signal.SIGKILL)
                server.stop()
            tick("restarting the server")
            server.start()
            found = ADOPTED.search(server.log_text())
            with client_of(server) as client:
                tick("sending the contexts again")
                first = [from_cpu(client, prompt) for prompt in prompts]
                later = [from_cpu(client, prompt) for prompt in prompts]
        jobs = {job_of(prompt) for prompt in prompts}
        second = sum(turn.job in jobs and turn.turn == 2 for turn in TraceReader(trace))
    adopted = int(found[1]) if found else 0
    return {
        "adopted": adopted / held,
        "adopted_pages": adopted,
        "first_ratio": median_ms(first) / median_ms(later),
        "first_ms": median_ms(first),
        "cpu_ms": median_ms(later),
        "jobs_found": second / CONTEXTS,
        "tails_found": sum(one.sources[CPU] == tokens - 1 for one in first) / CONTEXTS,
        "start_s": server.start_s,
        "tokens": tokens,
    }


def main(
    tokens: Tokens = 3000,
    shared: Annotated[
        Path, typer.Option(help="tmpfs folder in which to create the memory folder.")
    ] = Path("/dev/shm"),
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much KV a server finds after its predecessor was killed."""
    with (
        tempfile.TemporaryDirectory(prefix="tiered-kv-", dir=shared) as folder,
        served_benchmark("Contexts of a server that was killed", 4, model, as_json=as_json) as run,
    ):
        run.result = measure(run.model, tokens, Path(folder), run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
