"""KV hints on a real server: every intent by every transport, their effects, and abuse.

    python -m bench.hints --json

``sent``: number of hints sent. ``executed``: number of these that the server accepted or clipped
(carried out in part, or for a shorter time), and whose effect the server's status shows.
``transports``: the outcome of each hint, with its transport. ``outcomes``: number of results that
the server reported, by outcome. ``prefetch``: contexts that exist only on SSD are prefetched before
their request. ``first_token_over_cpu_hit`` is the median time to first token of these requests,
relative to requests on the same server whose context was already in CPU memory.
``ssd_reads_after_arrival`` counts pages read from SSD after the requests' arrival. ``release``:
pages of a released job that remain after ``released_s``, except pages that another job shares.
``revise``: effect on a pin when a client revises what it stated about the running tool.
``route_ms``: time of a call on the idle server. ``abuse``: hostile calls of the route while streams
decode. ``p95_over_404s`` is the 95th percentile of the time between tokens during these calls,
divided by the same percentile during calls that vLLM refuses with 404.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.agents.forcing import server_env
from tiered_kv.bench.agents.paired import PairedRatio, drawn_order
from tiered_kv.bench.hints import abuse
from tiered_kv.bench.hints.senders import SENDERS, Sent, Server, play
from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
from tiered_kv.bench.restore import BLOCK, context_gib, texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer
from tiered_kv.policies.jobs.kv_hints import Intent, Outcome

SHORT_TOKENS = 12 * BLOCK
"""Length of the contexts that are not timed, tokens."""
CONTEXTS = 4
"""Number of contexts that are prefetched."""
TIMEOUT_S = 300.0
RELEASED_S = 1.0
"""Time after which no page of a released job may remain, seconds."""
SOON_S, LATER_S, LATE_S = 20.0, 60.0, 20_000.0
"""Tool times, seconds. The last is too long to be worth a pin."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a run.

    Attributes:
        tokens: length of the contexts that are timed.
        pairs: number of timed pairs.
        calls, rounds, rate: number of hostile calls, the rounds that they are divided into, and
            calls per second. An engine answers at most one call between two steps.
    """

    tokens: int = 3000
    pairs: int = 12
    calls: int = 10_000
    rounds: int = 20
    rate: float = 25.0


def options(model: Path, size: Size, folder: Path) -> ServerOptions:
    """Return the options of a server with an SSD tier. Its KV pool holds two contexts, and its CPU
    memory holds many."""
    blocks = max(160, 2 * size.tokens // BLOCK + 8)
    each = context_gib(model, size.tokens)
    return ServerOptions(
        model=model,
        block_size=BLOCK,
        kv_blocks=blocks,
        max_model_len=(blocks - 2) * BLOCK,
        kv_transfer_config=CONNECTOR,
        env={
            **server_env(),
            "PYTHONHASHSEED": abuse.HASH_SEED,
            "TIERED_KV_CPU_GIB": f"{max(0.5, 6 * (CONTEXTS + 3) * each):.4f}",
            "TIERED_KV_SSD_PATH": str(folder / "ssd"),
            "TIERED_KV_SSD_GIB": f"{max(1.0, 10 * (CONTEXTS + 3) * each):.4f}",
            "VLLM_PLUGINS": "tiered_kv",
        },
    )


# -- outcomes, releases, revisions ----------------------------------------------------


def provoke(server: Server, prompt: Sequence[int]) -> None:
    """Send hints that the server clips, defers or rejects, or whose target is missing."""
    server.turn("provoked", prompt)
    server.hint("pin", job_id="provoked", ttl="1h")  # longer than a pin may last
    server.hint("share", job_id="provoked")  # no such intent
    server.hint("pin", job_id="provoked", ttl_s=-1)
    server.hint("revise", token_ids=list(prompt), done=True)  # only a job has a gap
    server.hint("prefetch", job_id="unknown")
    server.hint("prefetch", "another salt", job_id="provoked")
    server.hint("release", "another salt", token_ids=list(prompt))
    server.settle()
    server.hint("demote", job_id="provoked")  # continues until the copies are written
    server.settle()


def release(server: Server, own: Sequence[int], shared: Sequence[int]) -> dict[str, Any]:
    """Release a job that has pages in every tier, and shares some of them with another job. Returns
    the number of its pages before the release, the number that remain afterwards, and the seconds
    until none remained or ``RELEASED_S`` had passed."""
    pages = len(shared) // BLOCK
    shared = shared[: pages * BLOCK]
    prompt = [*shared, *own]
    server.turn("released", prompt)
    server.turn("other", [*shared, *reversed(own)])
    server.settle()
    server.finish(Intent.DEMOTE, {"job_id": "released"})
    server.fill_vram()
    server.finish(Intent.PREFETCH, {"job_id": "released"})
    server.turn("released", prompt)  # its pages are now in VRAM, in CPU memory and on SSD
    before = server.settle()

    def found() -> int:
        """Return the number of pages at the start of the prompt that exist in any tier."""
        return int(server.hint("prefetch", token_ids=prompt).get("pages", 0))

    had, began = found(), time.monotonic()
    (result,) = server.call("DELETE", "/tiered_kv/jobs/released")
    while True:
        gauges = server.status()["gauges"]
        freed = {name: before[name] - gauges[name] for name in ("cpu_pages", "ssd_pages")}
        kept = max(int(result["pages"] - one) for one in freed.values())
        left, took = max(0, found() - pages, kept), time.monotonic() - began
        if not left or took > RELEASED_S:
            break
    job_left = server.job("released") is not None
    server.turn("other", [*shared, *reversed(own), 7])
    report = server.turn("next", prompt)
    return {
        "pages": had,
        "pages_shared": pages,
        "pages_released": result["pages"],
        "released_pages_left": left,
        "released_s": took,
        "job_left": job_left,
        "tokens_found_later": report["prompt_tokens"] - report["recomputed_tokens"] - len(shared),
    }


REVISIONS: Sequence[tuple[str, Mapping[str, Any], bool]] = (
    ("the tool takes longer", {"expected_tool_s": LATER_S}, True),
    ("the tool is nearly done", {"progress": 90, "total": 100}, True),
    ("the tool has ended", {"done": True}, True),
    ("the tool takes too long for a pin", {"expected_tool_s": LATE_S}, False),
    ("the tool has hardly begun", {"progress": 1e-6}, False),
    ("the tool takes too long, but a hint pins", {"expected_tool_s": LATE_S}, True),
)
"""Revisions of the forecast of a gap during which KV is pinned: the description, the fields of the
hint, and True if the pin must remain."""


def revise(server: Server, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Send each of ``REVISIONS`` to a job whose KV is pinned. Returns one row per revision: its
    outcome, whether the pin remains, and whether both are as expected.

    Raises:
        RuntimeError: a job was not pinned before its revision.
    """
    rows = []
    for (name, payload, goes_on), prompt in zip(REVISIONS, prompts, strict=True):
        server.turn(name, prompt, expected_tool_s=SOON_S)
        if "hint" in name:
            server.hint("pin", job_id=name, ttl_s=LATER_S)
        before = server.job(name)
        if before is None or not before["kv"]["pinned_blocks"]:
            raise RuntimeError(f"the job is not pinned: {before}")
        outcome = server.hint("revise", job_id=name, **payload)["outcome"]
        after = server.job(name)
        pinned = after is not None and after["kv"]["pinned_blocks"] > 0
        rows.append(
            {
                "revision": name,
                "outcome": outcome,
                "pin_goes_on": pinned,
                "as_said": outcome == Outcome.ACCEPTED and pinned == goes_on,
            }
        )
    return rows


