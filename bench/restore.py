"""Time to first token of a context by where its KV is: nowhere, on SSD, in CPU memory, in VRAM.

    python -m bench.restore --json

Real servers, one run. Eight texts of 3,000 tokens are asked in turn, which is more than
the KV pool holds; each is then asked twice again, when it has left VRAM (its pages come
from CPU memory) and right after (VRAM). Then the same with CPU memory for three of them, so
that each comes from SSD, and once more after that server was stopped and started. Where
the tokens really came from is told by the connector with each answer, and a sample from anywhere
else is an error, not a number.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tiered_kv.bench.common.model import small_model
from tiered_kv.bench.common.output import AsJson, ModelFolder, progress, run_benchmark, show
from tiered_kv.bench.common.server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.doctor.metrics_page import events

CONTEXTS = 8
FIRST = 2
"""Contexts that fill half of CPU memory, from when on pages go down."""


def texts(
    client: httpx.Client, count: int, tokens: int, model: str = MODEL_NAME
) -> list[list[int]]:
    """Prompts of exactly ``tokens`` token ids, from as many files of the standard library."""
    found: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        body = {"model": model, "prompt": path.read_text(errors="replace")[: tokens * 6]}
        ids = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == count:
            return found
    raise RuntimeError(f"the standard library has too few files of {tokens} tokens")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of one token.

    Attributes:
        ms: time until it was there, milliseconds.
        tokens: tokens of its prompt by where they came from, as the connector names them.
    """

    ms: float
    tokens: Mapping[str, int]


def answer(client: httpx.Client, prompt: Sequence[int]) -> Answered:
    """Ask for one token. Equal prompts are turns of one job, which the connector answers for."""
    job = f"prompt-{hash(tuple(prompt)):x}"
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"job_id": job},
    }
    began = time.perf_counter()
    response = client.post("/v1/completions", json=body).raise_for_status()
    ms = (time.perf_counter() - began) * 1e3
    said = response.json()["kv_transfer_params"]
    return Answered(ms, said["tiered_kv"])


def first_token_ms(client: httpx.Client, prompt: Sequence[int]) -> float:
    """Milliseconds until the answer to a prompt, one token long, is there."""
    return answer(client, prompt).ms


class Samples:
    """Times of requests by where their KV was to come from, checked against where it did.

    Args:
        advance: told of every request, with its kind.
    """

    def __init__(self, advance: Callable[[str], None]) -> None:
        self.times: dict[str, list[float]] = {}
        self._advance = advance

    @contextmanager
    def server(self, options: ServerOptions, folder: Path) -> Iterator[Ask]:
        """A server for some requests; what it gives sends one of a kind.

        Raises:
            RuntimeError: a request's KV did not come from where it was meant to.
        """
        # Nothing is pinned: what is evicted from VRAM must come from elsewhere.
        env = {**options.env, "TIERED_KV_POLICY": "lru"}
        server = VllmServer(replace(options, env=env), folder / "server.log")
        with server, httpx.Client(base_url=server.url, timeout=600) as client:
            first_token_ms(client, list(range(100, 400)))  # warm-up

            def ask(kind: str, prompt: list[int]) -> None:
                answered = answer(client, prompt)
                _check_sources(kind, answered.tokens)
                self.times.setdefault(kind, []).append(answered.ms)
                self._advance(kind)

            yield Ask(client, ask)


@dataclass(frozen=True)
class Ask:
    """A running server: its client, and how to time a request of some kind."""

    client: httpx.Client
    time: Callable[[str, list[int]], None]


def warm_up_ssd(client: httpx.Client, prompts: Sequence[Sequence[int]]) -> None:
    """Ask for contexts and wait until pages of them are on SSD. The first ones take long: the codec
    is trained on them, on cores that the model needs, and what is evicted meanwhile is lost.

    Raises:
        TimeoutError: none are there after a minute.
    """
    for prompt in prompts:
        first_token_ms(client, prompt)
    until = time.monotonic() + 60
    while not events(client.get("/metrics").text).get("ssd_pages"):
        if time.monotonic() > until:
            raise TimeoutError("no page went down to SSD")
        first_token_ms(client, list(range(100, 200)))  # an idle engine hears of nothing
        time.sleep(0.1)


def measure(model: Path, tokens: int, show_progress: bool) -> dict[str, float | int]:
    """Three servers: CPU memory for everything; CPU memory for a few contexts, and an SSD;
    the same after a restart.

    Raises:
        RuntimeError: a request's KV did not come from where it was meant to.
    """
    with tempfile.TemporaryDirectory() as name, progress() as bar:
        bar.disable = not show_progress
        folder = Path(name)
        task = bar.add_task("starting the server", total=6 * CONTEXTS)
        samples = Samples(lambda kind: bar.update(task, advance=1, description=kind))
        roomy = ServerOptions(
            model=model,
            kv_blocks=5 * tokens // 32,
            max_model_len=tokens + 64,
            kv_transfer_config=CONNECTOR,
            env={"TIERED_KV_CPU_GIB": "2"},
        )
        context_gib = 2.5e-5 * tokens  # about 23 kB a token
        tight = replace(
            roomy,
            extra_args=("--shutdown-timeout", "10"),
            env={
                "TIERED_KV_CPU_GIB": f"{3 * context_gib:.4f}",
                "TIERED_KV_SSD_PATH": str(folder / "ssd"),
                "TIERED_KV_SSD_GIB": "4",
            },
        )
        with samples.server(roomy, folder) as server:
            prompts = texts(server.client, CONTEXTS + FIRST, tokens)
            first = [prompts.pop() for _ in range(FIRST)]
            for prompt in prompts:
                server.time("cold", prompt)
            for prompt in prompts:
                server.time("cpu", prompt)
                server.time("vram", prompt)
        with samples.server(tight, folder) as server:
            warm_up_ssd(server.client, first)
            for prompt in prompts:
                server.time("cold", prompt)
            for prompt in prompts:
                server.time("ssd", prompt)
        with samples.server(tight, folder) as server:
            for prompt in prompts:
                server.time("ssd_after_restart", prompt)
    median = {f"{kind}_ms": statistics.median(ms) for kind, ms in samples.times.items()}
    return {
        **median,
        "cold_over_cpu": median["cold_ms"] / median["cpu_ms"],
        "cpu_over_vram": median["cpu_ms"] / median["vram_ms"],
        "cold_over_ssd": median["cold_ms"] / median["ssd_ms"],
        "cold_over_ssd_after_restart": median["cold_ms"] / median["ssd_after_restart_ms"],
        "tokens": tokens,
        "samples": CONTEXTS,
    }


def _check_sources(kind: str, tokens: Mapping[str, int]) -> None:
    source = {
        "cold": "recomputed_tokens",
        "cpu": "cpu_tokens",
        "vram": "vram_tokens",
        "ssd": "ssd_tokens",
        "ssd_after_restart": "ssd_tokens",
    }
    if tokens[source[kind]] < 0.9 * tokens["prompt_tokens"]:
        raise RuntimeError(f"a {kind} request was served from elsewhere: {tokens}")


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the first token by where the context is."""
    measured = measure(
        model or small_model(), tokens, show_progress=not as_json and sys.stderr.isatty()
    )
    result = {**measured, "dtype": str(machine_dtype())}
    show(f"Time to first token of {tokens:,} tokens, medians", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
