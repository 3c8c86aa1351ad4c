"""Time to first token of a context by where its KV is: nowhere, on SSD, in CPU memory, in VRAM.

    python -m bench.restore --json

Real servers, one run. Eight texts of 3,000 tokens are sent in turn, which is more than the KV pool
holds. Each is then sent twice again: once when it has left VRAM (its pages come from CPU memory),
and right after that (VRAM). Then the same with CPU memory for three of them, so that each comes
from SSD, and once more after that server was restarted. The connector reports with each answer
where the tokens came from, and a sample from anywhere else is an error, not a number. Where
computing is faster than the SSD, the connector computes: such contexts are counted in ``computed``,
and a tier that gave none has ``null`` for a time.

The client and the texts are those of ``bench.restart`` and ``bench.cold`` too.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
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
"""Contexts that fill half of CPU memory, from when on pages are demoted."""
BLOCK = 32
"""Tokens of a block: the smallest that vLLM's CPU build takes."""
CHARACTERS = 6
"""Characters of source text that are more than a token."""
TIMEOUT_S = 600.0
WARM_UP = tuple(range(100, 400))
SSD, COMPUTED = "ssd_tokens", "recomputed_tokens"
SOURCES = {
    "cold": COMPUTED,
    "cpu": "cpu_tokens",
    "vram": "vram_tokens",
    "ssd": SSD,
    "ssd_after_restart": SSD,
}
"""Name of the connector's count of tokens, by kind of request."""


# -- the client and its texts --------------------------------------------------------------


