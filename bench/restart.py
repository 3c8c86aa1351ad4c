"""First token of contexts whose engine was killed, from CPU memory that outlived it.

    python -m bench.restart --json

A real server with its CPU memory in a file. Eight contexts of 3,000 tokens are sent and saved.
While other clients decode, its processes are killed and it is started again, with an unrelated
request to warm it up. ``adopted``: fraction of the pages in CPU memory that the next engine finds.
``first_ratio``: median first token of the contexts as each comes back, over that of the same
contexts from CPU memory later. A context that comes from anywhere else is an error.
``jobs_found`` and ``tails_found``: fraction of the contexts whose job continued with its second
turn, and of those whose last tokens, which fill no block, were found too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.restore import (
    TIMEOUT_S,
    WARM_UP,
    Answered,
    answer,
    context_gib,
    first_token_ms,
    job_of,
    median_ms,
    small_pool,
    texts,
)
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer, machine_dtype
from tiered_kv.doctor.running_server import events
from tiered_kv.trace.trace_reader import TraceReader

CONTEXTS = 8
DECODING = 2
SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 60.0
ADOPTED = re.compile(r"CPU memory has (\d+) pages from before")


@contextlib.contextmanager
def decoding(url: str) -> Iterator[None]:
    """Clients that have a server decode until it is killed."""
    body = {"model": MODEL_NAME, "max_tokens": 800, "ignore_eos": True}

    def decode(at: int) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=TIMEOUT_S) as client:
            while True:
                prompt = [1_000 + at] * 100
                client.post(f"{url}/v1/completions", json={**body, "prompt": prompt})

    clients = [threading.Thread(target=decode, args=(at,)) for at in range(DECODING)]
    for client in clients:
        client.start()
    yield
    for client in clients:
        client.join()


def kill(server: VllmServer) -> None:
    """Kill a server and everything it started, and wait until all of it has ended."""
    group = server.pid
    assert group is not None
    os.killpg(group, signal.SIGKILL)
    server.stop()
    while group_members(group):
        time.sleep(0.01)


def cpu_pages(client: httpx.Client) -> int:
    """Number of pages in CPU memory, once no more are added.

    Raises:
        TimeoutError: more and more are added.
    """
    until, before = time.monotonic() + SETTLE_S, -1
    while time.monotonic() < until:
        first_token_ms(client, WARM_UP[:100])  # an idle engine reports nothing
        now = int(events(client.get("/metrics").text).get("cpu_pages", 0))
        if now == before:
            return now
        before = now
        time.sleep(1.0)
    raise TimeoutError("pages are added to CPU memory for ever")


def from_cpu(client: httpx.Client, prompt: list[int]) -> Answered:
    """Send a context.

    Raises:
        RuntimeError: it did not come from CPU memory.
    """
    answered = answer(client, prompt)
    if not answered.is_from("cpu_tokens"):
        raise RuntimeError(f"a context did not come from CPU memory: {answered.tokens}")
    return answered


def measure(
    model: Path, tokens: int, folder: Path, tick: Callable[[str], None]
) -> dict[str, float | str]:
    """Kill a server, and measure what the next one finds."""
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.jsonl"
        env = {
            "TIERED_KV_CPU_GIB": f"{1.5 * (CONTEXTS + 1) * context_gib(model, tokens):.4f}",
            "TIERED_KV_CPU_PATH": str(folder),
            "TIERED_KV_TRACE": str(trace),
        }
        server = VllmServer(small_pool(model, tokens, env), Path(name) / "server.log")
        with server:
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
                tick("saving contexts")
                prompts = texts(client, CONTEXTS, tokens)
                for prompt in prompts:
                    first_token_ms(client, prompt)
                held = cpu_pages(client)
            tick("killing the server")
            with decoding(server.url):
                time.sleep(2.0)
                kill(server)
            tick("restarting it")
            server.start()
            found = ADOPTED.search(server.log_text())
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
                first_token_ms(client, WARM_UP)
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
        "tails_found": sum(one.tokens["cpu_tokens"] == tokens - 1 for one in first) / CONTEXTS,
        "start_s": server.start_s,
        "tokens": tokens,
        "dtype": str(machine_dtype()),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    shared: Annotated[
        Path, typer.Option(help="Folder on tmpfs, in which the memory gets one of its own.")
    ] = SHARED_MEMORY,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what is found again after a server was killed."""
    with (
        tempfile.TemporaryDirectory(prefix="tiered-kv-", dir=shared) as folder,
        benchmark("Contexts of a server that was killed", 4, as_json=as_json) as run,
    ):
        run.result = measure(model or small_model(), tokens, Path(folder), run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
