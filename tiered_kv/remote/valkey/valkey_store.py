"""The servers of an address as one store: independent servers, or the nodes of a cluster.

The first call detects which, with ``CLUSTER SLOTS``. One reachable node of a cluster is enough: its
reply names the others.

| | independent servers | a cluster |
|---|---|---|
| a run of keys is on | the server with the highest hash of run and server | the master that owns the slot of the run's hash tag |
| its keys are named | by the caller | ``tkv:{tag}`` and the caller's name |
| a server fails | its pages are recomputed, and its runs do not move | the same, until a replica is promoted |

The tag keeps a run on one node, so that a node that is down truncates only contexts of its runs.

A node redirects keys of slots that moved (``MOVED``) or are being moved (``ASK``). Redirects are
followed within the call. The owners of all slots are fetched again after a ``MOVED`` and while a
node fails, at most every ``REFRESH_S`` seconds, from any node that answers. Replicas are not read.

No library is used. With valkey-py 6.2 and libvalkey, reading 64 values of 1 MiB from three masters
on loopback, on two busy cores, takes twice as long (0.66 instead of 1.33 GiB/s) and 2.9 times the
CPU time (medians of 25 rounds). With one master stopped and a time-out of 0.5 s, a pipeline of 64
lookups in valkey-py returned after 41 s, without the answers of the other masters. With this
module, a call with a deadline of 0.5 s returned these answers in time.
"""  # noqa: E501 - a table

from __future__ import annotations

import logging
import ssl
import time
from binascii import crc_hqx
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

import xxhash

from tiered_kv.remote.address import RemoteAddress, Server, server_of
from tiered_kv.remote.base import Got, Outcome, Parts, RefusedError, RemoteKey
from tiered_kv.remote.breaker import Complaint

from .client import Answer, Route, ValkeyClient
from .replies import Reply, ServerError

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

SLOTS = 1 << 14
HOPS = 4
"""Maximum number of nodes to which a call sends a key."""
REFRESH_S = 0.25
"""Shortest time between two attempts to fetch the owners of all slots, seconds."""
_FAILED = (Outcome.DOWN, Outcome.LATE)


def tag_of(run: bytes) -> bytes:
    """Return the hash tag of a run's keys in a cluster."""
    return xxhash.xxh3_64_hexdigest(run).encode()


def slot_of(tag: bytes) -> int:
    """Return the slot of a hash tag: CRC16 as in XMODEM."""
    return crc_hqx(tag, 0) % SLOTS


def owners_of_slots(reply: Reply, asked: Server) -> list[Server | None]:
    """Return the master of each slot from a reply to ``CLUSTER SLOTS``; None for a slot without a
    master.

    Args:
        asked: the server that replied. Its host is used for entries without a host, because a node
            that does not know its own host leaves it out.

    Raises:
        ValueError: the reply has another form.
    """
    owners: list[Server | None] = [None] * SLOTS
    match reply:
        case list(entries):
            for entry in entries:
                match entry:
                    case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                        0 <= first <= last < SLOTS
                    ):
                        owner = Server(host.decode() if host else asked.host, port)
                        owners[first : last + 1] = [owner] * (last + 1 - first)
                    case _:
                        raise ValueError(f"expected a range of slots, got {entry!r}")
        case _:
            raise ValueError(f"expected a list of slots, got {reply!r}")
    return owners


def _shares(deadline: float, items: Collection[_T]) -> Iterator[tuple[float, _T]]:
    """Yield each item with its deadline: an equal share of the time that is left, so that a silent
    server does not use up the time of the others."""
    for left, item in zip(range(len(items), 0, -1), items, strict=True):
        now = time.monotonic()
        yield now + (deadline - now) / left, item


class _Batch(NamedTuple):
    """Keys of a call that one server has.

    Attributes:
        mine: indices of the keys.
        names: the keys' names on the server.
        until: deadline for the server.
        asking: True if another node redirected the keys with ``ASK``.
    """

    client: ValkeyClient
    mine: list[int]
    names: list[bytes]
    until: float
    asking: bool

    def keep(self, answers: Sequence[Answer], found: list[Answer]) -> None:
        """Enter the server's ``answers`` into ``found``, the list of answers for all keys of the
        call, at the indices ``mine``."""
        for at, answer in zip(self.mine, answers, strict=True):
            found[at] = answer


