"""Time to first token of a context by where its KV is: nowhere, on SSD, in CPU memory, in VRAM.

    python -m bench.restore --json

Real servers, one run. Eight texts of 3,000 tokens are asked in turn, which is more than
the KV pool holds; each is then asked twice again, when it has left VRAM (its pages come
from CPU memory) and right after (VRAM). Then the same with CPU memory for three of them, so
that each comes from SSD, and once more after that server was stopped and started. Where
the tokens really came from is told by the connector with each answer, and a sample from anywhere
else is an error, not a number. Where computing is faster than the SSD, the connector computes:
such contexts are counted in ``computed``, and a tier that gave none has ``null`` for a time.
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

from tiered_kv.bench.output import AsJson, ModelFolder, progress, run_benchmark, show
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.config import GIB
from tiered_kv.doctor.running_server import events
from tiered_kv.sizing.model_shape import read_shape

CONTEXTS = 8
FIRST = 2
"""Contexts that fill half of CPU memory, from when on pages go down."""
BLOCK = 32
"""Tokens of a block: the smallest that vLLM's CPU build takes."""
CHARACTERS = 6
"""Characters of source text that are more than a token."""
SSD, COMPUTED = "ssd_tokens", "recomputed_tokens"
SOURCES = {
    "cold": COMPUTED,
    "cpu": "cpu_tokens",
    "vram": "vram_tokens",
    "ssd": SSD,
    "ssd_after_restart": SSD,
}
"""Name of the connector's count of tokens, by kind of request."""


def texts(
    client: httpx.Client, count: int, tokens: int, model: str = MODEL_NAME
) -> list[list[int]]:
    """Prompts of exactly ``tokens`` token ids. Each begins with another file of the standard
    library, and goes on with the next ones."""
    found: list[list[int]] = []
    files = [
        path.read_text(errors="replace")
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    for first in range(len(files)):
        body = {"model": model, "prompt": "".join(files[first:])[: tokens * CHARACTERS]}
        ids = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == count:
            return found
    raise RuntimeError(f"the standard library has too little text for {count} of {tokens} tokens")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of one token.

    Attributes:
        ms: time until it was there, milliseconds.
        tokens: tokens of its prompt by where they came from, as the connector names them.
    """

    ms: float
    tokens: Mapping[str, int]


def job_of(prompt: Sequence[int]) -> str:
    """Name of the job that asks a prompt."""
    return f"prompt-{hash(tuple(prompt)):x}"


def answer(client: httpx.Client, prompt: Sequence[int]) -> Answered:
    """Ask for one token. Equal prompts are turns of one job, which the connector answers for."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"job_id": job_of(prompt)},
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

    Attributes:
        computed: contexts on SSD that were computed instead.
    """

    def __init__(self, advance: Callable[[str], None]) -> None:
        self.times: dict[str, list[float]] = {}
        self.computed = 0
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
                self._advance(kind)
                if SOURCES[kind] == SSD and _is_from(answered.tokens, COMPUTED):
                    self.computed += 1
                    return
                if not _is_from(answered.tokens, SOURCES[kind]):
                    raise RuntimeError(
                        f"a {kind} request was served from elsewhere: {answered.tokens}"
                    )
                self.times.setdefault(kind, []).append(answered.ms)

            yield Ask(client, ask)

    def median_ms(self, kind: str) -> float | None:
        """Median of a kind's times; None if it has none."""
        return statistics.median(self.times[kind]) if kind in self.times else None


def _is_from(tokens: Mapping[str, int], source: str) -> bool:
    """True if a prompt came from there, but for its end."""
    return tokens[source] >= 0.9 * tokens["prompt_tokens"]


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


def context_gib(model: Path, tokens: int) -> float:
    """Size of a context's pages, of a model of attention over everything; a tenth is left over.

    Raises:
        ModelError: its configuration does not tell.
    """
    layers = read_shape(model, gpu="h100-80", dtype=machine_dtype().name).kv
    return 1.1 * tokens * sum(one.layers * one.token_bytes for one in layers) / GIB


def measure(
    model: Path, tokens: int, load_format: str, show_progress: bool
) -> dict[str, float | None]:
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
        each = context_gib(model, tokens)
        everything = 1.25 * (CONTEXTS + FIRST) * each
        roomy = ServerOptions(
            model=model,
            block_size=BLOCK,
            kv_blocks=5 * tokens // BLOCK,
            max_model_len=tokens + 64,
            kv_transfer_config=CONNECTOR,
            env={"TIERED_KV_CPU_GIB": f"{everything:.4f}"},
            extra_args=("--load-format", load_format),
        )
        tight = replace(
            roomy,
            extra_args=(*roomy.extra_args, "--shutdown-timeout", "10"),
            env={
                "TIERED_KV_CPU_GIB": f"{3 * each:.4f}",
                "TIERED_KV_SSD_PATH": str(folder / "ssd"),
                "TIERED_KV_SSD_GIB": f"{everything:.4f}",
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
    median = {kind: samples.median_ms(kind) for kind in SOURCES}
    return {
        **{f"{kind}_ms": ms for kind, ms in median.items()},
        "cold_over_cpu": _ratio(median["cold"], median["cpu"]),
        "cpu_over_vram": _ratio(median["cpu"], median["vram"]),
        "cold_over_ssd": _ratio(median["cold"], median["ssd"]),
        "cold_over_ssd_after_restart": _ratio(median["cold"], median["ssd_after_restart"]),
        "tokens": tokens,
        "samples": CONTEXTS,
        "computed": samples.computed,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below is not None else None


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    model: ModelFolder = None,
    load_format: Annotated[
        str,
        typer.Option(help="As vLLM's option of that name. dummy: random weights, none are read."),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the first token by where the context is."""
    measured = measure(
        model or small_model(),
        tokens,
        load_format,
        show_progress=not as_json and sys.stderr.isatty(),
    )
    result = {**measured, "dtype": str(machine_dtype())}
    show(f"Time to first token of {tokens:,} tokens, medians", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
