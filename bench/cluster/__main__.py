"""Replicas that share a remote store.

    python -m bench.cluster --json
    python -m bench.cluster --faults --json
    python -m bench.cluster --valkey-cluster --json
    python -m bench.cluster --ranks --json
    python -m bench.cluster --folder --json
    python -m bench.cluster --router --json

Runs two real servers, each with its own core and CPU memory, and a Valkey server on loopback. A
job's first turn goes to one server and its second turn to the other (``move``). Then jobs of four
turns run with each turn on a random server, and are compared with jobs that stay on one server
(``place``). ``--faults`` sends second turns while the store has a fault, and compares them with
turns on a server that has no store (``faults``). ``--valkey-cluster`` sends second turns while a
Valkey cluster of three masters loses one of them and moves slots (``failover``). ``--ranks`` uses
one server with two data-parallel ranks instead of two servers, and selects the rank of each turn by
vLLM's header. ``--folder`` uses a shared folder instead of the Valkey server. ``--router`` puts
vLLM's router in front of two servers (``router``).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.cluster import failover, faults, router
from tiered_kv.bench.cluster.replicas import Replica, Shape, ranks_of_one_server, replicas
from tiered_kv.bench.output import (
    AsJson,
    ModelFolder,
    Tick,
    Tokens,
    run_benchmark,
    served_benchmark,
)
from tiered_kv.bench.restore import BLOCK, logprob_distance, median_ms, texts
from tiered_kv.testing.valkey import ValkeyCluster, ValkeyServer

JOBS, COLD = 6, 3
MOVED_ANSWER, MOVED_ADDED = 16, 40
"""Length of the compared answers, and number of tokens that a job's second turn adds."""
FAULT_JOBS, FAULT_TOKENS, MENDING = 8, 1_500, 12
FAILOVER_JOBS = 30
PLACED_JOBS, PLACED_TOKENS, TURNS, ADDED, ANSWER = 6, 1_500, 4, 150, 12
"""Jobs that ``place`` runs: number of jobs, length of the last prompt, turns per job, tokens that a
turn adds, and tokens of its answer."""
GAP_S = 2.0
"""Tool time, seconds. Pages reach the store two steps and a write after a turn ends. With steps of
half a second, this takes at least a second."""
CONCURRENT = 4
ROUNDS = 3


@contextmanager
def a_store(folder: Path, *, shared: bool) -> Iterator[str]:
    """Start a Valkey server or create a shared folder. Yields the address of the store."""
    if shared:
        (folder / "shared").mkdir()
        yield f"{(folder / 'shared').as_uri()}?gib=16"
        return
    with ValkeyServer(folder) as server:
        yield server.url


def measure(
    model: Path, tokens: int, rounds: int, seed: int, *, ranks: bool, shared: bool, tick: Tick
) -> dict[str, Any]:
    """Measure jobs that move and, if ``rounds`` is not 0, jobs placed at random. Returns the
    results of ``move`` and ``place``.

    Args:
        tokens: length of the first prompt of a moved job, rounded down to whole blocks.
        ranks: use two ranks of one server instead of two servers.
        shared: use a shared folder instead of a Valkey server.
    """
    whole = tokens // BLOCK * BLOCK
    longest = max(whole, PLACED_TOKENS) + 64 + MOVED_ANSWER
    shape = Shape(model=model, tokens=longest, contexts=2 * JOBS + COLD + 2)
    with tempfile.TemporaryDirectory() as name, a_store(Path(name), shared=shared) as url:
        tick("servers start")
        started = (
            ranks_of_one_server(shape, url, Path(name))
            if ranks
            else replicas(shape, [url, url], Path(name))
        )
        with started as (first, second):
            prompts = texts(first.client, JOBS + COLD, whole + MOVED_ADDED)
            asked = [prompt[:whole] for prompt in prompts[:JOBS]]
            moved = move(first, second, asked, prompts[JOBS:], tick)
            return moved | (place([first, second], rounds, seed, tick) if rounds else {})