# -- prefetch -------------------------------------------------------------------------


def prefetch(
    server: Server, prompts: Sequence[Sequence[int]], pairs: int, tick: Tick
) -> dict[str, Any]:
    """Measure the time to first token of contexts that were prefetched from SSD, and of contexts
    that were already in CPU memory.

    Raises:
        RuntimeError: less than 90% of a context came from CPU memory.
    """
    times: dict[str, list[float]] = {"cpu": [], "prefetched": []}
    reads = 0
    for at, prompt in enumerate(prompts):
        server.turn(f"context {at}", prompt)
    for pair in range(pairs):
        job, prompt = f"context {pair % len(prompts)}", prompts[pair % len(prompts)]
        for arm in drawn_order(list(times), abuse.SEED, pair):
            server.settle()
            if arm == "prefetched":
                server.fill_vram()
                server.finish(Intent.DEMOTE, {"job_id": job})
                server.finish(Intent.PREFETCH, {"job_id": job})
            server.fill_vram()
            before = server.settle()
            began = time.perf_counter()
            report = server.turn(job, prompt)
            times[arm].append(time.perf_counter() - began)
            after = server.settle()
            if report["cpu_tokens"] < 0.9 * len(prompt):
                raise RuntimeError(f"a context ({arm}) did not come from CPU memory: {report}")
            if arm == "prefetched":
                reads += int(after["pages_promoted"] - before["pages_promoted"])
                reads += report["ssd_tokens"] // BLOCK
        tick(f"prefetch, pair {pair + 1} of {pairs}")
    median = {name: statistics.median(found) for name, found in times.items()}
    ratio = PairedRatio.of(times["prefetched"], times["cpu"])
    return {
        "first_token_over_cpu_hit": median["prefetched"] / median["cpu"],
        "paired_ratio": ratio.value,
        "paired_interval": [ratio.low, ratio.high],
        "prefetched_ms": 1e3 * median["prefetched"],
        "cpu_hit_ms": 1e3 * median["cpu"],
        "ssd_reads_after_arrival": reads,
        "pairs": pairs,
        "tokens": len(prompts[0]),
    }


