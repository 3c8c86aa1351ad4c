from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.remote.base import RemoteKey
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.testing.valkey import ValkeyServer

MakeServer = Callable[..., ValkeyServer]


def keys(*names: str) -> list[RemoteKey]:
    return [RemoteKey(name.encode(), name.encode()) for name in names]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Return a function that starts a Valkey server. The servers are killed after the test."""
    servers: list[ValkeyServer] = []

    def make(**options: Any) -> ValkeyServer:
        server = ValkeyServer(tmp_path, **options)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def server(make_server: MakeServer) -> ValkeyServer:
    return make_server()


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[ValkeyStore]:
    store = ValkeyStore(server.address)
    yield store
    store.close()
