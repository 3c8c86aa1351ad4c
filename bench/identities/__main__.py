"""Recognition of real clients' jobs, with and without vLLM's router.

    python -m bench.identities --json

Sends recorded requests of agents and SDKs to a real server with the connector and its middleware.
Each client's requests are sent to chat, completions, Responses and Messages. ``known``: fraction of
requests whose job has all requests of the agent that sent it, and no other agent's.
``parent_known``: of the requests that state a parent, the fraction whose parent is the right job.
``told_apart``: the same as ``known``, for two users of each client behind a router that sends one
``X-Session-ID`` for all. ``router``: the same figures behind vLLM's router, which drops headers on
two of the endpoints; null if the router is not installed. ``middleware_us`` and ``engine_us``:
median time to determine the identity of a request in the API server (with a body of 64 KiB) and in
the engine, µs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.forcing import server_env
from tiered_kv.bench.identities.recorded import Client, clients
from tiered_kv.bench.identities.replay import PATHS, SHARED, Player, Recognised, judge
from tiered_kv.bench.output import AsJson, ModelFolder, Tick, run_benchmark, served_benchmark
from tiered_kv.bench.servers.peers import ROUTER, program, router_of
from tiered_kv.bench.servers.service import ServerError
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer
from tiered_kv.connectors.vllm.middleware import carry
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.trace.trace_reader import TraceReader

KV_BLOCKS, MAX_LEN = 160, 2048
BODY_BYTES = 64 << 10
REPEATS = 200
STOP_S = 120.0


@contextmanager
def served(model: Path, folder: Path, *, routed: bool) -> Iterator[str]:
    """Start a server with the connector and, if ``routed``, the router in front of it. Yields the
    address to send requests to.
    """
    options = ServerOptions(
        model=model,
        kv_blocks=KV_BLOCKS,
        max_model_len=MAX_LEN,
        kv_transfer_config=CONNECTOR,
        env={
            **server_env(),
            "TIERED_KV_CPU_GIB": "1",
            "TIERED_KV_TRACE": str(folder / "trace.jsonl"),
            "VLLM_PLUGINS": "tiered_kv",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        },
        extra_args=("--shutdown-timeout", f"{STOP_S:g}"),  # so that the whole trace is written
    )
    with VllmServer(options, folder / "server.log") as server:
        if not routed:
            yield server.url
            server.quit(STOP_S)
            return
        words = ("--policy", "consistent_hash", "--disable-retries")
        with router_of([server.url], folder / "router.log", *words) as router:
            yield router.url
        server.quit(STOP_S)


def replay(model: Path, tick: Tick, *, routed: bool) -> dict[str, Any]:
    """Send all clients' requests, and compare the jobs in the server's trace with the agents.
    Returns the figures in the module docstring, for all clients and for each.
    """
    known = clients()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            served(model, folder, routed=routed) as url,
            closing(Player(url, routed=routed)) as player,
        ):
            for client in known:
                for path in PATHS:
                    player.play(client, path, 0)
                tick(client.title)
            apart = len(player.sent)
            for client in filter(lambda one: one.ids, known):
                player.play(client, client.turns[0].path, 0, SHARED)
                player.play(client.again(), client.turns[0].path, 1, SHARED)
                tick(f"two users of {client.title}")
        records = sorted(TraceReader(folder / "trace.jsonl"), key=lambda one: one.arrived)
    results = judge(player.sent[:apart], records[:apart])
    pairs = judge(player.sent[apart:], records[apart:])
    whole = sum(results.values(), Recognised())
    both = sum(pairs.values(), Recognised())
    return {
        **whole.to_json(),
        "told_apart": both.known / both.turns,
        "clients": {
            client.title: {
                "recorded": client.recorded,
                **results[client.name].to_json(),
                "told_apart": pairs[client.name].to_json()["known"]
                if client.name in pairs
                else None,
            }
            for client in known
        },
    }


def costs(known: list[Client]) -> dict[str, float]:
    """Return the median time to determine the identity of a request, in the API server and in the
    engine, µs.
    """
    middleware, engine = list[float](), list[float]()
    for turn in (turn for client in known for turn in client.turns):
        text = json.dumps(
            {**turn.body, "messages": [{"role": "user", "content": "x" * BODY_BYTES}]}
        )
        body = text.encode()
        headers = [(name.encode(), value.encode()) for name, value in turn.headers.items()]
        params = json.loads(carry(body, turn.path, headers)).get("kv_transfer_params")
        middleware.append(_median_us(lambda: carry(body, turn.path, headers)))  # noqa: B023
        engine.append(_median_us(lambda: read_hints(params, None, "a session")))  # noqa: B023
    return {
        "middleware_us": statistics.median(middleware),
        "engine_us": statistics.median(engine),
    }


def _median_us(call: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(model: Path, tick: Tick) -> Mapping[str, Any]:
    """Measure how many jobs are recognised without the router and, if it is installed, behind it,
    and the time to determine an identity. Returns the figures that the module docstring explains.
    """
    result = replay(model, tick, routed=False)
    try:
        program(ROUTER, ROUTER)
    except ServerError as error:
        behind: dict[str, Any] = {"router": None, "router_absent": str(error)}
    else:
        behind = {"router": replay(model, tick, routed=True)}
    return {**result, **behind, **costs(clients())}


def main(model: ModelFolder = None, as_json: AsJson = False) -> None:
    """Replay recorded clients on a real server."""
    with served_benchmark("Jobs of recorded clients", None, model, as_json=as_json) as run:
        run.result = measure(run.model, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
