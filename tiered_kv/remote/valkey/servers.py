"""Several servers as one store: each run of keys lies on one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tiered_kv.remote.address import RemoteAddress, server_of
from tiered_kv.remote.base import Got, Outcome, Parts, RemoteKey

from .client import ValkeyClient


class ValkeyStore:
    """The servers of an address. A server that is down has nothing, and takes nothing: what would
    lie there is computed, and nothing is placed anew."""

    def __init__(self, address: RemoteAddress) -> None:
        self._clients = [ValkeyClient(server, address) for server in address.servers]
        self._names = [str(server).encode() for server in address.servers]

    def check(self, deadline: float) -> None:
        """Connect to every server; see ``RemoteStore``."""
        for client in self._clients:
            client.check(deadline)

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        """See ``RemoteStore``."""
        found = [Outcome.DOWN] * len(keys)
        split = self._split(keys)
        for number, (client, mine) in enumerate(split):
            # One that is silent leaves the others their share of the time.
            now = time.monotonic()
            until = now + (deadline - now) / (len(split) - number)
            answers = client.exists([keys[at].name for at in mine], until)
            for at, outcome in zip(mine, answers, strict=True):
                found[at] = outcome
        return found

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        """See ``RemoteStore``."""
        for client, mine in self._split(keys):
            for at, outcome, nbytes in client.get([keys[at].name for at in mine], buffer, deadline):
                yield Got(mine[at], outcome, nbytes)

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        """See ``RemoteStore``."""
        found = [Outcome.DOWN] * len(values)
        for client, mine in self._split([key for key, _ in values]):
            some = [(values[at][0].name, values[at][1]) for at in mine]
            for at, outcome in zip(mine, client.put(some, deadline), strict=True):
                found[at] = outcome
        return found

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        """See ``RemoteStore``."""
        deleted = [
            client.delete([keys[at].name for at in mine], deadline)
            for client, mine in self._split(keys)
        ]
        return all(deleted)

    def close(self) -> None:
        """See ``RemoteStore``."""
        for client in self._clients:
            client.close()

    def _split(self, keys: Sequence[RemoteKey]) -> list[tuple[ValkeyClient, list[int]]]:
        """Indices of the keys of each server that has any."""
        if len(self._clients) == 1:
            return [(self._clients[0], list(range(len(keys))))] if keys else []
        mine: list[list[int]] = [[] for _ in self._clients]
        of_run: dict[bytes, int] = {}
        for at, key in enumerate(keys):
            if (server := of_run.get(key.run)) is None:
                server = of_run[key.run] = server_of(key.run, self._names)
            mine[server].append(at)
        return [(client, some) for client, some in zip(self._clients, mine, strict=True) if some]
