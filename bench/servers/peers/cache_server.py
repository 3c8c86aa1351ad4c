"""LMCache: its cache server, and vLLM with its connector, both from its own environment.

On a CPU only its multi-process connector works, in its mode ``engine_driven``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_kv.bench.servers.service import Launch, Service, free_port
from tiered_kv.bench.servers.vllm_server import ServerOptions

from .deployment import Deployed, Setting
from .environments import program

PEER = "lmcache"
START_S = 120.0
MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Both processes must hash tokens alike."""


class CacheServer(Service):
    """The process that keeps KV in CPU memory.

    Args:
        cpu_gib: size of that memory.
    """

    health_path = "/healthcheck"

    def __init__(self, cpu_gib: float, log_path: Path) -> None:
        super().__init__(log_path, start_timeout_s=START_S)
        self._cpu_gib = cpu_gib
        self.queue_port = free_port()

    def launch(self, port: int) -> Launch:
        """The cache server's command."""
        command = [program(PEER, "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.queue_port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        command += ["--l1-size-gb", f"{self._cpu_gib:g}", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto", "--disable-observability"]
        return Launch(command, {**os.environ, **HASH_SEED, "LMCACHE_DISABLE_BANNER": "1"})


@dataclass(frozen=True, slots=True)
class WithCacheServer:
    """A deployment with the cache server beside it.

    Attributes:
        cpu_gib: size of its memory.
    """

    cpu_gib: float

    @contextmanager
    def __call__(self, options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
        """Start the cache server, and then the server that uses it."""
        with CacheServer(self.cpu_gib, setting.log.with_suffix(".lmcache.log")) as cache:
            told = replace(
                options,
                python=program(PEER, "python"),
                env={**options.env, **HASH_SEED},
                kv_transfer_config={
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": MODULE,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": cache.queue_port,
                    },
                },
            )
            with setting.start(told) as server:
                yield Deployed(server, server.url, (cache,))