class ValkeyStore:
    """The servers of an address as one store. A server that is down neither returns nor accepts
    values."""

    def __init__(self, address: RemoteAddress) -> None:
        self._address = address
        self._tls = ssl.create_default_context() if address.tls else None
        self._labels = [str(server).encode() for server in address.servers]
        self._clients: dict[Server, ValkeyClient] = {}
        self._owners: list[Server | None] | None = None  # by slot; None without a cluster
        self._detected = self._outdated = self._closed = False
        self._refresh_at = 0.0
        self._asked: Server | None = None  # server whose reply listed the owners
        self._complaint = Complaint()
        self._keep_clients(address.servers)

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers of the address, and the masters of its cluster as far as they are known."""
        return tuple(dict.fromkeys((*self._address.servers, *self._clients)))

    def check(self, deadline: float) -> None:
        """Connect to every server, in a cluster to every master; see ``RemoteStore``."""
        failed = dict[Server, Exception]()
        for until, server in _shares(deadline, self._address.servers):
            try:
                self._client(server).check(until)
            except RefusedError:
                raise
            except Exception as error:
                failed[server] = error
        if len(failed) < len(self._address.servers) and self._refresh(deadline) is not None:
            raise ConnectionError("no server gives a usable answer to CLUSTER SLOTS")
        if self._owners is None:
            for reason in failed.values():
                raise reason
            return
        for until, server in _shares(deadline, tuple(self._clients)):
            try:
                self._client(server).check(until)
            except RefusedError:
                raise
            except Exception as error:
                raise ConnectionError(
                    f"the store is a cluster whose node {server} cannot be reached from this "
                    f"machine: {failed.get(server, error)}"
                ) from error

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        """Look up values on their servers; see ``RemoteStore.exists``."""
        found: list[Answer] = [self._prepare(deadline)] * len(keys)
        for batch in self._batches(keys, found, deadline):
            batch.keep(batch.client.exists(batch.names, batch.until, batch.asking), found)
        return [Outcome.MISS if isinstance(one, Route) else one for one in found]

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        """Read values from their servers, one server after another; see ``RemoteStore.get``."""
        found: list[Answer] = [self._prepare(deadline)] * len(keys)
        left = set(range(len(keys)))
        for batch in self._batches(keys, found, deadline):
            for index, answer, nbytes in batch.client.get(
                batch.names, buffer, batch.until, batch.asking
            ):
                found[at := batch.mine[index]] = answer
                if not isinstance(answer, Route):
                    left.discard(at)
                    yield Got(at, answer, nbytes)
        for at in sorted(left):
            answer = found[at]
            yield Got(at, Outcome.MISS if isinstance(answer, Route) else answer)

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        """Store values on their servers; see ``RemoteStore.put``."""
        found: list[Answer] = [self._prepare(deadline)] * len(values)
        for batch in self._batches([key for key, _ in values], found, deadline):
            some = [(name, values[at][1]) for at, name in zip(batch.mine, batch.names, strict=True)]
            batch.keep(batch.client.put(some, batch.until, batch.asking), found)
        return [Outcome.REFUSED if isinstance(one, Route) else one for one in found]

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        """Delete values on their servers; see ``RemoteStore.delete``."""
        found: list[Answer] = [self._prepare(deadline)] * len(keys)
        for batch in self._batches(keys, found, deadline):
            batch.keep(batch.client.delete(batch.names, batch.until, batch.asking), found)
        return all(one is Outcome.MISS for one in found)

    def close(self) -> None:
        """Close the connections to all servers; see ``RemoteStore.close``."""
        self._closed = True
        self._keep_clients(())

    # -- where keys are -----------------------------------------------------------------

    def _batches(
        self, keys: Sequence[RemoteKey], found: Sequence[Answer], deadline: float
    ) -> Iterator[_Batch]:
        """Yield the keys by server, and then the keys that a cluster redirected, by new server.

        Args:
            found: answers for all keys. The caller enters the answers of each batch.
        """
        if not self._detected or self._closed:
            return
        names, routes = self._routes(keys)
        for _ in range(HOPS):
            for until, (route, mine) in _shares(deadline, routes.items()):
                some = [names[at] for at in mine]
                yield _Batch(self._client(route.server), mine, some, until, route.asking)
            redirected: dict[Route, list[int]] = {}
            for mine in routes.values():
                for at in mine:
                    answer = found[at]
                    if isinstance(answer, Route):
                        redirected.setdefault(answer, []).append(at)
                        self._outdated |= not answer.asking
                    elif answer in _FAILED and self._owners is not None:
                        self._outdated = True
            routes = redirected
            if not routes or self._owners is None:
                return

    def _routes(self, keys: Sequence[RemoteKey]) -> tuple[list[bytes], dict[Route, list[int]]]:
        """Return the keys' names on their servers, and the indices of the keys of each server."""
        names = list[bytes]()
        routes: dict[Route, list[int]] = {}
        of_run: dict[bytes, tuple[bytes, list[int]]] = {}
        for at, key in enumerate(keys):
            if (known := of_run.get(key.run)) is None:
                prefix, server = self._place(key.run)
                if server is None:  # no node has the slot, so none is asked
                    self._outdated = True
                mine = routes.setdefault(Route(server, False), []) if server else []
                known = of_run[key.run] = prefix, mine
            names.append(known[0] + key.name)
            known[1].append(at)
        return names, routes

    def _place(self, run: bytes) -> tuple[bytes, Server | None]:
        """Return the prefix of the names of the run's keys, and the server of the run; None as the
        server if no node of the cluster has the run's slot."""
        if self._owners is None:
            return b"", self._address.servers[server_of(run, self._labels)]
        tag = tag_of(run)
        return b"tkv:{%b}" % tag, self._owners[slot_of(tag)]

    def _prepare(self, deadline: float) -> Outcome:
        """Detect a cluster, and fetch the owners of its slots if they may have changed. Returns the
        outcome for keys without a server."""
        now = time.monotonic()
        if self._closed or now >= deadline:
            return Outcome.DOWN
        if not self._detected:
            return self._refresh(deadline) or Outcome.DOWN
        if self._outdated and now >= self._refresh_at:
            self._refresh(now + (deadline - now) / 2)
        return Outcome.DOWN

    def _refresh(self, deadline: float) -> Outcome | None:
        """Ask the servers, one after another, for the owners of all slots. Returns None if one of
        them answered."""
        self._refresh_at = time.monotonic() + REFRESH_S
        outcome = Outcome.DOWN
        clients = {one: self._client(one) for one in (*self._clients, *self._address.servers)}
        # The server that replied last comes after the others, because its view may be outdated;
        # unconnected servers come after all connected ones.
        order = sorted(clients, key=lambda one: (not clients[one].connected, one == self._asked))
        for until, server in _shares(deadline, order):
            reply = clients[server].topology(until)
            if isinstance(reply, Outcome):
                outcome = reply
            elif isinstance(reply, ServerError):
                if self._owners is None:
                    self._detected = True
                    if self._outdated:
                        self._complain(
                            f"{server} redirects calls, but refuses CLUSTER SLOTS: {reply}"
                        )
                    self._outdated = False
                    return None
            elif self._learn(reply, server):
                return None
        return outcome

    def _learn(self, reply: Reply, asked: Server) -> bool:
        """Record the owners of all slots. Returns False if the server knows none."""
        try:
            owners = owners_of_slots(reply, asked)
        except ValueError as error:
            self._complain(f"{asked} answers CLUSTER SLOTS with an unknown reply: {error}")
            return False
        masters = {one for one in owners if one is not None}
        if masters and masters != set(self._owners or ()) - {None}:
            nodes = ", ".join(sorted(map(str, masters)))
            logger.info(
                "the remote store at %s is a cluster with the masters %s", self._address, nodes
            )
        if masters:
            self._owners, self._asked = owners, asked
            self._detected, self._outdated = True, False
            self._keep_clients(masters)
        return bool(masters)

    def _client(self, server: Server) -> ValkeyClient:
        if (client := self._clients.get(server)) is None:
            client = self._clients[server] = ValkeyClient(server, self._address, self._tls)
        if self._closed:  # an unfinished call may still be read after ``close``
            client.close()
        return client

    def _keep_clients(self, servers: Collection[Server]) -> None:
        """Close the clients of all other servers, and create the missing clients of ``servers``."""
        for server in [one for one in self._clients if one not in servers]:
            self._clients.pop(server).close()
        for server in servers:
            self._client(server)

    def _complain(self, what: str) -> None:
        if self._complaint.begins(what, time.monotonic()):
            logger.warning("the remote store at %s: %s", self._address, what)
