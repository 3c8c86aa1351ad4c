"""Snapshots of jobs on real servers: their cost, and whether continuations are identical.

    python -m bench.snapshot --json

A server takes the snapshots, and is then restarted on the same folder. Then a second server of the
same configuration starts on a copy of that folder, as on another machine.

- ``pause_ms``: longest time between two tokens of a turn while its snapshot is taken, in excess of
  the usual time ``decode_ms``; ``pause_steps``: ``pause_ms`` as a multiple of ``decode_ms``;
  ``pause_control_ms``: the same excess without a snapshot; ``delay_ms``: total time of all tokens
  until the snapshot was on disk, in excess of the usual time.
- ``durable_ms``: time until a waiting job's snapshot is durable on disk.
- ``bytes_per_token``: size of the snapshot's pages on disk.
- ``restore_ms``: duration of the call that restores a snapshot; ``restore_engine_ms``: the part
  of it in the engine; ``restored_token_ms``: time to first token of the restored job's next turn.
  These are measured on the same server after a restart, and ``second_...`` on another server.
  ``recompute_ms``: time to first token of such a turn when it is recomputed. ``restore_ratio``:
  ``recompute_ms`` over the sum of ``restore_ms`` and ``restored_token_ms``.
- ``exact_equal``: number of continuations, out of ``exact``, that equal the uncut turn bit for
  bit. Each has 24 tokens, and starts at a random token of a turn. ``control_equal``: the same for
  continuations recomputed from the tokens.
- ``near_max_logprob``: largest logprob difference after a restore that is not exact;
  ``control_max_logprob``: the same after recomputing.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench import restore
from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
from tiered_kv.bench.restore import ask, logprob_distance, median_ms, settled, texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions
from tiered_kv.bench.snapshot.exactness import answer_during, cut_and_go_on, post

JOBS = 5
"""Number of contexts of full length."""
SHORT = 400
"""Maximum prompt length of exact continuations, tokens."""


@contextmanager
def served(model: Path, folder: Path, tokens: int) -> Iterator[httpx.Client]:
    """Start a server that stores snapshots in ``folder``. Yields a client."""
    options = ServerOptions(
        model=model,
        kv_blocks=6 * tokens // 32,
        max_model_len=tokens + 512,
        kv_transfer_config=CONNECTOR,
        env={
            "VLLM_PLUGINS": "tiered_kv",
            "TIERED_KV_CPU_GIB": "2",
            "TIERED_KV_SNAPSHOT_PATH": str(folder / "snapshots"),
        },
    )
    with restore.served(options, folder) as (_, client):
        yield client


def timed_post(client: httpx.Client, what: str, **asked: object) -> tuple[float, dict[str, Any]]:
    """POST to a snapshot route. Returns the duration in milliseconds, and the answer."""
    began = time.perf_counter()
    answer = post(client, what, **asked)
    return 1e3 * (time.perf_counter() - began), answer


def pause(client: httpx.Client, prompt: Sequence[int], job: str) -> dict[str, float]:
    """Take a snapshot of a turn while it generates its answer. Returns the delays of its tokens,
    milliseconds.
    """

    def take() -> tuple[float, float]:
        began = time.perf_counter()
        post(client, "snapshots", job=job, name=job)
        return began, time.perf_counter()

    answer, (began, over) = answer_during(client, prompt, job, 160, 40, take)
    gaps = [(1e3 * (end - start), end) for start, end in pairwise(answer.times)]
    during = [gap for gap, end in gaps if began <= end <= over]
    before = [gap for gap, end in gaps if end < began]
    usual = statistics.median(before)
    return {
        "pause_ms": max(during) - usual,
        "pause_control_ms": max(before[2:]) - usual,
        "decode_ms": usual,
        "delay_ms": sum(during) - usual * len(during),
    }


def measure(model: Path, tokens: int, exact: int, folder: Path, tick: Tick) -> dict[str, Any]:
    """Measure on a server, on the same server after a restart, and on a second server. Returns the
    figures that the module docstring explains.

    Args:
        exact: number of exact continuations.
        folder: folder for the snapshots.
    """
    with served(model, folder, tokens) as client:
        tick("computing")
        every = texts(client, JOBS + 2, tokens)
        prompts, (live, other) = every[:JOBS], every[JOBS:]
        computed = [ask(client, prompt, f"job-{i}") for i, prompt in enumerate(prompts)]
        settled(client, "cpu_pages")
        tick("taking")
        names = [{"job": f"job-{i}", "name": f"night-{i}"} for i in range(JOBS)]
        taken = [timed_post(client, "snapshots", **name) for name in names]
        tick("pausing")
        pauses = [pause(client, live, "live-0"), pause(client, other, "live-1")]
        found: dict[str, Any] = {
            "recompute_ms": median_ms(computed),
            "durable_ms": statistics.median(ms for ms, _ in taken),
            "bytes_per_token": statistics.median(
                one["stored_bytes"] / one["kv_tokens"] for _, one in taken
            ),
            **{name: max(one[name] for one in pauses) for name in pauses[0]},
        }
        found["pause_steps"] = found["pause_ms"] / found["decode_ms"]
        next_turn = [*prompts[0], *range(500, 540)]
        whole = ask(client, next_turn, "job-0", 24, logprobs=1)
    for kind, place in (("", folder), ("second_", folder / "second")):
        root = place / "snapshots"
        if kind:
            shutil.copytree(folder / "snapshots", root)
        with served(model, place, tokens) as client:
            tick("restoring")
            found |= restored(client, prompts[: JOBS - 1], kind)
            for name, job in (("near", "job-0"), ("control", "other")):
                salt = "other" if job == "other" else None
                answer = ask(client, next_turn, job, 24, salt=salt, logprobs=1)
                found[f"{kind}{name}_max_logprob"] = logprob_distance(answer, whole)
            if kind:
                found |= continued(client, root, every, exact, tick)
    total = found["restore_ms"] + found["restored_token_ms"]
    return {**found, "restore_ratio": found["recompute_ms"] / total, "tokens": tokens}


def restored(client: httpx.Client, prompts: Sequence[list[int]], kind: str) -> dict[str, float]:
    """Restore each job from its snapshot, and send the turn of the job whose KV the snapshot
    contains. Returns median times, milliseconds.

    Args:
        kind: prefix of the figures' names.
    """
    calls, engine, first = list[float](), list[float](), list[float]()
    for i, prompt in enumerate(prompts):
        ms, answer = timed_post(client, "restores", name=f"night-{i}")
        calls.append(ms)
        engine.append(answer["ms"])
        first.append(ask(client, prompt, f"job-{i}").ms)
    return {
        f"{kind}restore_ms": statistics.median(calls),
        f"{kind}restore_engine_ms": statistics.median(engine),
        f"{kind}restored_token_ms": statistics.median(first),
    }


def continued(
    client: httpx.Client, root: Path, prompts: Sequence[list[int]], count: int, tick: Tick
) -> dict[str, Any]:
    """Cut turns, continue them from exact snapshots, and count the continuations that are equal bit
    for bit.

    Args:
        root: folder of the snapshots.
        count: number of continuations.
    """
    found = []
    for number in range(count):
        tick("exact continuations")
        start, length = 37 * number % 1000, SHORT // 2 + 13 * number % (SHORT // 2)
        prompt = prompts[number % len(prompts)][start : start + length]
        found.append(cut_and_go_on(client, client, root, prompt, number))
    return {
        "exact": count,
        "exact_equal": sum(one.equal for one in found),
        "control_equal": sum(one.control_equal for one in found),
        "exact_control_max_logprob": max((one.control_logprob for one in found), default=0.0),
    }


def main(
    tokens: Tokens = 3000,
    exact: Annotated[int, typer.Option(help="Number of turns to continue bit for bit.")] = 100,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure snapshots. Exits with 1 if an exact continuation differs."""
    title = f"Snapshots of {tokens:,} tokens"
    with (
        tempfile.TemporaryDirectory(prefix="snapshot-") as folder,
        served_benchmark(title, 5 + exact, model, as_json=as_json) as run,
    ):
        found = run.result = measure(run.model, tokens, exact, Path(folder), run.tick)
    if found["exact_equal"] < found["exact"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
