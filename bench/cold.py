"""CPU memory that is too small, with its waiting pages compressed and without.

    python -m bench.cold --json

Real servers, one run. Twenty texts of 3,000 tokens are sent in turn, several times over, to a
server whose CPU memory has space for fifteen and a half of them and whose KV pool holds one. The
same server with ``TIERED_KV_CODEC=raw`` compresses nothing. On both, a request then decodes while
pages are compressed. A context twice as large as CPU memory comes back from SSD. A third server has
space for all that it is sent: ``unannounced_ratio`` is the time of requests whose pages were
compressed, over the time of requests whose pages were not plus the time to decode that many bytes
at the speed that the server measured at its start. A last server has an SSD folder, where pages go
as CPU memory has compressed them: ``demoted_compressed`` pages went, and ``demoted_encoded`` of
them were encoded once more. Where tokens came from is reported with the answers and by the server's
metrics.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.restore import answer, first_token_ms, served, texts
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

CONTEXTS, SPACE = 20, 15.5
"""Contexts that are sent, and those that CPU memory has space for uncompressed."""
MORE = 3
"""Contexts that are sent last, so that there are more pages than fit."""
ROUNDS = 3
"""The first one fills the tiers, and is not counted."""
HOT = 4
"""Contexts of the server that has space for them."""
LITTLE = 6.0
"""Contexts that CPU memory has space for above an SSD: pages are compressed before they are
demoted."""
GAP_S = 0.2
"""Time of a tool, between two requests."""
DECODED = 96
"""Tokens of the answer during which the others' pages are compressed."""
BYTES_A_TOKEN = {"bfloat16": 2.25e4, "float16": 2.25e4, "float32": 4.5e4}
"""KV of the small model, by dtype."""
STEPS = 2 * (CONTEXTS * ROUNDS + 1 + MORE) + 2 * ROUNDS * HOT + 2 + CONTEXTS + MORE
RAW = {"TIERED_KV_CODEC": "raw"}


@dataclass(frozen=True, slots=True)
class Played:
    """One server's figures.

    Attributes:
        pages_ratio: pages in CPU memory over its slots, when it is full.
        recomputed: prompt tokens that were computed, in the rounds that count.
        times_s: times of their requests. Most of them find everything, if any do.
        token_ms: median time of a decoded token while pages were compressed.
        compressed: pages that were compressed so far.
        decode_rate: speed at which pages are decoded, bytes a second; 0 if they are not.
    """

    pages_ratio: float
    recomputed: int
    times_s: Sequence[float]
    token_ms: float
    compressed: int
    decode_rate: float


