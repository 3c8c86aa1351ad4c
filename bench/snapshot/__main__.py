"""Snapshots of jobs on real servers: their cost, and whether continuations are the same.

    python -m bench.snapshot --json

A server takes the snapshots. It is restarted on the same folder. Then a second server of the same
configuration starts on a copy of that folder, as on another machine.

- ``pause_ms``: longest time between two tokens of a turn while its snapshot is taken, beyond the
  usual time ``decode_ms``; ``pause_steps``: the same as a multiple of it; ``pause_control_ms``: the
  same without a snapshot; ``delay_ms``: time of all tokens until the snapshot was on disk, beyond
  the usual time.
- ``durable_ms``: a snapshot of a waiting job, until it is safely on disk.
- ``bytes_per_token``: bytes of its pages on disk.
- ``restore_ms``: the call that restores it, ``restore_engine_ms`` of it in the engine;
  ``restored_token_ms``: the first token of its next turn after that. Both are of the same server
  after a restart, ``second_...`` of another one. ``recompute_ms``: the first token of such a turn
  when it is computed. ``restore_ratio``: ``recompute_ms`` over the sum of call and first token.
- ``forks_extra_bytes``: CPU memory that ten forks take with a turn each; ``tail_bytes``: a page.
- ``exact_equal``: how many of ``exact`` continuations of 24 tokens, cut at random tokens of a turn,
  equal the uncut turn bit for bit; ``control_equal``: how many that were computed from the tokens.
- ``near_max_logprob``: largest difference of a logprob after a restore that is not exact, and
  ``control_max_logprob`` after computing.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer, machine_dtype
from tiered_kv.bench.snapshot.exactness import answered_with, cut_and_go_on, logprob_distance
from tiered_kv.bench.snapshot.told_answers import Client
from tiered_kv.doctor.running_server import events

JOBS = 5
"""Contexts of full length."""
FORKS = 10
SHORT = 400
"""Length of the prompts of exact continuations, tokens, at most."""
Tell = Callable[[str], None]


@contextmanager
def served(model: Path, folder: Path, tokens: int) -> Iterator[Client]:
    """A server with snapshots in a folder."""
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
    with VllmServer(options, folder / "server.log") as server:
        client = Client(server.url)
        try:
            client.ask(list(range(100, 400)), 2, "warm-up")
            yield client
        finally:
            client.close()


def first_token_ms(client: Client, prompt: Sequence[int], job: str) -> float:
    """Milliseconds until a turn's first token."""
    began = time.perf_counter()
    client.ask(prompt, 1, job)
    return 1e3 * (time.perf_counter() - began)


def pause(client: Client, prompt: Sequence[int], name: str) -> dict[str, float]:
    """Take a turn's snapshot while it answers."""
    taken = list[float]()

    def take() -> None:
        taken.append(time.perf_counter())
        client_of_its_own = Client(str(client.http.base_url))
        try:
            client_of_its_own.post("snapshots", job=name, name=name)
        finally:
            client_of_its_own.close()
        taken.append(time.perf_counter())

    answer = answered_with(client, prompt, 160, name, 40, take)
    ends = answer.times[1:]
    gaps = [1e3 * (end - begin) for begin, end in pairwise(answer.times)]
    began, over = taken
    beside = [gap for gap, end in zip(gaps, ends, strict=True) if began <= end <= over]
    before = [gap for gap, end in zip(gaps, ends, strict=True) if end < began]
    usual = statistics.median(before)
    return {
        "pause_ms": max(beside) - usual,
        "pause_control_ms": max(before[2:]) - usual,
        "decode_ms": usual,
        "delay_ms": sum(beside) - usual * len(beside),
    }


def forks(client: Client, prompt: Sequence[int]) -> dict[str, float]:
    """Fork a job ten times, and ask each fork a turn."""
    client.ask(prompt, 8, "parent")
    _settled(client)
    before = events(client.metrics())
    client.post("forks", job="parent", **{"as": [f"child-{i}" for i in range(FORKS)]})
    for i in range(FORKS):
        client.ask([*prompt, *range(500 + i, 503 + i)], 1, f"child-{i}")
    _settled(client)
    after = events(client.metrics())
    pages = after["cpu_pages"] - before["cpu_pages"]
    extra = after["cpu_bytes"] - before["cpu_bytes"]
    return {
        "forks_extra_bytes": extra,
        "forks_extra_pages": pages,
        "tail_bytes": after["cpu_bytes"] / after["cpu_pages"],
    }