# -- the measurement ------------------------------------------------------------------


def measure(model: Path, size: Size, folder: Path, tick: Tick) -> dict[str, Any]:
    """Run all measurements on one server. Returns the figures named in the module docstring."""
    with ExitStack() as stack:
        made = options(model, size, folder)
        running = stack.enter_context(VllmServer(made, folder / "server.log"))
        http = stack.enter_context(httpx.Client(base_url=running.url, timeout=TIMEOUT_S))
        server = Server(http)
        short = texts(http, len(SENDERS) + 3 + len(REVISIONS) + abuse.VICTIMS, SHORT_TOKENS)
        server.settle()
        sent = list[Sent]()
        for sender in SENDERS:
            sent += play(server, sender, short.pop())
            tick(sender.name)
        provoke(server, short.pop())
        released = release(server, short.pop(), short.pop())
        revised = revise(server, [short.pop() for _ in REVISIONS])
        tick("outcomes, release and revision")
        contexts = texts(http, CONTEXTS, size.tokens)
        prefetched = prefetch(server, contexts, size.pairs, tick)
        routes = [*server.route_s]
        abused = abuse.measure(
            running,
            server,
            [short.pop() for _ in range(abuse.VICTIMS)],
            BLOCK,
            calls=size.calls,
            rounds=size.rounds,
            rate=size.rate,
            tick=tick,
        )
        outcomes = Counter(str(one["outcome"]) for one in server.results)
        running.check()
    return {
        "sent": len(sent),
        "executed": sum(one.executed for one in sent),
        "outcomes": {one.value: outcomes[one.value] for one in Outcome},
        "transports": [
            {
                "transport": one.transport,
                "intent": one.intent.value,
                "reported": one.reported,
                "outcome": one.outcome,
                "executed": one.executed,
            }
            for one in sent
        ],
        "prefetch": prefetched,
        "release": released,
        "revise": revised,
        "route_ms": {
            "median": 1e3 * statistics.median(routes),
            "largest": 1e3 * max(routes),
            "calls": len(routes),
        },
        "abuse": abused,
    }


def main(
    tokens: Tokens = 3000,
    pairs: Annotated[int, typer.Option(help="Number of pairs of timed requests.")] = 12,
    calls: Annotated[int, typer.Option(help="Number of hostile calls.")] = 10_000,
    rounds: Annotated[int, typer.Option(help="Number of rounds of hostile calls.")] = 20,
    rate: Annotated[float, typer.Option(help="Hostile calls per second.")] = 25.0,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Send KV hints to a real server, and check their effects."""
    size = Size(tokens, pairs, calls, rounds, rate)
    steps = len(SENDERS) + 1 + pairs + rounds
    with (
        tempfile.TemporaryDirectory() as folder,
        served_benchmark("KV hints", steps, model, as_json=as_json) as run,
    ):
        run.result = measure(run.model, size, Path(folder), run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