def texts(
    client: httpx.Client, count: int, tokens: int, model: str = MODEL_NAME
) -> list[list[int]]:
    """Prompts of exactly ``tokens`` token ids. Each starts with another file of the standard
    library, and continues with the next ones."""
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
        ms: time until it was received, milliseconds.
        tokens: tokens of its prompt by where they came from, as the connector names them.
    """

    ms: float
    tokens: Mapping[str, int]

    def is_from(self, source: str) -> bool:
        """True if the prompt came from there, except for its end."""
        return self.tokens[source] >= 0.9 * self.tokens["prompt_tokens"]


def job_of(prompt: Sequence[int]) -> str:
    """Name of the job that sends a prompt."""
    return f"prompt-{hash(tuple(prompt)):x}"


def answer(client: httpx.Client, prompt: Sequence[int]) -> Answered:
    """Request one token. Equal prompts are turns of one job."""
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
    return Answered(ms, response.json()["kv_transfer_params"]["tiered_kv"])


def first_token_ms(client: httpx.Client, prompt: Sequence[int]) -> float:
    """Milliseconds until the answer to a prompt, one token long, is received."""
    return answer(client, prompt).ms


def median_ms(answers: Sequence[Answered]) -> float:
    """Median time of answers, milliseconds."""
    return statistics.median(one.ms for one in answers)


# -- the servers ---------------------------------------------------------------------------


def context_gib(model: Path, tokens: int) -> float:
    """Size of a context's pages, for a model with full attention only; with a tenth to spare.

    Raises:
        ModelError: its configuration does not tell.
    """
    layers = read_shape(model, gpu="h100-80", dtype=machine_dtype().name).kv
    return 1.1 * tokens * sum(one.layers * one.token_bytes for one in layers) / GIB


def small_pool(model: Path, tokens: int, env: Mapping[str, str]) -> ServerOptions:
    """Options of a server whose KV pool holds fewer contexts than are sent. It pins nothing, so
    that what is evicted from VRAM must come from elsewhere."""
    return ServerOptions(
        model=model,
        block_size=BLOCK,
        kv_blocks=5 * tokens // BLOCK,
        max_model_len=tokens + 64,
        kv_transfer_config=CONNECTOR,
        env={"TIERED_KV_POLICY": "lru", **env},
    )


@contextmanager
def served(options: ServerOptions, folder: Path) -> Iterator[tuple[VllmServer, httpx.Client]]:
    """A server with its log in ``folder``, and a client; it has answered a request before."""
    server = VllmServer(options, folder / "server.log")
    with server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        first_token_ms(client, WARM_UP)
        yield server, client


# -- the measurement -----------------------------------------------------------------------


class Samples:
    """Answers by where their KV was to come from, checked against where it did.

    Args:
        tick: called after every request, with its kind.

    Attributes:
        computed: contexts on SSD that were computed instead.
    """

    def __init__(self, tick: Callable[[str], None]) -> None:
        self.answers = defaultdict[str, list[Answered]](list)
        self.computed = 0
        self._tick = tick

    def add(self, client: httpx.Client, prompt: Sequence[int], *kinds: str) -> None:
        """Send a prompt once for each kind.

        Raises:
            RuntimeError: its KV did not come from where it was meant to.
        """
        for kind in kinds:
            answered = answer(client, prompt)
            self._tick(kind)
            if answered.is_from(SOURCES[kind]):
                self.answers[kind].append(answered)
            elif SOURCES[kind] == SSD and answered.is_from(COMPUTED):
                self.computed += 1
            else:
                raise RuntimeError(f"a {kind} request was served from elsewhere: {answered.tokens}")

    def medians(self) -> dict[str, float | None]:
        """Median time of each kind, milliseconds; None without any."""
        found = {kind: self.answers[kind] for kind in SOURCES}
        return {kind: median_ms(those) if those else None for kind, those in found.items()}


def warm_up_ssd(client: httpx.Client, prompts: Sequence[Sequence[int]]) -> None:
    """Send contexts and wait until pages of them are on SSD. The first ones take long: the codec is
    trained on them, on cores that the model needs, and what is evicted meanwhile is lost.

    Raises:
        TimeoutError: none is on SSD after a minute.
    """
    for prompt in prompts:
        first_token_ms(client, prompt)
    until = time.monotonic() + 60
    while not events(client.get("/metrics").text).get("ssd_pages"):
        if time.monotonic() > until:
            raise TimeoutError("no page was demoted to SSD")
        first_token_ms(client, WARM_UP[:100])  # an idle engine receives no reports
        time.sleep(0.1)


def measure(
    model: Path, tokens: int, load_format: str, tick: Callable[[str], None]
) -> dict[str, float | str | None]:
    """Three servers: CPU memory for everything; CPU memory for a few contexts, and an SSD; the same
    after a restart."""
    samples = Samples(tick)
    each = context_gib(model, tokens)
    everything = f"{1.25 * (CONTEXTS + FIRST) * each:.4f}"
    load = ("--load-format", load_format)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        roomy = replace(
            small_pool(model, tokens, {"TIERED_KV_CPU_GIB": everything}), extra_args=load
        )
        on_ssd = {
            "TIERED_KV_CPU_GIB": f"{3 * each:.4f}",
            "TIERED_KV_SSD_PATH": str(folder / "ssd"),
            "TIERED_KV_SSD_GIB": everything,
        }
        tight = replace(
            small_pool(model, tokens, on_ssd), extra_args=(*load, "--shutdown-timeout", "10")
        )
        with served(roomy, folder) as (_, client):
            *prompts, one, other = texts(client, CONTEXTS + FIRST, tokens)
            for prompt in prompts:
                samples.add(client, prompt, "cold")
            for prompt in prompts:
                samples.add(client, prompt, "cpu", "vram")
        with served(tight, folder) as (_, client):
            warm_up_ssd(client, [other, one])
            for prompt in prompts:
                samples.add(client, prompt, "cold")
            for prompt in prompts:
                samples.add(client, prompt, "ssd")
        with served(tight, folder) as (_, client):
            for prompt in prompts:
                samples.add(client, prompt, "ssd_after_restart")
    median = samples.medians()
    return {
        **{f"{kind}_ms": ms for kind, ms in median.items()},
        "cold_over_cpu": _ratio(median["cold"], median["cpu"]),
        "cpu_over_vram": _ratio(median["cpu"], median["vram"]),
        "cold_over_ssd": _ratio(median["cold"], median["ssd"]),
        "cold_over_ssd_after_restart": _ratio(median["cold"], median["ssd_after_restart"]),
        "tokens": tokens,
        "samples": CONTEXTS,
        "computed": samples.computed,
        "dtype": str(machine_dtype()),
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
    title = f"Time to first token of {tokens:,} tokens, medians"
    with benchmark(title, 6 * CONTEXTS, as_json=as_json) as run:
        run.result = measure(model or small_model(), tokens, load_format, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
