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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.restore import SSD, ask, counters, served, texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import (
    CONNECTOR,
    ServerOptions,
    VllmServer,
    machine_dtype,
)
from tiered_kv.config import GIB

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
DECODES = re.compile(r"decodes (\S+) GB/s on each of (\d+) threads")


@dataclass(frozen=True, slots=True)
class Trial:
    """Servers that differ in how they compress.

    Attributes:
        tick: called before every request.
    """

    model: Path
    tokens: int
    folder: Path
    tick: Callable[[str], None]

    @property
    def context_bytes(self) -> float:
        """Size of a context's pages."""
        return self.tokens * BYTES_A_TOKEN[machine_dtype().name]

    def server(
        self, space: float, env: Mapping[str, str]
    ) -> AbstractContextManager[tuple[VllmServer, httpx.Client]]:
        """A server with CPU memory for ``space`` contexts, and a KV pool for little more than
        one. It pins nothing: what leaves VRAM must come from elsewhere."""
        settings = {
            "TIERED_KV_CPU_GIB": f"{space * self.context_bytes / GIB:.4f}",
            "TIERED_KV_PIN_FRACTION": "0",
        }
        options = ServerOptions(
            model=self.model,
            kv_blocks=13 * self.tokens // 320,
            max_model_len=self.tokens + DECODED + 64,
            kv_transfer_config=CONNECTOR,
            extra_args=("--shutdown-timeout", "10"),
            env={**settings, **env},
        )
        return served(options, self.folder)

    def send(self, client: httpx.Client, prompts: Sequence[list[int]], what: str) -> list[float]:
        """Send contexts, each after a tool's time; the seconds that each took."""
        times = list[float]()
        for prompt in prompts:
            self.tick(what)
            times.append(ask(client, prompt).latency_s)
            time.sleep(GAP_S)
        return times

    def play(self, env: Mapping[str, str]) -> dict[str, Any]:
        """Send the contexts in turn, round after round.

        Returns:
            ``pages_ratio``: pages in CPU memory over its slots, when it is full; ``recomputed``:
            prompt tokens computed in the rounds that count; ``times``: seconds of their requests;
            ``token_ms``: median time of a token decoded while pages are compressed;
            ``compressed``: pages compressed so far; ``decode_rate``: speed at which the server
            decodes pages, bytes a second, 0 if it compresses none.
        """
        with self.server(SPACE, env) as (server, client):
            prompts = texts(client, CONTEXTS, self.tokens)
            self.send(client, prompts, "filling the tiers")
            before = counters(client)
            times = self.send(client, prompts * (ROUNDS - 1), "rounds")
            after = counters(client)
            self.tick("decoding")  # after a new context, for which the others' are compressed
            reversed_ = [[*reversed(prompt)] for prompt in prompts[: 1 + MORE]]
            arrived = ask(client, reversed_[0], tokens=DECODED, on_token=lambda _: None).times
            self.send(client, reversed_[1:], "more than fits")
            full = counters(client)
            name = "prompt_tokens_recomputed"
            found = DECODES.search(server.log_text())
            return {
                "pages_ratio": full["cpu_pages"] / full["cpu_slots"],
                "recomputed": int(after[name] - before[name]),
                "times": times,
                "token_ms": 1e3 * statistics.median(b - a for a, b in pairwise(arrived)),
                "compressed": int(full["pages_compressed"]),
                "decode_rate": float(found[1]) * 1e9 * int(found[2]) if found else 0.0,
            }

    def hot_s(self) -> float:
        """Send contexts that CPU memory has space for; the median time of a request, seconds."""
        with self.server(HOT + 1, RAW) as (_, client):
            prompts = texts(client, HOT, self.tokens) * ROUNDS * 2
            return statistics.median(self.send(client, prompts, "with space for all")[HOT:])

    def demoted(self) -> tuple[int, int]:
        """Send more contexts than CPU memory has space for, with an SSD folder below it; the
        pages that went there compressed, and how many of them were encoded once more."""
        with self.server(LITTLE, self._ssd("below")) as (_, client):
            for prompt in texts(client, CONTEXTS + MORE, self.tokens):
                self.tick("to SSD")
                ask(client, prompt)
            seen = counters(client)
            again = int(seen["ssd_pages_recompressed"])
            return again + int(seen["ssd_pages_kept_compressed"]), again

    def oversize(self) -> float:
        """Send a context twice as large as CPU memory, which an engine with more of it has left on
        SSD; the fraction of its tokens that came back."""
        for space in (2.0, 0.5):
            self.tick("twice as large")
            with self.server(space, self._ssd("ssd")) as (_, client):
                answer = ask(client, texts(client, 1, self.tokens)[0])
        return answer.sources[SSD] / answer.prompt_tokens

    def _ssd(self, name: str) -> dict[str, str]:
        return {"TIERED_KV_SSD_PATH": str(self.folder / name), "TIERED_KV_SSD_GIB": "4"}


def measure(model: Path, tokens: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Play with compression and without, and restore what is too large.

    Raises:
        RuntimeError: the server compresses nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(model, tokens, Path(name), tick)
        raw, cold = trial.play(RAW), trial.play({})
        if not cold["decode_rate"]:
            raise RuntimeError("the server compresses nothing; its log has the reason")
        hot_s = trial.hot_s()
        oversize = trial.oversize()
        demoted_compressed, demoted_encoded = trial.demoted()
    mean_s, mean_raw_s = statistics.mean(cold["times"]), statistics.mean(raw["times"])
    cold_s = statistics.median(cold["times"])  # most of them find everything, if any do
    return {
        "pages_ratio": cold["pages_ratio"] / raw["pages_ratio"],
        "recomputed_ratio": cold["recomputed"] / max(1, raw["recomputed"]),
        "jct_ratio": mean_s / mean_raw_s,
        "oversize_restored": oversize,
        "decode_ratio": cold["token_ms"] / raw["token_ms"],
        "unannounced_ratio": cold_s / (hot_s + trial.context_bytes / cold["decode_rate"]),
        "demoted_compressed": demoted_compressed,
        "demoted_encoded": demoted_encoded,
        "cold_ms": 1e3 * cold_s,
        "hot_ms": 1e3 * hot_s,
        "recomputed": cold["recomputed"],
        "recomputed_raw": raw["recomputed"],
        "mean_s": mean_s,
        "mean_raw_s": mean_raw_s,
        "pages_compressed": cold["compressed"],
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
