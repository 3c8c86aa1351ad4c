"""Replicas that share a remote store.

    python -m bench.cluster --json
    python -m bench.cluster --faults --json
    python -m bench.cluster --ranks --json
    python -m bench.cluster --folder --json

Two real servers on a core each, with CPU memory of their own, and a Valkey server on loopback. A
job's first turn goes to one and its second to the other (see ``moved``). Then come jobs of four
turns, each turn on a server drawn at random, compared with all turns of a job on one (``place``).
``--faults`` sends second turns while the store has a fault, and compares with a server that has no
store (``faults``). ``--ranks`` has one server with two data-parallel ranks in place of two servers,
and chooses the rank of each turn by vLLM's header. ``--folder`` has a shared folder in place of the
Valkey server.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.cluster import faults, moved
from tiered_kv.bench.cluster.replicas import Replica, Shape, ranks_of_one_server, replicas
from tiered_kv.bench.cluster.turns import ask
from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.restore import BLOCK, texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.vllm_server import machine_dtype
from tiered_kv.testing.valkey import ValkeyServer

JOBS = 6
COLD = 3
FAULT_JOBS = 8
FAULT_TOKENS = 1_500
MENDING = 12
PLACED_JOBS = 6
PLACED_TOKENS = 1_500
TURNS = 4
ADDED = 150
"""Tokens that a turn adds to its job's context."""
ANSWER = 12
GAP_S = 2.0
"""Seconds that a tool takes. Pages are in the store two steps and a write after a turn's end, which
here, with steps of half a second, is a second or more."""
CONCURRENT = 4

Tell = Callable[[str], None]


@contextmanager
def a_store(folder: Path, *, shared: bool) -> Iterator[str]:
    """A Valkey server, or a folder; yields its address."""
    if shared:
        (folder / "shared").mkdir()
        yield f"{(folder / 'shared').as_uri()}?gib=16"
        return
    with ValkeyServer(folder) as server:
        yield server.url


