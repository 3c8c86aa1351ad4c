"""CPU memory that is too small, with its waiting pages compressed and without.

    python -m bench.cold --json

Real servers, one run. Twenty texts of 3,000 tokens are asked in turn, several times over, from a
server whose CPU memory has room for fifteen and a half of them and whose KV pool holds one. The
same server with ``TIERED_KV_CODEC=raw`` compresses nothing. Beside that, a request decodes while
pages are compressed; and a context twice as large as CPU memory comes back from SSD. A third server
has room for all that it is asked for: ``unannounced_ratio`` is the time of requests whose pages
were compressed, over that of requests whose pages were not and the time to decode as many bytes at
the speed that the server measured at its start. A last server has an SSD folder, where pages go as
CPU memory has compressed them: ``demoted_compressed`` pages went, and ``demoted_encoded`` of them
were encoded once more. Where tokens came from is told with the answers and by the server's metrics.
"""

from __future__ import annotations

import re
import statistics
import sys
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

from tiered_kv.bench.output import AsJson, ModelFolder, progress, run_benchmark, show
from tiered_kv.bench.restore import answer, first_token_ms, texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    MODEL_NAME,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.doctor.running_server import events

CONTEXTS, ROOM = 20, 15.5
"""Contexts that are asked for, and those that CPU memory has room for as they are."""
MORE = 3
"""Contexts that are asked for in the end, so that there are more pages than fit."""
ROUNDS = 3
"""The first one fills the tiers, and is not counted."""
HOT = 4
"""Contexts of the server that has room for them."""
LITTLE = 6.0
"""Contexts that CPU memory has room for above an SSD: pages are compressed before they go down."""
GAP_S = 0.2
"""Time of a tool, between two requests."""
DECODED = 96
"""Tokens of the answer during which the others' pages are compressed."""
BYTES_A_TOKEN = {"bfloat16": 2.25e4, "float16": 2.25e4, "float32": 4.5e4}
"""KV of the small model, by dtype."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One server's figures.

    Attributes:
        pages_ratio: pages in CPU memory over its slots, when it is full.
        recomputed: prompt tokens that were computed, of the rounds that count.
        mean_s: mean time of their requests.
        median_s: median of the same: most of them find everything, if any do.
        token_ms: mean time of a decoded token while pages were compressed.
        compressed: pages that were compressed so far.
        decode_rate: speed at which pages are decoded, bytes a second; 0 if they are not.
    """

    pages_ratio: float
    recomputed: int
    mean_s: float
    median_s: float
    token_ms: float
    compressed: int
    decode_rate: float