def move(
    first: Replica,
    second: Replica,
    prompts: Sequence[Sequence[int]],
    cold: Sequence[Sequence[int]],
    tick: Tick,
) -> dict[str, Any]:
    """Send first turns of jobs to one replica, and second turns to another.

    Args:
        prompts: prompts of the first turns. Each fills whole blocks.
        cold: prompts of the same length as the second turns.

    Returns:
        ``remote_share``: fraction of the first turns' tokens that the second replica read from the
            store.
        ``equal``: True if both replicas give the same answers to second turns whose first turn came
            entirely from the store. The first replica uses its own KV, so both replicas compute the
            same tokens in batches of the same shape. In another shape, rounding could change a
            token whose two best logits are nearly equal.
        ``compared``: number of tokens in these answers.
        ``logprob_difference``: largest difference between the logprobs of these answers.
        ``cold_ms``, ``moved_ms``: median time to first token of prompts that no replica has, and of
            moved prompts of the same length.
        ``speedup``: ``cold_ms`` over ``moved_ms``.
        ``pages``: number of pages that the first replica wrote to the store.
    """
    longer = [[*prompt, *prompt[100 : 100 + MOVED_ADDED]] for prompt in prompts]
    for at, prompt in enumerate(prompts):
        tick("first turns")
        first.ask(f"job {at}", prompt)
    pages = first.shared_pages()
    moved, computed = list[Answer](), list[Answer]()
    for at, prompt in enumerate(longer):
        tick("second turns elsewhere")
        moved.append(second.ask(f"job {at}", prompt))
        if at < len(cold):
            computed.append(second.ask(f"cold {at}", cold[at]))
    found = [one.sources.get("remote_tokens", 0) for one in moved]
    whole = [at for at, prompt in enumerate(prompts) if found[at] == len(prompt)]
    for at in whole:
        for prompt in (prompts[at], longer[at]):
            tick("the same turns without the store")
            first.ask(f"stays {at}", prompt, salt=f"stays {at}")
    # These run after all other turns. By then the end of each context has been saved, so both
    # replicas find it.
    pairs = list[tuple[Answer, Answer]]()
    for at in whole:
        tick("answers compared")
        there = second.ask(f"job {at}", longer[at], MOVED_ANSWER)
        here = first.ask(f"stays {at}", longer[at], MOVED_ANSWER, salt=f"stays {at}")
        pairs.append((here, there))
    return {
        "remote_share": sum(found) / sum(map(len, prompts)),
        "equal": bool(pairs) and all(here.tokens == there.tokens for here, there in pairs),
        "compared": sum(len(here.tokens) for here, _ in pairs),
        "logprob_difference": max((logprob_distance(*pair) for pair in pairs), default=0.0),
        "cold_ms": median_ms(computed),
        "moved_ms": median_ms(moved),
        "speedup": median_ms(computed) / median_ms(moved),
        "pages": pages,
    }


def place(servers: list[Replica], rounds: int, seed: int, tick: Tick) -> dict[str, Any]:
    """Run jobs of several turns twice per round, in alternating order and with different texts:
    once with each turn on a random server, once with all turns of a job on one server.

    Returns:
        ``random_s``, ``sticky_s``: mean job times, seconds. ``random_over_sticky``: median of their
            ratios over the rounds. ``rounds``: the ratio in each round.
    """
    each = 2 * rounds * PLACED_JOBS
    found = texts(servers[0].client, each + JOBS + COLD, PLACED_TOKENS)[JOBS + COLD :]
    chance = random.Random(seed)
    means: dict[str, list[float]] = {"random": [], "sticky": []}
    for number in range(rounds):
        for how in [*means][:: 1 if number % 2 == 0 else -1]:
            tick(f"{how} placement, round {number + 1}")
            first = (2 * number + [*means].index(how)) * PLACED_JOBS
            names = [f"{how} {number} {at}" for at in range(PLACED_JOBS)]
            places = [
                [chance.choice(servers) for _ in range(TURNS)]
                if how == "random"
                else [servers[at % len(servers)]] * TURNS
                for at in range(PLACED_JOBS)
            ]
            with ThreadPoolExecutor(CONCURRENT) as pool:
                seconds = pool.map(_run, names, found[first : first + PLACED_JOBS], places)
                means[how].append(statistics.fmean(seconds))
    ratios = [r / s for r, s in zip(means["random"], means["sticky"], strict=True)]
    return {
        "random_s": statistics.fmean(means["random"]),
        "sticky_s": statistics.fmean(means["sticky"]),
        "random_over_sticky": statistics.median(ratios),
        "rounds": ratios,
    }


def _run(job: str, text: Sequence[int], places: Sequence[Replica]) -> float:
    """Run a job with each turn on its replica in ``places``. Returns the time including gaps,
    seconds.
    """
    began = time.perf_counter()
    for turn, replica in enumerate(places):
        if turn:
            time.sleep(GAP_S)
        replica.ask(job, text[: len(text) - (len(places) - 1 - turn) * ADDED], ANSWER)
    return time.perf_counter() - began


