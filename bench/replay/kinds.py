"""Server types to compare, and the options of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_kv.bench.agents.forcing import SERVER_ARGS, server_env
from tiered_kv.bench.servers.peers import BehindRouter, Deploy, WithCacheServer, alone
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions

from .names import BEHIND_ROUTER, BOUND, CONTROL, LMCACHE, REACH, ROUTER, STOCK, TIERED

SCHEDULER = "tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler"
REACH_SCHEDULER = "tiered_kv.bench.sim.servers.schedulers.ReachScheduler"

TRACE = "trace.jsonl"

OFFLOADERS: Mapping[str, str] = {
    "vllm-offloading": "OffloadingConnector",
    "vllm-simple": "SimpleCPUOffloadConnector",
}
"""vLLM's own offloading connectors, by server name. They get the same CPU memory as tiered-kv."""

CPU_GIB = 4.0
SSD_CPU_GIB = 0.5
"""CPU memory of the server type with an SSD: too little for all jobs, so that the SSD is used."""

RAW_LOGPROBS = ("--logprobs-mode", "raw_logprobs")
BLOCK = 32
"""Tokens per block: the smallest size that vLLM's CPU build supports, used on every machine."""
ROUND = 256
"""The maximum request length is a multiple of this many tokens."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A server type.

    Attributes:
        optional: True if the server may be unable to start on this machine. The result then reports
            the server's error message.
        ssd: True to give the server an empty folder for its SSD tier at every start.
        deploy: starts the server, together with the processes of a peer if it needs any.
        needs_costs: True if the configuration contains the costs of stock vLLM's steps. Such
            servers do not run in the idle load.
        session_header: True if clients also send job names in ``X-Session-ID``.
    """

    name: str
    options: ServerOptions
    optional: bool = False
    ssd: bool = False
    deploy: Deploy = alone
    needs_costs: bool = False
    session_header: bool = False

    def started_in(self, folder: Path) -> ServerOptions:
        """Return the options for one start with files in ``folder``. The connector writes
        ``trace.jsonl`` to that folder, and its SSD tier is the subfolder ``ssd``. The options of a
        server without the connector do not change.
        """
        if self.options.kv_transfer_config != CONNECTOR:
            return self.options
        env = {**self.options.env, "TIERED_KV_TRACE": str(folder / TRACE)}
        if self.ssd:
            env["TIERED_KV_SSD_PATH"] = str(folder / "ssd")
        return replace(self.options, env=env)


@dataclass(frozen=True, slots=True)
class Sizing:
    """KV pools and longest request, in tokens.

    Attributes:
        pool_tokens: pool of every server except ``reach`` and ``bound``, and limit of concurrent
            contexts on ``reach``.
        bound_tokens: pool that holds all jobs' contexts together.
    """

    max_model_len: int
    pool_tokens: int
    bound_tokens: int


def longest_context(pool_tokens: int) -> int:
    """Return the longest context for which ``size_for`` finds a size, tokens."""
    return (pool_tokens - 2 * BLOCK) // ROUND * ROUND - 1


