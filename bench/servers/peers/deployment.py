"""Deployment of a server for one run: alone, or with what a peer puts around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tiered_kv.bench.replay.server_costs import ServerCosts
from tiered_kv.bench.servers.service import Service
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer


@dataclass(frozen=True, slots=True)
class Setting:
    """Needs of a deployment.

    Attributes:
        start: makes the server of these options.
        log: the server's log; those of other processes lie beside it.
        costs: of stock on this machine; None while they are not measured.
    """

    start: Callable[[ServerOptions], VllmServer]
    log: Path
    costs: ServerCosts | None


@dataclass(frozen=True, slots=True)
class Deployed:
    """A server that answers.

    Attributes:
        url: where requests go.
        around: the processes beside it.
    """

    server: VllmServer
    url: str
    around: tuple[Service, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Process groups of all of it."""
        return tuple(one.pid for one in (self.server, *self.around) if one.pid is not None)

    def check(self) -> None:
        """Raise ``ServerError`` unless all of it is running."""
        for one in (self.server, *self.around):
            one.check()


Deploy: TypeAlias = Callable[[ServerOptions, Setting], AbstractContextManager[Deployed]]
"""Starts a deployment, and ends it with the block.

Raises:
    ServerError: a part of it does not start.
"""


@contextmanager
def alone(options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
    """A server with nothing around it."""
    with setting.start(options) as server:
        yield Deployed(server, server.url)