def measure_faults(model: Path, only: list[str], tick: Tick) -> dict[str, Any]:
    """Measure faults one after another, on the same replicas. Returns the results of each fault
    under ``faults``, and the worst figures of all faults.

    Args:
        only: names of the faults; empty means all.
    """
    whole = FAULT_TOKENS // BLOCK * BLOCK + 1
    names = only or list(faults.FAULTS)
    count, found = len(names) * FAULT_JOBS, dict[str, Any]()
    shape = Shape(model=model, tokens=whole + 64 + faults.ANSWER, contexts=count + 20)
    with (
        tempfile.TemporaryDirectory() as name,
        ValkeyServer(Path(name)) as server,
        faults.proxied(server.port) as proxy,
    ):
        url, store = f"valkey://127.0.0.1:{proxy.port}", faults.Store(server, proxy)
        tick("servers start")
        with replicas(shape, [url, url, None], Path(name), (0, 1, 1)) as (first, second, alone):
            prompts = iter(texts(first.client, count + MENDING * len(names), whole))
            for fault in names:
                own = [next(prompts) for _ in range(FAULT_JOBS)]
                found[fault] = faults.suffer(fault, store, (first, second, alone), own, tick)
                spare = [next(prompts) for _ in range(MENDING)]
                found[fault]["mended_s"] = faults.mend(store, first, second, spare, tick)
    return {
        "right": all(one["right"] for one in found.values()),
        "in_time": all(one["in_time"] for one in found.values()),
        "p95_ratio": max(one["p95_ratio"] for one in found.values()),
        "noise": max(one["noise"] for one in found.values()),
        "faults": found,
    }


def measure_failover(model: Path, tick: Tick) -> dict[str, Any]:
    """Measure the failover of a Valkey cluster whose slots move; see ``failover``."""
    whole = FAULT_TOKENS // BLOCK * BLOCK + 1
    shape = Shape(model=model, tokens=whole + 64 + faults.ANSWER, contexts=FAILOVER_JOBS + 20)
    with tempfile.TemporaryDirectory() as name, ValkeyCluster(Path(name)) as cluster:
        lost = cluster.nodes[0]
        url = cluster.url(lost)  # the only node that the engines know
        tick("servers start")
        with replicas(shape, [url, url, None], Path(name), (0, 1, 1)) as started:
            prompts = texts(started[0].client, FAILOVER_JOBS, whole)
            return failover.fail_over(cluster, lost, started, prompts, tick)


def main(
    tokens: Tokens = 3000,
    rounds: Annotated[
        int | None,
        typer.Option(min=0, help="Rounds per placement. Defaults to 3, or to 8 with --router."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random placement.")] = 0,
    trouble: Annotated[
        bool, typer.Option("--faults", help="Measure faults of the store instead of moved jobs.")
    ] = False,
    fault: Annotated[
        list[str],
        typer.Option(help="Fault to measure with --faults. Repeat for several. Defaults to all."),
    ] = [],  # noqa: B006 - typer only reads the default
    valkey_cluster: Annotated[
        bool,
        typer.Option("--valkey-cluster", help="Measure the failover of a Valkey cluster instead."),
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Use two data-parallel ranks of one server.")
    ] = False,
    folder: Annotated[
        bool, typer.Option("--folder", help="Use a shared folder instead of the Valkey server.")
    ] = False,
    behind_router: Annotated[
        bool, typer.Option("--router", help="Put vLLM's router in front of two servers.")
    ] = False,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure jobs that move between replicas, or what ``--faults``, ``--valkey-cluster`` or
    ``--router`` selects instead."""
    if behind_router and (trouble or fault or ranks or folder or valkey_cluster):
        raise typer.BadParameter(
            "--router cannot be combined with options that select another measurement"
        )
    if behind_router:
        with (
            tempfile.TemporaryDirectory() as name,
            served_benchmark("Behind vLLM's router", None, model, as_json=as_json) as run,
        ):
            size = router.Size(rounds=rounds or router.ROUNDS)
            run.result = router.measure(run.model, size, seed, Path(name), run.tick)
        return
    if folder and trouble:
        raise typer.BadParameter("--faults needs the Valkey server: leave out --folder")
    if valkey_cluster and (trouble or ranks or folder):
        raise typer.BadParameter(
            "--valkey-cluster cannot be combined with --faults, --ranks or --folder"
        )
    if fault and not trouble:
        raise typer.BadParameter("--fault needs --faults")
    if unknown := set(fault) - faults.FAULTS.keys():
        raise typer.BadParameter(
            f"unknown fault {', '.join(sorted(unknown))}: use {', '.join(faults.FAULTS)}"
        )
    with served_benchmark("Jobs that move between replicas", None, model, as_json=as_json) as run:
        if valkey_cluster:
            run.result = measure_failover(run.model, run.tick)
        elif trouble:
            run.result = measure_faults(run.model, fault, run.tick)
        else:
            count = ROUNDS if rounds is None else rounds
            run.result = measure(
                run.model, tokens, count, seed, ranks=ranks, shared=folder, tick=run.tick
            )


if __name__ == "__main__":
    run_benchmark(main, __doc__)
