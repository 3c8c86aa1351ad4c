"""Peers that run next to vLLM: LMCache's cache server and vLLM's router.

Each peer runs from a separate environment, because its packages conflict with this project's and
with the other peer's. ``scripts/install-peers`` creates the environments. A deployment is a server
for one run, alone or together with a peer's processes.

**LMCache**: LMCache's cache server, and vLLM with LMCache's connector, both from LMCache's
environment. On a CPU only the multi-process connector works, in mode ``engine_driven``.

**The router** schedules programs, its name for agents' jobs, in front of one server. It holds
programs back until their contexts fit together, and lets a program keep its place for a while after
an answer. It never notifies the server. It recognizes a program by the header ``X-Session-ID``.
Both the duration of a kept place and the order of programs depend on step cost, so the router's
cost models get the costs of stock vLLM on this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from .server_costs import ServerCosts
from .service import Launch, ServerError, Service, free_port
from .vllm_server import ServerOptions, VllmServer

FOLDER = Path(sys.prefix, "peers")
LMCACHE, ROUTER = "lmcache", "vllm-router"
START_S = 120.0
MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Makes both processes of LMCache compute the same hashes of tokens."""
PREFILL = 1_000
"""Prefill size in tokens at which the effect of a prefill on decoding speed is stated in the
router's configuration."""


def program(peer: str, name: str) -> str:
    """Return the path of a program in a peer's environment.

    Raises:
        ServerError: the program is not installed.
    """
    path = FOLDER / peer / "bin" / name
    if not path.is_file():
        raise ServerError(f"{peer} is not installed in {FOLDER}: run scripts/install-peers")
    return str(path)


@dataclass(frozen=True, slots=True)
class Setting:
    """Requirements of a deployment.

    Attributes:
        start: function that creates a server from options.
        log: path of the server's log. The logs of other processes are in the same folder.
        costs: costs of stock vLLM on this machine; None if not measured yet.
    """

    start: Callable[[ServerOptions], VllmServer]
    log: Path
    costs: ServerCosts | None