def measure(
    model: Path, tokens: int, rounds: int, seed: int, *, ranks: bool, shared: bool, tell: Tell
) -> dict[str, Any]:
    """Move jobs, and place them at random."""
    whole = tokens // BLOCK * BLOCK
    shape = Shape(model=model, tokens=whole + 64 + moved.ANSWER, contexts=2 * JOBS + COLD + 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with a_store(folder, shared=shared) as url:
            tell("servers start")
            started = (
                ranks_of_one_server(shape, url, folder)
                if ranks
                else replicas(shape, [url, url], folder)
            )
            with started as (first, second):
                prompts = texts(first.client, JOBS + COLD, whole + moved.ADDED)
                asked = [prompt[:whole] for prompt in prompts[:JOBS]]
                result = moved.move(first, second, asked, prompts[JOBS:], tell).as_json()
                if rounds:
                    result |= place([first, second], rounds, seed, tell)
    return {**result, "dtype": str(machine_dtype())}


def place(servers: list[Replica], rounds: int, seed: int, tell: Tell) -> dict[str, Any]:
    """Run jobs of several turns twice in each round, with texts of their own, in alternating order:
    turns on servers drawn at random, and all turns of a job on one.

    Returns:
        Mean job times, seconds, and the ratio of both: the median over the rounds, and each.
    """
    each = 2 * rounds * PLACED_JOBS
    found = texts(servers[0].client, each + JOBS + COLD, PLACED_TOKENS)[JOBS + COLD :]
    chance = random.Random(seed)
    means: dict[str, list[float]] = {"random": [], "sticky": []}
    for number in range(rounds):
        for how in [*means][:: 1 if number % 2 == 0 else -1]:
            tell(f"{how} placement, round {number + 1}")
            first = (2 * number + [*means].index(how)) * PLACED_JOBS
            jobs = [
                (
                    f"{how} {number} {at}",
                    found[first + at],
                    [chance.choice(servers) for _ in range(TURNS)]
                    if how == "random"
                    else [servers[at % len(servers)]] * TURNS,
                )
                for at in range(PLACED_JOBS)
            ]
            with ThreadPoolExecutor(CONCURRENT) as pool:
                means[how].append(statistics.fmean(pool.map(lambda job: _run(*job), jobs)))
    ratios = [r / s for r, s in zip(means["random"], means["sticky"], strict=True)]
    return {
        "random_s": statistics.fmean(means["random"]),
        "sticky_s": statistics.fmean(means["sticky"]),
        "random_over_sticky": statistics.median(ratios),
        "rounds": ratios,
    }


def _run(job: str, text: Sequence[int], places: Sequence[Replica]) -> float:
    """Seconds that a job takes, its gaps included."""
    began = time.perf_counter()
    for turn, replica in enumerate(places):
        if turn:
            time.sleep(GAP_S)
        prompt = text[: len(text) - (len(places) - 1 - turn) * ADDED]
        ask(replica.client, job, prompt, answer=ANSWER)
    return time.perf_counter() - began


def measure_faults(model: Path, only: list[str], tell: Tell) -> dict[str, Any]:
    """Measure each fault, one after the other."""
    whole = FAULT_TOKENS // BLOCK * BLOCK + 1
    names = only or list(faults.FAULTS)
    count = len(names) * FAULT_JOBS
    shape = Shape(model=model, tokens=whole + 64 + faults.ANSWER, contexts=count + 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ValkeyServer(folder) as server, faults.Proxy(server.port) as proxy:
            url = f"valkey://127.0.0.1:{proxy.port}"
            store = faults.Store(server=server, proxy=proxy)
            tell("servers start")
            with replicas(shape, [url, url, None], folder, (0, 1, 1)) as (first, second, alone):
                prompts = texts(first.client, count + MENDING * len(names), whole)
                found: dict[str, Any] = {}
                for at, fault in enumerate(names):
                    own = prompts[at * FAULT_JOBS : (at + 1) * FAULT_JOBS]
                    trouble = faults.suffer(fault, store, (first, second, alone), own, tell)
                    spare = prompts[count + at * MENDING : count + (at + 1) * MENDING]
                    mended_s = faults.mend(store, first, second, spare, tell)
                    found[fault] = {**asdict(trouble), "mended_s": mended_s}
    return {
        "right": all(one["right"] for one in found.values()),
        "in_time": all(one["in_time"] for one in found.values()),
        "p95_ratio": max(one["p95_ratio"] for one in found.values()),
        "noise": max(one["noise"] for one in found.values()),
        "faults": found,
        "dtype": str(machine_dtype()),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of both placements.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random placement.")] = 0,
    trouble: Annotated[
        bool, typer.Option("--faults", help="Measure faults of the store instead.")
    ] = False,
    fault: Annotated[
        list[str], typer.Option(help="With --faults, this fault only. May be repeated.")
    ] = [],  # noqa: B006 - typer reads it, nothing writes it
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Two data-parallel ranks of one server.")
    ] = False,
    folder: Annotated[
        bool, typer.Option("--folder", help="A shared folder in place of the Valkey server.")
    ] = False,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure jobs that move between replicas."""
    if folder and trouble:
        raise typer.BadParameter("--faults needs the Valkey server: leave out --folder")
    if unknown := set(fault) - faults.FAULTS.keys():
        raise typer.BadParameter(f"{unknown} are none of {', '.join(faults.FAULTS)}")
    where = model or small_model()
    with benchmark("Jobs that move between replicas", None, as_json=as_json) as run:
        if trouble:
            run.result = measure_faults(where, fault, run.tick)
        else:
            run.result = measure(
                where, tokens, rounds, seed, ranks=ranks, shared=folder, tell=run.tick
            )


if __name__ == "__main__":
    run_benchmark(main, __doc__)