class Trial:
    """Servers that differ in how they compress.

    Args:
        tick: called before every request.
    """

    def __init__(self, model: Path, tokens: int, folder: Path, tick: Callable[[str], None]) -> None:
        self._model = model
        self._tokens = tokens
        self._folder = folder
        self._tick = tick
        self.context_bytes = tokens * BYTES_A_TOKEN[machine_dtype().name]

    @contextmanager
    def _server(
        self, space: float, env: Mapping[str, str]
    ) -> Iterator[tuple[VllmServer, httpx.Client]]:
        """A server with CPU memory for ``space`` contexts, and a KV pool for little more than
        one. It pins nothing: what leaves VRAM must come from elsewhere."""
        settings = {
            "TIERED_KV_CPU_GIB": f"{space * self.context_bytes / GIB:.4f}",
            "TIERED_KV_PIN_FRACTION": "0",
        }
        options = ServerOptions(
            model=self._model,
            kv_blocks=13 * self._tokens // 320,
            max_model_len=self._tokens + DECODED + 64,
            kv_transfer_config=CONNECTOR,
            extra_args=("--shutdown-timeout", "10"),
            env={**settings, **env},
        )
        with served(options, self._folder) as running:
            yield running

    def _send(self, client: httpx.Client, prompts: Sequence[list[int]], what: str) -> list[float]:
        """Send contexts, each after a tool's time; the seconds that each took."""
        times = list[float]()
        for prompt in prompts:
            self._tick(what)
            times.append(first_token_ms(client, prompt) / 1e3)
            time.sleep(GAP_S)
        return times

    def play(self, env: Mapping[str, str]) -> Played:
        """Send the contexts in turn, round after round."""
        with self._server(SPACE, env) as (server, client):
            prompts = texts(client, CONTEXTS, self._tokens)
            self._send(client, prompts, "filling the tiers")
            before = events(server.metrics_text())
            times = self._send(client, prompts * (ROUNDS - 1), "rounds")
            after = events(server.metrics_text())
            token_ms = self._decode(client, prompts)
            others = [[*reversed(prompt)] for prompt in prompts[1 : 1 + MORE]]
            self._send(client, others, "more than fits")
            full = events(server.metrics_text())
            name = "prompt_tokens_recomputed"
            return Played(
                pages_ratio=full["cpu_pages"] / full["cpu_slots"],
                recomputed=int(after[name] - before[name]),
                times_s=times,
                token_ms=token_ms,
                compressed=int(full["pages_compressed"]),
                decode_rate=decode_rate(server.log_text()),
            )

    def hot_s(self) -> float:
        """Send contexts that CPU memory has space for; the median time of a request, seconds."""
        with self._server(HOT + 1, RAW) as (_, client):
            prompts = texts(client, HOT, self._tokens) * ROUNDS * 2
            return statistics.median(self._send(client, prompts, "with space for all")[HOT:])

    def demoted(self) -> tuple[int, int]:
        """Send more contexts than CPU memory has space for, with an SSD folder below it; the
        pages that went there compressed, and how many of them were encoded once more."""
        with self._server(LITTLE, self._ssd("below")) as (server, client):
            for prompt in texts(client, CONTEXTS + MORE, self._tokens):
                self._tick("to SSD")
                first_token_ms(client, prompt)
            seen = events(server.metrics_text())
            again = int(seen["ssd_pages_recompressed"])
            return again + int(seen["ssd_pages_kept_compressed"]), again

    def oversize(self) -> float:
        """Send a context twice as large as CPU memory, which an engine with more of it has left on
        SSD; the fraction of its tokens that came back."""
        tokens: Mapping[str, int] = {}
        for space in (2.0, 0.5):
            self._tick("twice as large")
            with self._server(space, self._ssd("ssd")) as (_, client):
                tokens = answer(client, texts(client, 1, self._tokens)[0]).tokens
        return tokens["ssd_tokens"] / tokens["prompt_tokens"]

    def _ssd(self, name: str) -> dict[str, str]:
        return {"TIERED_KV_SSD_PATH": str(self._folder / name), "TIERED_KV_SSD_GIB": "4"}

    def _decode(self, client: httpx.Client, prompts: Sequence[list[int]]) -> float:
        """Decode after a new context, for which the others' pages are compressed meanwhile; the
        median time of a token, milliseconds."""
        self._tick("decoding")
        body = {
            "model": MODEL_NAME,
            "prompt": [*reversed(prompts[0])],
            "max_tokens": DECODED,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            lines = response.iter_lines()
            times = [time.perf_counter() for line in lines if line.startswith("data: {")]
        return 1e3 * statistics.median(b - a for a, b in pairwise(times))


def decode_rate(log: str) -> float:
    """Speed at which a server decodes pages according to its log, bytes a second; 0 if the log does
    not say."""
    found = re.search(r"decodes (\S+) GB/s on each of (\d+) threads", log)
    return float(found[1]) * 1e9 * int(found[2]) if found else 0.0


def measure(model: Path, tokens: int, tick: Callable[[str], None]) -> dict[str, float | int | str]:
    """Play with compression and without, and restore what is too large.

    Raises:
        RuntimeError: the server compresses nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(model, tokens, Path(name), tick)
        raw, cold = trial.play(RAW), trial.play({})
        if not cold.decode_rate:
            raise RuntimeError("the server compresses nothing; its log has the reason")
        hot_s = trial.hot_s()
        oversize = trial.oversize()
        demoted_compressed, demoted_encoded = trial.demoted()
    mean_s, mean_raw_s = statistics.mean(cold.times_s), statistics.mean(raw.times_s)
    cold_s = statistics.median(cold.times_s)
    return {
        "pages_ratio": cold.pages_ratio / raw.pages_ratio,
        "recomputed_ratio": cold.recomputed / max(1, raw.recomputed),
        "jct_ratio": mean_s / mean_raw_s,
        "oversize_restored": oversize,
        "decode_ratio": cold.token_ms / raw.token_ms,
        "unannounced_ratio": cold_s / (hot_s + trial.context_bytes / cold.decode_rate),
        "demoted_compressed": demoted_compressed,
        "demoted_encoded": demoted_encoded,
        "cold_ms": 1e3 * cold_s,
        "hot_ms": 1e3 * hot_s,
        "recomputed": cold.recomputed,
        "recomputed_raw": raw.recomputed,
        "mean_s": mean_s,
        "mean_raw_s": mean_raw_s,
        "pages_compressed": cold.compressed,
        "tokens": tokens,
        "dtype": str(machine_dtype()),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what compressing CPU memory gains."""
    title = "CPU memory with its waiting pages compressed, over without"
    with benchmark(title, STEPS, as_json=as_json) as run:
        run.result = measure(model or small_model(), tokens, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
