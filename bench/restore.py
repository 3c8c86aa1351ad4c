"""Time to first token by the place of the context's KV: nowhere, on SSD, in CPU memory, or in VRAM.

    python -m bench.restore --json

Uses real servers and one run. Eight texts of 3,000 tokens are sent in turn, which is more than the
KV pool holds. Each is then sent twice more: once after it has left VRAM (its pages come from CPU
memory), and again right after that (its pages are in VRAM). The texts are also sent to a server
with CPU memory for three of them, so that each comes from SSD, and once more after a restart of
that server. The connector reports the source of the tokens with each answer, and a sample from an
unintended source is an error. Where computing is faster than the SSD, the connector computes. Such
contexts are counted in ``computed``, and the time of a tier without samples is ``null``.

``bench.restart``, ``bench.cold``, ``bench.cluster`` and ``bench.snapshot`` use the same client,
texts and servers.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.agents.client import Answer, Ask, Reading, ask_over
from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
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
"""Number of contexts that fill half of CPU memory. After that, pages are demoted."""
BLOCK = 32
"""Tokens per block: the smallest size that vLLM's CPU build supports."""
CHARACTERS = 6
"""Characters per token of source text, an overestimate."""
TIMEOUT_S, SETTLE_S, POLL_S = 600.0, 60.0, 0.2
WARM_UP = tuple(range(100, 400))
CPU, SSD, COMPUTED = "cpu_tokens", "ssd_tokens", "recomputed_tokens"
SOURCES = {
    "cold": COMPUTED,
    "cpu": CPU,
    "vram": "vram_tokens",
    "ssd": SSD,
    "ssd_after_restart": SSD,
}
"""Names of the token counts that the connector reports, by type of request."""


# -- the client and its texts --------------------------------------------------------------


def texts(
    client: httpx.Client, count: int, tokens: int, model: str = MODEL_NAME
) -> list[list[int]]:
    """Return prompts of exactly ``tokens`` token ids. Each starts with a different file of the
    standard library and continues with the following files.

    Raises:
        RuntimeError: the standard library has too little text.
    """
    found: list[list[int]] = []
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [path.read_text(errors="replace") for path in paths]
    for first in range(len(files)):
        body = {"model": model, "prompt": "".join(files[first:])[: tokens * CHARACTERS]}
        ids = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == count:
            return found
    raise RuntimeError(
        f"the standard library has too little text for {count} prompts of {tokens} tokens"
    )


def job_of(prompt: Sequence[int]) -> str:
    """Return the default name of the job that sends a prompt."""
    return f"prompt-{hash(tuple(prompt)):x}"


def ask(
    client: httpx.Client,
    prompt: Sequence[int],
    job: str | None = None,
    tokens: int = 1,
    *,
    salt: str | None = None,
    logprobs: int | None = None,
    on_token: Callable[[Reading], None] | None = None,
) -> Answer:
    """Send a turn of a job, and wait for the complete answer of ``tokens`` tokens.

    Args:
        job: name of the job. Without a name, equal prompts are turns of the same job.
        salt: ``cache_salt``. KV is found only under the same salt.
        logprobs, on_token: see ``Ask`` and ``ask_over``.

    Raises:
        httpx.HTTPError, AnswerError: see ``ask_over``.
    """
    hints = {"kv_transfer_params": {"job_id": job or job_of(prompt)}}
    turn = Ask(prompt=prompt, max_tokens=tokens, salt=salt, logprobs=logprobs, extra=hints)
    return ask_over(client, MODEL_NAME, turn, on_token=on_token)


def is_from(answer: Answer, source: str) -> bool:
    """Return True if at least 90% of the prompt's tokens came from this source."""
    return answer.sources[source] >= 0.9 * answer.prompt_tokens


def median_ms(answers: Sequence[Answer]) -> float:
    """Return the median latency of answers, milliseconds."""
    return statistics.median(one.ms for one in answers)


def logprob_distance(one: Answer, other: Answer) -> float:
    """Return the largest difference between the logprobs of two answers to one prompt, up to and
    including the first differing token, after which the contexts differ.
    """
    largest = 0.0
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
    for mine, theirs, a, b in pairs:
        largest = max(largest, abs(a - b))
        if mine != theirs:
            break
    return largest


def counters(client: httpx.Client) -> Mapping[str, float]:
    """Return the values of the counters and gauges of a server's connector."""
    return events(client.get("/metrics").text)


def settled(client: httpx.Client, *names: str, polls: int = 5) -> list[int]:
    """Wait until the named counters are above zero and ``polls`` consecutive polls find no change.
    Returns the counters.

    Raises:
        TimeoutError: the counters do not settle within a minute.
    """
    until, before, quiet = time.monotonic() + SETTLE_S, list[int](), 0
    while time.monotonic() < until:
        ask(client, WARM_UP, "warm-up")  # an idle engine receives no reports
        found = counters(client)
        now = [int(found.get(name, 0)) for name in names]
        quiet = quiet + 1 if now == before and all(now) else 0
        if quiet == polls:
            return now
        before = now
        time.sleep(POLL_S)
    raise TimeoutError(f"the counters {', '.join(names)} did not settle within {SETTLE_S:g} s")