def _settled(client: Client) -> None:
    """Have the copies to CPU memory over, and told."""
    for i in range(2):
        time.sleep(0.2)
        client.ask(list(range(100, 132)), 1, f"news-{i}-{time.perf_counter()}")


def measure(model: Path, tokens: int, exact: int, folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure on two servers, one after the other."""
    found = dict[str, Any]()
    root = folder / "snapshots"
    with served(model, folder, tokens) as client:
        with httpx.Client(base_url=client.http.base_url, timeout=600) as plain:
            prompts = texts(plain, JOBS + 3, tokens)
        tell("computing")
        computed = [
            first_token_ms(client, prompt, f"job-{i}") for i, prompt in enumerate(prompts[:JOBS])
        ]
        found["recompute_ms"] = statistics.median(computed)
        _settled(client)
        tell("taking")
        durable, sizes = list[float](), list[float]()
        for i in range(JOBS):
            began = time.perf_counter()
            taken = client.post("snapshots", job=f"job-{i}", name=f"night-{i}")
            durable.append(1e3 * (time.perf_counter() - began))
            sizes.append(taken["stored_bytes"] / taken["kv_tokens"])
        found |= {
            "durable_ms": statistics.median(durable),
            "bytes_per_token": statistics.median(sizes),
        }
        tell("pausing")
        pauses = [pause(client, prompts[JOBS + i], f"live-{i}") for i in range(2)]
        found |= {name: max(one[name] for one in pauses) for name in pauses[0]}
        found["pause_steps"] = found["pause_ms"] / found["decode_ms"]
        tell("forking")
        found |= forks(client, prompts[JOBS + 2])
        whole = client.ask([*prompts[0], *range(500, 540)], 24, "job-0")
    second = folder / "second"
    for kind, place in (("", folder), ("second_", second)):
        if place is second:
            shutil.copytree(root, second / "snapshots")
        with served(model, place, tokens) as client:
            tell("bringing back")
            found |= _brought_back(client, prompts[: JOBS - 1], kind)
            near = client.ask([*prompts[0], *range(500, 540)], 24, "job-0")
            control = client.ask([*prompts[0], *range(500, 540)], 24, "other", "other")
            found[f"{kind}near_max_logprob"] = logprob_distance(near, whole)
            found[f"{kind}control_max_logprob"] = logprob_distance(control, whole)
            if kind:
                found |= _exact(client, second / "snapshots", prompts, exact, tell)
    total = found["restore_ms"] + found["restored_token_ms"]
    return {**found, "restore_ratio": found["recompute_ms"] / total, "tokens": tokens}


def _brought_back(client: Client, prompts: Sequence[list[int]], kind: str) -> dict[str, float]:
    calls, engine, first = list[float](), list[float](), list[float]()
    for i, prompt in enumerate(prompts):
        began = time.perf_counter()
        engine.append(client.post("restores", name=f"night-{i}")["ms"])
        calls.append(1e3 * (time.perf_counter() - began))
        first.append(first_token_ms(client, prompt, f"job-{i}"))
    return {
        f"{kind}restore_ms": statistics.median(calls),
        f"{kind}restore_engine_ms": statistics.median(engine),
        f"{kind}restored_token_ms": statistics.median(first),
    }


def _exact(
    client: Client, root: Path, prompts: Sequence[list[int]], count: int, tell: Tell
) -> dict[str, Any]:
    taking = Client(str(client.http.base_url))
    found = []
    try:
        for number in range(count):
            tell("exact continuations")
            start = 37 * number % 1000
            length = SHORT // 2 + 13 * number % (SHORT // 2)
            prompt = prompts[number % len(prompts)][start : start + length]
            found.append(cut_and_go_on(client, taking, root, prompt, number, number))
    finally:
        taking.close()
    return {
        "exact": count,
        "exact_equal": sum(one.equal for one in found),
        "control_equal": sum(one.control_equal for one in found),
        "exact_control_max_logprob": max((one.control_logprob for one in found), default=0.0),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    exact: Annotated[int, typer.Option(help="Number of exact continuations.")] = 100,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure snapshots. Exit with 1 if an exact continuation differs."""
    title = f"Snapshots of {tokens:,} tokens"
    with (
        tempfile.TemporaryDirectory(prefix="snapshot-") as folder,
        benchmark(title, 6 + exact, as_json=as_json) as run,
    ):
        found = measure(model or small_model(), tokens, exact, Path(folder), run.tick)
        run.result = {**found, "dtype": str(machine_dtype())}
    if found["exact_equal"] < found["exact"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