def size_for(contexts: Sequence[int], pool_tokens: int) -> Sizing:
    """Size a server for jobs whose final contexts have ``contexts`` tokens.

    Raises:
        ValueError: the pool is too small for the longest job, or there are no jobs.
    """
    if not contexts:
        raise ValueError("there are no jobs")
    longest = -(-(max(contexts) + 1) // ROUND) * ROUND
    if pool_tokens < longest + 2 * BLOCK:  # vLLM reserves a block
        raise ValueError(
            f"a pool of {pool_tokens} tokens cannot hold a request of {longest} tokens"
        )
    # One more block per job for its partial tail, and space for the warm-up.
    bound = sum(contexts) + (len(contexts) + 2) * BLOCK + longest
    return Sizing(longest, pool_tokens, max(bound, pool_tokens))


def make_kinds(
    model: str | Path,
    sizing: Sizing,
    *,
    policies: Iterable[str] = (),
    ssd: bool = False,
    forced: bool = True,
    own_scheduler: bool = False,
    peers: bool = False,
) -> list[Kind]:
    """Return the server types to compare: stock vLLM twice, the bounds ``reach`` and ``bound``,
    tiered-kv with several policies and tiers, vLLM's offloading connectors, and peers.

    Args:
        policies: names of tiered-kv policies to add to the default.
        ssd: True to add tiered-kv with little CPU memory and an SSD tier.
        forced: load the processor that forces recorded answers.
        own_scheduler: run tiered-kv under vLLM's own scheduler instead of ``ContinuumScheduler``.
            The servers of ``policies`` always use vLLM's own.
        peers: add LMCache and vLLM's router, each installed in its own environment, and tiered-kv
            behind vLLM's router.
    """
    stock = ServerOptions(
        model=model,
        kv_blocks=-(-sizing.pool_tokens // BLOCK),
        block_size=BLOCK,
        max_model_len=sizing.max_model_len,
        env=server_env(),
        extra_args=("--enable-prefix-caching", *RAW_LOGPROBS, *(SERVER_ARGS if forced else ())),
    )
    bound = replace(stock, kv_blocks=-(-sizing.bound_tokens // BLOCK))
    ordered = stock if own_scheduler else with_args(stock, "--scheduler-cls", SCHEDULER)
    room = {"kv_connector_extra_config": {"cpu_bytes_to_use": int(CPU_GIB * 2**30)}}
    kinds = [
        Kind(STOCK, stock),
        Kind(CONTROL, stock),
        Kind(TIERED, with_connector(ordered)),
        Kind(REACH, within_reach(bound, stock.kv_blocks)),
        Kind(BOUND, bound),
    ]
    kinds += [
        Kind(f"{TIERED}-{name}", with_connector(stock, TIERED_KV_POLICY=name))
        for name in dict.fromkeys(policies)
    ]
    if ssd:
        little = with_connector(ordered, TIERED_KV_CPU_GIB=f"{SSD_CPU_GIB:g}")
        kinds.append(Kind(f"{TIERED}-ssd", little, ssd=True))
    for name, connector in OFFLOADERS.items():
        config = {"kv_connector": connector, "kv_role": "kv_both", **room}
        kinds.append(Kind(name, replace(stock, kv_transfer_config=config), optional=True))
    if peers:
        kinds.append(Kind(LMCACHE, stock, optional=True, deploy=WithCacheServer(CPU_GIB)))
        # Contexts can also be restored from CPU memory, so the router may exceed the KV pool. With
        # tiered-kv, requests that are being restored count as waiting, so more requests may wait.
        for name, options, tokens, most_waiting in (
            (ROUTER, stock, sizing.pool_tokens, 1),
            (BEHIND_ROUTER, with_connector(ordered), sizing.bound_tokens, 1000),
        ):
            deploy = BehindRouter(tokens, most_waiting)
            kinds.append(
                Kind(
                    name,
                    options,
                    optional=True,
                    deploy=deploy,
                    needs_costs=True,
                    session_header=True,
                )
            )
    return kinds


def with_args(options: ServerOptions, *arguments: str) -> ServerOptions:
    """Return the options with further command line arguments."""
    return replace(options, extra_args=(*options.extra_args, *arguments))


def with_connector(options: ServerOptions, **settings: str) -> ServerOptions:
    """Return the options with the connector, ``CPU_GIB`` of CPU memory, and further settings as
    environment variables.
    """
    env = {**options.env, "TIERED_KV_CPU_GIB": f"{CPU_GIB:g}", **settings}
    return replace(options, kv_transfer_config=CONNECTOR, env=env)


def within_reach(bound: ServerOptions, blocks: int | None) -> ServerOptions:
    """Return the options of the lossless bound's server, with running requests limited to
    ``blocks`` blocks in total.
    """
    config = json.dumps({"reach_blocks": blocks})
    return with_args(bound, "--scheduler-cls", REACH_SCHEDULER, "--additional-config", config)