# -- the servers ---------------------------------------------------------------------------


def context_gib(model: Path, tokens: int) -> float:
    """Return the size of a context's pages plus 10%, GiB, for a model with only full attention.

    Raises:
        ModelError: the size cannot be computed from the model's configuration.
    """
    layers = read_shape(model, gpu="h100-80", dtype=machine_dtype().name).kv
    return 1.1 * tokens * sum(one.layers * one.token_bytes for one in layers) / GIB


def small_pool(model: Path, tokens: int, env: Mapping[str, str], *words: str) -> ServerOptions:
    """Return the options of a server whose KV pool holds fewer contexts than are sent. The server
    pins nothing, so evicted KV must be restored from another tier.

    Args:
        env: environment variables.
        words: further command line arguments.
    """
    return ServerOptions(
        model=model,
        block_size=BLOCK,
        kv_blocks=5 * tokens // BLOCK,
        max_model_len=tokens + 64,
        kv_transfer_config=CONNECTOR,
        env={"TIERED_KV_POLICY": "lru", **env},
        extra_args=words,
    )


@contextmanager
def client_of(server: VllmServer, headers: Mapping[str, str] = {}) -> Iterator[httpx.Client]:
    """Open a client of a running server, and send a warm-up request."""
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S, headers=headers) as client:
        ask(client, WARM_UP, "warm-up")
        yield client


@contextmanager
def served(options: ServerOptions, folder: Path) -> Iterator[tuple[VllmServer, httpx.Client]]:
    """Start a server with its log in ``folder``. Yields the server and a client."""
    with VllmServer(options, folder / "server.log") as server, client_of(server) as client:
        yield server, client


# -- the measurement -----------------------------------------------------------------------


def measure(model: Path, tokens: int, load_format: str, tick: Tick) -> dict[str, Any]:
    """Measure three servers: with CPU memory for all contexts; with CPU memory for a few contexts
    and an SSD; and the second server after a restart. Returns the median times, milliseconds, and
    their ratios.

    Raises:
        RuntimeError: the KV of a request did not come from the intended tier.
    """
    answers: dict[str, list[Answer]] = {kind: [] for kind in SOURCES}
    computed = 0

    def send(client: httpx.Client, *kinds: str) -> None:
        nonlocal computed
        for prompt in prompts:
            for kind in kinds:
                answer = ask(client, prompt)
                tick(kind)
                if is_from(answer, SOURCES[kind]):
                    answers[kind].append(answer)
                elif SOURCES[kind] == SSD and is_from(answer, COMPUTED):
                    computed += 1
                else:
                    raise RuntimeError(
                        f"less than 90% of the prompt of a {kind} request is in {SOURCES[kind]}: "
                        f"{answer.sources}"
                    )

    each, load = context_gib(model, tokens), ("--load-format", load_format)
    everything = f"{1.25 * (CONTEXTS + FIRST) * each:.4f}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_ssd = {
            "TIERED_KV_CPU_GIB": f"{3 * each:.4f}",
            "TIERED_KV_SSD_PATH": str(folder / "ssd"),
            "TIERED_KV_SSD_GIB": everything,
        }
        roomy = small_pool(model, tokens, {"TIERED_KV_CPU_GIB": everything}, *load)
        tight = small_pool(model, tokens, on_ssd, *load, "--shutdown-timeout", "10")
        with served(roomy, folder) as (_, client):
            *prompts, one, other = texts(client, CONTEXTS + FIRST, tokens)
            send(client, "cold")
            send(client, "cpu", "vram")
        with served(tight, folder) as (_, client):
            # The codec is trained on the first pages, on cores that the model also needs. Pages
            # that are evicted during training are lost.
            ask(client, other)
            ask(client, one)
            settled(client, "ssd_pages")
            send(client, "cold")
            send(client, "ssd")
        with served(tight, folder) as (_, client):
            send(client, "ssd_after_restart")
    ms = {kind: median_ms(found) if found else None for kind, found in answers.items()}
    return {
        **{f"{kind}_ms": median for kind, median in ms.items()},
        "cold_over_cpu": _ratio(ms["cold"], ms["cpu"]),
        "cpu_over_vram": _ratio(ms["cpu"], ms["vram"]),
        "cold_over_ssd": _ratio(ms["cold"], ms["ssd"]),
        "cold_over_ssd_after_restart": _ratio(ms["cold"], ms["ssd_after_restart"]),
        "tokens": tokens,
        "samples": CONTEXTS,
        "computed": computed,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def main(
    tokens: Tokens = 3000,
    model: ModelFolder = None,
    load_format: Annotated[
        str,
        typer.Option(help="Same as vLLM's --load-format. dummy uses random weights."),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the time to first token by the tier that holds the context."""
    title = f"Time to first token of {tokens:,} tokens, medians"
    with served_benchmark(title, 6 * CONTEXTS, model, as_json=as_json) as run:
        run.result = measure(run.model, tokens, load_format, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
