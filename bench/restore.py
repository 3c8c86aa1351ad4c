"""Time to first token of a context by where its KV is: nowhere, in CPU memory, in VRAM.

    python -m bench.restore --json

One real server, one run. Eight texts of 3,000 tokens are asked in turn, which is more than
the KV pool holds; each is then asked twice again, when it has left VRAM (its pages come
from CPU memory) and right after (VRAM). Where the tokens really came from is read from the
connector's trace, and a sample from anywhere else is an error, not a number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.model import small_model
from bench.output import parser, progress, show
from bench.server import MODEL_NAME, ServerOptions, VllmServer

CONTEXTS = 8
CONNECTOR = {
    "kv_connector": "TieredContinuumConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def texts(client: httpx.Client, count: int, tokens: int) -> list[list[int]]:
    """Prompts of exactly ``tokens`` token ids, from as many files of the standard library."""
    found: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        body = {"model": MODEL_NAME, "prompt": path.read_text(errors="replace")[: tokens * 6]}
        ids = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == count:
            return found
    raise RuntimeError(f"the standard library has too few files of {tokens} tokens")


def first_token_ms(client: httpx.Client, prompt: Sequence[int]) -> float:
    """Milliseconds until the answer to a prompt, one token long, is there."""
    body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return (time.perf_counter() - began) * 1e3


def measure(model: Path, tokens: int, show_progress: bool) -> dict[str, float | int]:
    """Run the server and the three kinds of requests.

    Raises:
        RuntimeError: a request's KV did not come from where it was meant to.
    """
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        bar.disable = not show_progress
        trace = Path(folder) / "trace.jsonl"
        options = ServerOptions(
            model=model,
            kv_blocks=5 * tokens // 32,
            max_model_len=tokens + 64,
            kv_transfer_config=CONNECTOR,
            env={"TIERED_KV_TRACE": str(trace), "TIERED_KV_CPU_GIB": "2"},
        )
        task = bar.add_task("starting the server", total=3 * CONTEXTS)
        server = VllmServer(options, Path(folder) / "server.log")
        with server, httpx.Client(base_url=server.url, timeout=120) as client:
            prompts = texts(client, CONTEXTS, tokens)
            first_token_ms(client, list(range(100, 400)))  # warm-up
            samples: list[tuple[str, float]] = []

            def sample(kind: str, prompt: list[int]) -> None:
                samples.append((kind, first_token_ms(client, prompt)))
                bar.update(task, advance=1, description=kind)

            for prompt in prompts:
                sample("cold", prompt)
            for prompt in prompts:
                sample("cpu", prompt)
                sample("vram", prompt)
        events = [json.loads(line) for line in trace.read_text().splitlines()]
        _check_sources([kind for kind, _ in samples], events[-len(samples) :])
    times = {kind: [ms for k, ms in samples if k == kind] for kind in ("cold", "cpu", "vram")}
    median = {f"{kind}_ms": statistics.median(values) for kind, values in times.items()}
    return {
        **median,
        "cold_over_cpu": median["cold_ms"] / median["cpu_ms"],
        "cpu_over_vram": median["cpu_ms"] / median["vram_ms"],
        "tokens": tokens,
        "samples": CONTEXTS,
    }


def _check_sources(kinds: Sequence[str], events: Sequence[dict[str, int]]) -> None:
    source = {"cold": "recomputed_tokens", "cpu": "cpu_tokens", "vram": "vram_tokens"}
    for kind, event in zip(kinds, events, strict=True):
        if event[source[kind]] < 0.9 * event["prompt_tokens"]:
            raise RuntimeError(f"a {kind} request was served from elsewhere: {event}")


def main() -> None:
    command = parser(__doc__.splitlines()[0])
    command.add_argument("--tokens", type=int, default=3000, help="length of the contexts")
    command.add_argument("--model", type=Path, help="a model folder; default: the small model")
    args: argparse.Namespace = command.parse_args()
    model = args.model or small_model()
    result = measure(model, args.tokens, show_progress=not args.json and sys.stderr.isatty())
    show(f"Time to first token of {args.tokens:,} tokens, medians", result, args.json)


if __name__ == "__main__":
    main()
