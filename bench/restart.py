"""First token of contexts whose engine was killed, from CPU memory that outlived it.

    python -m bench.restart --json

A real server with its CPU memory in a file. Eight contexts of 3,000 tokens are asked and saved;
while other clients decode, its processes are killed and it is started again, with an unrelated
request to warm it up. ``adopted``: pages that the next engine finds, of those that CPU memory held.
``first_ratio``: median first token of the contexts as each comes back, over that of the same
contexts from CPU memory later on. A context that comes from anywhere else is an error.
``jobs_found`` and ``tails_found``: shares of the contexts whose job went on with its second turn,
and of those whose last tokens, which fill no block, were found as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, progress, run_benchmark, show
from tiered_kv.bench.restore import (
    BLOCK,
    Answered,
    answer,
    context_gib,
    first_token_ms,
    job_of,
    texts,
)
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.doctor.running_server import events
from tiered_kv.trace.trace_reader import TraceReader

CONTEXTS = 8
DECODING = 2
SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 60.0
TIMEOUT_S = 600.0
ADOPTED = re.compile(r"CPU memory has (\d+) pages from before")


@contextlib.contextmanager
def decoding(url: str) -> Iterator[None]:
    """Clients that have a server decode, until it is gone."""
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
    """Kill a server and everything it started, and wait until all of it is gone."""
    group = server.pid
    assert group is not None
    os.killpg(group, signal.SIGKILL)
    server.stop()
    while group_members(group):
        time.sleep(0.01)


def cpu_pages(client: httpx.Client) -> int:
    """Pages in CPU memory, once no more are added.

    Raises:
        TimeoutError: there are more and more.
    """
    until, before = time.monotonic() + SETTLE_S, -1
    while time.monotonic() < until:
        first_token_ms(client, list(range(100, 200)))  # an idle engine tells nothing
        now = int(events(client.get("/metrics").text).get("cpu_pages", 0))
        if now == before:
            return now
        before = now
        time.sleep(1.0)
    raise TimeoutError("CPU memory does not come to rest")


def measure(model: Path, tokens: int, folder: Path, show_progress: bool) -> dict[str, float | int]:
    """Kill a server, and look at what the next one finds.

    Raises:
        RuntimeError: a context did not come from CPU memory.
    """
    each = context_gib(model, tokens)
    with tempfile.TemporaryDirectory() as name, progress() as bar:
        trace = Path(name) / "trace.jsonl"
        options = ServerOptions(
            model=model,
            block_size=BLOCK,
            kv_blocks=5 * tokens // BLOCK,
            max_model_len=tokens + 64,
            kv_transfer_config=CONNECTOR,
            env={
                "TIERED_KV_CPU_GIB": f"{1.5 * (CONTEXTS + 1) * each:.4f}",
                "TIERED_KV_CPU_PATH": str(folder),
                "TIERED_KV_POLICY": "lru",
                "TIERED_KV_TRACE": str(trace),
            },
        )
        bar.disable = not show_progress
        task = bar.add_task("saving contexts", total=4)
        server = VllmServer(options, Path(name) / "server.log")
        try:
            server.start()
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
                prompts = texts(client, CONTEXTS, tokens)
                for prompt in prompts:
                    first_token_ms(client, prompt)
                held = cpu_pages(client)
            bar.update(task, advance=1, description="killing the server")
            with decoding(server.url):
                time.sleep(2.0)
                kill(server)
            bar.update(task, advance=1, description="starting it again")
            server.start()
            found = ADOPTED.search(server.log_text())
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
                first_token_ms(client, list(range(100, 400)))
                bar.update(task, advance=1, description="asking again")
                first = [_from_cpu(client, prompt) for prompt in prompts]
                later = [_from_cpu(client, prompt) for prompt in prompts]
        finally:
            server.stop()
        jobs = {job_of(prompt) for prompt in prompts}
        second = sum(turn.job in jobs and turn.turn == 2 for turn in TraceReader(trace))
    adopted = int(found[1]) if found else 0
    return {
        "adopted": adopted / held,
        "adopted_pages": adopted,
        "first_ratio": _ms(first) / _ms(later),
        "first_ms": _ms(first),
        "cpu_ms": _ms(later),
        "jobs_found": second / CONTEXTS,
        "tails_found": sum(one.tokens["cpu_tokens"] == tokens - 1 for one in first) / CONTEXTS,
        "start_s": server.start_s,
        "tokens": tokens,
    }


def _ms(answers: Sequence[Answered]) -> float:
    return statistics.median(one.ms for one in answers)


def _from_cpu(client: httpx.Client, prompt: list[int]) -> Answered:
    answered = answer(client, prompt)
    if answered.tokens["cpu_tokens"] < 0.9 * len(prompt):
        raise RuntimeError(f"a context did not come from CPU memory: {answered.tokens}")
    return answered


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    shared: Annotated[
        Path, typer.Option(help="Folder on tmpfs, in which the memory gets one of its own.")
    ] = SHARED_MEMORY,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what is found again after a server was killed."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-", dir=shared) as folder:
        measured = measure(
            model or small_model(),
            tokens,
            Path(folder),
            show_progress=not as_json and sys.stderr.isatty(),
        )
    result = {**measured, "dtype": str(machine_dtype())}
    show("Contexts of a server that was killed", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
