"""Replicas that share a remote store.

    python -m bench.cluster --json
    python -m bench.cluster --faults --json
    python -m bench.cluster --ranks --json
    python -m bench.cluster --folder --json

Two real servers on a core each, with CPU memory of their own, and a Valkey server on loopback. A
job's first turn is asked on one and its second on the other (see ``moved``); then jobs of four
turns, each turn on a server drawn at random, against all turns of a job on one (``placement``).
``--faults`` asks second turns while the store has trouble, beside a server that has no store
(``faults``). ``--ranks`` has one server with two data-parallel ranks in place of two servers, and
asks each turn of the rank by vLLM's header. ``--folder`` has a shared folder in place of the Valkey
server.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tiered_kv.bench.cluster import faults, moved, placement
from tiered_kv.bench.cluster.proxy import Proxy
from tiered_kv.bench.cluster.ranks import ranks_of_one_server
from tiered_kv.bench.cluster.replicas import Replica, Shape, replicas
from tiered_kv.bench.output import AsJson, ModelFolder, progress, run_benchmark, show
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

Tell = Callable[[str], None]


@contextmanager
def a_store(folder: Path, *, shared: bool) -> Iterator[str]:
    """A Valkey server, or a folder; gives its address."""
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
                    result |= _placed([first, second], rounds, seed, tell)
    return result


def _placed(servers: list[Replica], rounds: int, seed: int, tell: Tell) -> dict[str, Any]:
    each = 2 * rounds * PLACED_JOBS
    found = texts(servers[0].client, each + JOBS + COLD, PLACED_TOKENS)[JOBS + COLD :]
    jobs = [found[at : at + PLACED_JOBS] for at in range(0, each, PLACED_JOBS)]
    pairs = list(zip(jobs[::2], jobs[1::2], strict=True))
    return placement.compare(servers, pairs, seed, tell).as_json()


def measure_faults(model: Path, only: list[str], tell: Tell) -> dict[str, Any]:
    """Trouble of all kinds, one after the other."""
    whole = FAULT_TOKENS // BLOCK * BLOCK + 1
    names = only or list(faults.FAULTS)
    count = len(names) * FAULT_JOBS
    shape = Shape(model=model, tokens=whole + 64 + faults.ANSWER, contexts=count + 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ValkeyServer(folder) as server, Proxy(server.port) as proxy:
            url = f"valkey://127.0.0.1:{proxy.port}"
            store = faults.Store(server=server, proxy=proxy)
            tell("servers start")
            with replicas(shape, [url, url, None], folder, (0, 1, 1)) as (first, second, alone):
                prompts = texts(first.client, count + MENDING * len(names), whole)
                found: dict[str, Any] = {}
                for at, fault in enumerate(names):
                    own = prompts[at * FAULT_JOBS : (at + 1) * FAULT_JOBS]
                    said = faults.suffer(fault, store, (first, second, alone), own, tell)
                    spare = prompts[count + at * MENDING : count + (at + 1) * MENDING]
                    mended_s = faults.mend(store, first, second, spare, tell)
                    found[fault] = {**said.as_json(), "mended_s": mended_s}
    return {
        "right": all(one["right"] for one in found.values()),
        "in_time": all(one["in_time"] for one in found.values()),
        "p95_ratio": max(one["p95_ratio"] for one in found.values()),
        "noise": max(one["noise"] for one in found.values()),
        "faults": found,
    }


def main(
    tokens: Annotated[int, typer.Option(help="Length of the contexts, tokens.")] = 3000,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of both placements.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random placement.")] = 0,
    trouble: Annotated[
        bool, typer.Option("--faults", help="Measure trouble with the store instead.")
    ] = False,
    fault: Annotated[
        list[str], typer.Option(help="With --faults, one kind alone; may be repeated.")
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
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
        raise typer.BadParameter("--faults are those of a Valkey server, not of --folder")
    if unknown := set(fault) - faults.FAULTS.keys():
        raise typer.BadParameter(f"{unknown} are none of {', '.join(faults.FAULTS)}")
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("servers start", total=1)

        def tell(what: str) -> None:
            bar.update(task, description=what)

        where = model or small_model()
        try:
            if trouble:
                result = measure_faults(where, fault, tell)
            else:
                result = measure(where, tokens, rounds, seed, ranks=ranks, shared=folder, tell=tell)
        except httpx.HTTPError as error:
            raise RuntimeError(f"a request was not answered: {error!r}") from error
    show("Jobs that move between replicas", {**result, "dtype": str(machine_dtype())}, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