@dataclass(frozen=True, slots=True)
class Deployed:
    """A running deployment.

    Attributes:
        server: the vLLM server.
        url: address for requests.
        around: the peer's processes.
    """

    server: VllmServer
    url: str
    around: tuple[Service, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Ids of the process groups of the deployment."""
        return tuple(one.pid for one in (self.server, *self.around) if one.pid is not None)

    def check(self) -> None:
        """Check that all processes of the deployment are running.

        Raises:
            ServerError: a process is not running.
        """
        for one in (self.server, *self.around):
            one.check()


Deploy: TypeAlias = Callable[[ServerOptions, Setting], AbstractContextManager[Deployed]]
"""Starts a deployment, and stops it when the block ends.

Raises:
    ServerError: a part of the deployment does not start.
"""


@contextmanager
def alone(options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
    """Deploy a server without a peer."""
    with setting.start(options) as server:
        yield Deployed(server, server.url)


class Peer(Service):
    """A process that runs next to a server for a comparison, such as a router or a cache server.

    Args:
        log_path: file for standard output and standard error.
        command: command of the process. The word ``{port}`` is replaced by the port that serves
            ``health_path``.
        env: additions to this process's environment.
        health_path: route that answers once the process is ready.
    """

    def __init__(
        self,
        log_path: Path,
        command: list[str],
        env: Mapping[str, str] = {},
        health_path: str = "/health",
    ) -> None:
        super().__init__(log_path, start_timeout_s=START_S)
        self.health_path = health_path
        self._command = command
        self._env = env

    def launch(self, port: int) -> Launch:
        """Return the peer's command and environment."""
        command = [str(port) if word == "{port}" else word for word in self._command]
        return Launch(command, {**os.environ, **self._env})


@dataclass(frozen=True, slots=True)
class WithCacheServer:
    """A deployment with LMCache's cache server, which keeps KV in CPU memory.

    Attributes:
        cpu_gib: memory of the cache server for KV, GiB.
    """

    cpu_gib: float

    @contextmanager
    def __call__(self, options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
        """Start the cache server, then the server that uses it."""
        queue_port = free_port()
        command = [program(LMCACHE, "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(queue_port), "--http-host", "127.0.0.1", "--http-port", "{port}"]
        command += ["--l1-size-gb", f"{self.cpu_gib:g}", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto", "--disable-observability"]
        env, log = {**HASH_SEED, "LMCACHE_DISABLE_BANNER": "1"}, setting.log
        address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": queue_port}
        told = replace(
            options,
            python=program(LMCACHE, "python"),
            env={**options.env, **HASH_SEED},
            kv_transfer_config={
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": MODULE,
                "kv_role": "kv_both",
                "kv_connector_extra_config": address,
            },
        )
        with (
            Peer(log.with_suffix(".lmcache.log"), command, env, "/healthcheck") as cache,
            setting.start(told) as server,
        ):
            yield Deployed(server, server.url, (cache,))


def router_of(urls: Sequence[str], log: Path, *words: str) -> Peer:
    """Return the router for running servers. The router is not started yet.

    Args:
        urls: addresses of the servers.
        log: path of the router's log.
        words: further command line arguments.

    Raises:
        ServerError: the router is not installed.
    """
    command = [program(ROUTER, ROUTER), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    return Peer(log, [*command, "--worker-urls", *urls, *words])


def program_scheduling(
    costs: ServerCosts, capacity_tokens: int, *, most_waiting: int
) -> dict[str, Any]:
    """Return the value of the router's ``--program-scheduling-config-json``. It has one queue for
    all targets, as the router's documentation recommends, and defaults for all other settings.

    Args:
        costs: costs of stock vLLM on this machine.
        capacity_tokens: total length of the contexts that the server can hold.
        most_waiting: maximum number of requests waiting on the server. The router admits no further
            program while more are waiting.
    """
    step, prefill = costs.step + costs.seq, PREFILL * costs.token
    return {
        "program_scheduling_enable_key": "auto",
        "token_capacity_per_target": capacity_tokens,
        "global_queue": True,
        "admission_waiting_request_threshold": most_waiting,
        "prefill_cost_model": {
            "intercept_seconds": costs.first,
            "linear_seconds_per_1k_tokens": 1e3 * costs.token,
            # A prompt of n tokens has n²/2 pairs.
            "quadratic_seconds_per_1k_tokens_squared": 1e6 / 2 * costs.pair,
            "decode_throughput_alpha": step / (step + prefill),
        },
        "decode_throughput_model": {
            "fixed_step_seconds": costs.step,
            "batch_step_seconds_per_request": costs.seq,
            "context_step_seconds_per_token": costs.kv,
        },
    }


@dataclass(frozen=True, slots=True)
class BehindRouter:
    """A deployment behind the router. Neither the router nor the clients retry requests.

    Attributes:
        capacity_tokens, most_waiting: see ``program_scheduling``.
    """

    capacity_tokens: int
    most_waiting: int

    @contextmanager
    def __call__(self, options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
        """Start the server, and the router in front of it.

        Raises:
            ServerError: a part of the deployment does not start, or ``setting.costs`` is None.
        """
        if setting.costs is None:
            raise ServerError(
                "the router's cost models need the costs of stock vLLM, which were not measured"
            )
        told = program_scheduling(
            setting.costs, self.capacity_tokens, most_waiting=self.most_waiting
        )
        with setting.start(options) as server:
            words = ["--policy", "consistent_hash", "--disable-retries"]
            words += ["--enable-program-scheduling"]
            words += ["--program-scheduling-config-json", json.dumps(told)]
            with router_of([server.url], setting.log.with_suffix(".router.log"), *words) as router:
                yield Deployed(server, router.url, (router,))