class Trial:
    """Servers that differ in what they are told of compression.

    Args:
        tell: told of every request before it is sent.
    """

    def __init__(self, model: Path, tokens: int, folder: Path, tell: Callable[[str], None]) -> None:
        self._model = model
        self._tokens = tokens
        self._folder = folder
        self._tell = tell
        self.context_bytes = tokens * BYTES_A_TOKEN[machine_dtype().name]
        self._context_gib = self.context_bytes / (1 << 30)

    @contextmanager
    def _server(
        self, room: float, longest: int, env: Mapping[str, str]
    ) -> Iterator[tuple[VllmServer, httpx.Client]]:
        """A server with CPU memory for ``room`` contexts, and a KV pool for little more than
        one."""
        # Nothing is pinned: what leaves VRAM must come from elsewhere.
        told = {
            "TIERED_KV_CPU_GIB": f"{room * self._context_gib:.4f}",
            "TIERED_KV_PIN_FRACTION": "0",
        }
        options = ServerOptions(
            model=self._model,
            kv_blocks=13 * longest // 320,
            max_model_len=longest + DECODED + 64,
            kv_transfer_config=CONNECTOR,
            extra_args=("--shutdown-timeout", "10"),
            env={**told, **env},
        )
        server = VllmServer(options, self._folder / "server.log")
        with server, httpx.Client(base_url=server.url, timeout=600) as client:
            first_token_ms(client, list(range(100, 400)))  # warm-up
            yield server, client

    def play(self, env: Mapping[str, str]) -> Seen:
        """Ask for the contexts in turn, round after round."""
        with self._server(ROOM, self._tokens, env) as (server, client):
            prompts = texts(client, CONTEXTS, self._tokens)
            times, before = list[float](), events("")
            for number in range(ROUNDS):
                if number == 1:
                    before = events(server.metrics_text())
                for prompt in prompts:
                    self._tell(f"round {number + 1}")
                    took = first_token_ms(client, prompt) / 1e3
                    if number:
                        times.append(took)
                    time.sleep(GAP_S)
            after = events(server.metrics_text())
            token_ms = self._decode(client, prompts)
            for prompt in prompts[1 : 1 + MORE]:
                self._tell("more than fits")
                first_token_ms(client, [*reversed(prompt)])
                time.sleep(GAP_S)
            full = events(server.metrics_text())
            return Seen(
                pages_ratio=full["cpu_pages"] / full["cpu_slots"],
                recomputed=int(
                    after["prompt_tokens_recomputed"] - before["prompt_tokens_recomputed"]
                ),
                mean_s=statistics.mean(times),
                median_s=statistics.median(times),
                token_ms=token_ms,
                compressed=int(full["pages_compressed"]),
                decode_rate=decode_rate(server.log_text()),
            )

    def hot(self) -> float:
        """Ask for contexts that CPU memory has room for as they are; the time of a request, s."""
        with self._server(HOT + 1, self._tokens, {"TIERED_KV_CODEC": "raw"}) as (_, client):
            prompts, times = texts(client, HOT, self._tokens), list[float]()
            for number in range(ROUNDS * 2):
                for prompt in prompts:
                    self._tell("with room for all")
                    took = first_token_ms(client, prompt) / 1e3
                    if number:
                        times.append(took)
                    time.sleep(GAP_S)
            return statistics.median(times)

    def demoted(self) -> tuple[int, int]:
        """Ask for more contexts than CPU memory has room for, with an SSD folder below it; the
        pages that went there compressed, and those of them that were encoded once more."""
        env = {"TIERED_KV_SSD_PATH": str(self._folder / "below"), "TIERED_KV_SSD_GIB": "4"}
        with self._server(LITTLE, self._tokens, env) as (server, client):
            for prompt in texts(client, CONTEXTS + MORE, self._tokens):
                self._tell("down to SSD")
                first_token_ms(client, prompt)
            seen = events(server.metrics_text())
            again = int(seen["ssd_pages_recompressed"])
            return again + int(seen["ssd_pages_kept_compressed"]), again

    def _decode(self, client: httpx.Client, prompts: Sequence[list[int]]) -> float:
        """Decode behind a new context, whose pages have the others compressed meanwhile; the time
        of a token, ms."""
        self._tell("decoding")
        prompt = [*reversed(prompts[0])]
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": DECODED,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        said = list[float]()
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said.append(time.perf_counter())
        return statistics.median(b - a for a, b in pairwise(said)) * 1e3

    def oversize(self) -> float:
        """Ask for a context twice as large as CPU memory, which an engine with more of it has left
        on SSD; the share of its tokens that came back."""
        env = {"TIERED_KV_SSD_PATH": str(self._folder / "ssd"), "TIERED_KV_SSD_GIB": "4"}
        tokens: Mapping[str, int] = {}
        for room in (2.0, 0.5):
            self._tell("twice as large")
            with self._server(room, self._tokens, env) as (_, client):
                tokens = answer(client, texts(client, 1, self._tokens)[0]).tokens
        return tokens["ssd_tokens"] / tokens["prompt_tokens"]


def decode_rate(log: str) -> float:
    """The speed at which a server said it decodes pages, bytes a second; 0 if it said nothing."""
    said = re.search(r"decodes (\S+) GB/s on each of (\d+) threads", log)
    return float(said[1]) * 1e9 * int(said[2]) if said else 0.0


def measure(model: Path, tokens: int, show_progress: bool) -> dict[str, float | int]:
    """Play with compression and without, and restore what is too large."""
    with tempfile.TemporaryDirectory() as name, progress() as bar:
        bar.disable = not show_progress
        task = bar.add_task(
            "starting the server",
            total=2 * (CONTEXTS * ROUNDS + 1 + MORE) + 2 * ROUNDS * HOT + 2 + CONTEXTS + MORE,
        )
        told = Trial(
            model, tokens, Path(name), lambda what: bar.update(task, advance=1, description=what)
        )
        raw, cold = told.play({"TIERED_KV_CODEC": "raw"}), told.play({})
        if not cold.decode_rate:
            raise RuntimeError("the server compresses nothing; its log said why")
        hot_s = told.hot()
        oversize = told.oversize()
        demoted_compressed, demoted_encoded = told.demoted()
    return {
        "pages_ratio": cold.pages_ratio / raw.pages_ratio,
        "recomputed_ratio": cold.recomputed / max(1, raw.recomputed),
        "jct_ratio": cold.mean_s / raw.mean_s,
        "oversize_restored": oversize,
        "decode_ratio": cold.token_ms / raw.token_ms,
        "unannounced_ratio": cold.median_s / (hot_s + told.context_bytes / cold.decode_rate),
        "demoted_compressed": demoted_compressed,
        "demoted_encoded": demoted_encoded,
        "cold_ms": 1e3 * cold.median_s,
        "hot_ms": 1e3 * hot_s,
        "recomputed": cold.recomputed,
        "recomputed_raw": raw.recomputed,
        "mean_s": cold.mean_s,
        "mean_raw_s": raw.mean_s,
        "pages_compressed": cold.compressed,
        "tokens": tokens,
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what compressing CPU memory gains."""
    measured = measure(
        model or small_model(), tokens, show_progress=not as_json and sys.stderr.isatty()
    )
    result = {**measured, "dtype": str(machine_dtype())}
    show("CPU memory with its waiting pages compressed, over without", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
