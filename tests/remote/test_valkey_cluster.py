"""Tests with a real Valkey cluster whose slots move and whose masters fail. Every value that is
read is correct, and no call outlives its deadline."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.remote.conftest import MakeServer, keys
from tests.remote.hostile import hostile_server
from tests.remote.test_valkey import encrypted
from tests.storage.test_remote_pages import SITE
from tiered_kv.config import load_config
from tiered_kv.remote.address import Server, parse_address
from tiered_kv.remote.base import Outcome, RefusedError, RemoteKey, RemoteStore
from tiered_kv.remote.valkey.valkey_store import (
    HOPS,
    SLOTS,
    ValkeyStore,
    owners_of_slots,
    slot_of,
    tag_of,
)
from tiered_kv.storage.remote_tier import RemoteTier
from tiered_kv.testing.conformance.remote import (
    RemoteConformance,
    put_all,
    read_all,
    some_keys,
    soon,
)
from tiered_kv.testing.conformance.store import page_bytes, page_key
from tiered_kv.testing.valkey import ValkeyCluster, ValkeyServer, role

HIT, MISS, DOWN, LATE = Outcome.HIT, Outcome.MISS, Outcome.DOWN, Outcome.LATE
STORED, REFUSED = Outcome.STORED, Outcome.REFUSED

CALM_S = 60.0
"""Seconds after which an unreachable node counts as failed, in tests without a failover."""
CALL_S, SLACK_S = 0.5, 2.0
"""Time limit of a call in seconds, and the number of seconds by which a call may exceed it on a
busy machine."""
SERVED, SERVED_AFTER_S = 0.9, 1.0
"""Fraction of values that must be readable after a promotion, and the number of seconds that this
may take."""


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ValkeyCluster(folder, node_timeout_s=CALM_S) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ValkeyCluster) -> ValkeyCluster:
    """Empty the shared cluster, for tests that stop no node."""
    for node in shared_cluster.nodes[:3]:
        node.ask(b"FLUSHALL")
    return shared_cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    with ValkeyCluster(tmp_path) as cluster:
        yield cluster


def open_at(cluster: ValkeyCluster, *nodes: ValkeyServer) -> ValkeyStore:
    return ValkeyStore(parse_address(cluster.url(*nodes)))


def value_of(key: RemoteKey) -> bytes:
    """Return the value that the tests store under a key."""
    return key.name * 500


def fill(store: ValkeyStore, count: int) -> list[RemoteKey]:
    names = some_keys(count)
    put_all(store, names, [value_of(key) for key in names])
    return names


def slot_of_run(key: RemoteKey) -> int:
    return slot_of(tag_of(key.run))


class TestCluster(RemoteConformance):
    """The conformance suite of remote stores, with a cluster whose address names all nodes."""

    @pytest.fixture(autouse=True)
    def serve(self, cluster: ValkeyCluster) -> None:
        self.address = parse_address(cluster.url())

    def make_store(self, root: Path) -> RemoteStore:
        return ValkeyStore(self.address)


class TestOneEndpoint(TestCluster):
    """The conformance suite of remote stores, with a cluster whose address names one node, which is
    a replica."""

    @pytest.fixture(autouse=True)
    def serve(self, cluster: ValkeyCluster) -> None:
        self.address = parse_address(cluster.url(cluster.nodes[4]))


def test_runs_stay_together_and_are_spread_over_the_masters(cluster: ValkeyCluster) -> None:
    store = open_at(cluster, cluster.nodes[0])
    known = [len(store.servers)]
    names = fill(store, 200)
    assert [*known, len(store.servers)] == [1, 3], "nothing is known before the first call"
    owners = dict[bytes, set[int]]()
    for key in names:
        owner = cluster.owner(slot_of_run(key))
        assert owner.ask(b"EXISTS", b"tkv:{%b}%b" % (tag_of(key.run), key.name)) == 1
        owners.setdefault(key.run, set()).add(owner.port)
    assert all(len(ports) == 1 for ports in owners.values())
    assert len(set.union(*owners.values())) == 3
    store.close()


def test_names_in_a_cluster_stay_as_they_are(cluster: ValkeyCluster) -> None:
    """A value in a cluster has a fixed name, which contains a hash tag of its run. Engines of other
    releases find pages by this name."""
    assert slot_of(b"123456789") == 0x31C3, "the example in the specification of clusters"
    store = open_at(cluster)
    put_all(store, [RemoteKey(b"page", b"run")], [b"value"])
    name = b"tkv:{afc3b56278c6744e}page"
    assert cluster.owner(slot_of(b"afc3b56278c6744e")).ask(b"GET", name) == b"value"
    store.close()


def test_a_slot_that_is_being_moved_is_read_and_written(cluster: ValkeyCluster) -> None:
    """While a slot moves, its owner serves the keys that it still has and redirects the others. All
    keys of the slot are read, written and deleted, both during the move and after it."""
    store = open_at(cluster)
    moved = [RemoteKey(b"page %d" % at, b"one run") for at in range(40)]
    old, new = moved[:20], moved[20:]
    put_all(store, old, [value_of(key) for key in old])
    slot = slot_of_run(moved[0])
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes[:3] if node is not source)
    assert cluster.begin_move(slot, target) is source
    assert cluster.move_keys(slot, source, target, 10) == 10
    assert store.exists(moved, soon()) == [HIT] * 20 + [MISS] * 20
    put_all(store, new, [value_of(key) for key in new])
    assert read_all(store, moved) == {at: value_of(key) for at, key in enumerate(moved)}
    assert store.delete(moved[18:22], soon())
    assert store.exists(moved, soon()) == [HIT] * 18 + [MISS] * 4 + [HIT] * 18
    while cluster.move_keys(slot, source, target, 10):
        pass
    cluster.end_move(slot, source, target)
    assert store.exists(moved, soon()) == [HIT] * 18 + [MISS] * 4 + [HIT] * 18, "MOVED is followed"
    assert source.ask(b"CLUSTER", b"COUNTKEYSINSLOT", b"%d" % slot) == 0
    cluster.wait(cluster.works)
    cluster.move_slot(slot, source)
    store.close()


def test_slots_move_while_pages_are_read_and_written(cluster: ValkeyCluster) -> None:
    store = open_at(cluster, cluster.nodes[1])
    names = fill(store, 200)
    slots = sorted(set(map(slot_of_run, names)))
    failed = list[BaseException]()

    def move() -> None:
        try:
            for slot in slots:
                source = cluster.owner(slot)
                at = cluster.nodes.index(source)
                cluster.move_slot(slot, cluster.nodes[(at + 1) % 3])
        except BaseException as error:
            failed.append(error)

    mover, rounds = threading.Thread(target=move), 0
    mover.start()
    while mover.is_alive() or not rounds:
        rounds += 1
        fresh = [RemoteKey(b"%d %b" % (rounds, key.name), key.run) for key in names[::10]]
        put_all(store, fresh, [value_of(key) for key in fresh])
        everything = [*names, *fresh]
        found = read_all(store, everything)
        assert found == {at: value_of(key) for at, key in enumerate(everything)}
        assert set(store.exists(everything, soon())) == {HIT}
        assert store.delete(fresh, soon())
    mover.join()
    assert not failed
    store.close()


class Reader:
    """Reads all values repeatedly. Asserts that each value is correct or missing, and that no call
    outlives its deadline."""

    def __init__(self, store: ValkeyStore, names: list[RemoteKey]) -> None:
        self._store = store
        self._names = names
        self._added = 0

    def served(self, seconds: float = CALL_S) -> float:
        """Return the fraction of values that were found both when looked up and when read."""
        names, began = self._names, time.monotonic()
        there = self._store.exists(names, began + seconds)
        looked_up = time.monotonic()
        buffer = memoryview(bytearray(1 << 16))
        hits = set[int]()
        for at, outcome, nbytes in self._store.get(names, buffer, looked_up + seconds):
            if outcome is HIT:
                assert bytes(buffer[:nbytes]) == value_of(names[at])
                hits.add(at)
            assert outcome is not Outcome.BAD
        read = time.monotonic()
        self._added += 1
        fresh = RemoteKey(b"fresh %d" % self._added, names[self._added % len(names)].run)
        written = self._store.put([(fresh, [value_of(fresh)])], read + seconds)
        assert set(written) <= {STORED, REFUSED, DOWN, LATE}
        assert looked_up - began < seconds + SLACK_S
        assert read - looked_up < seconds + SLACK_S
        assert time.monotonic() - read < seconds + SLACK_S
        return len([at for at in hits if there[at] is HIT]) / len(names)


@pytest.mark.parametrize("fault", [ValkeyServer.kill, ValkeyServer.pause])
def test_a_replica_is_promoted_while_values_are_read(
    own_cluster: ValkeyCluster, fault: Callable[[ValkeyServer], None]
) -> None:
    lost, promoted = own_cluster.nodes[0], own_cluster.nodes[3]
    store = open_at(own_cluster, lost)  # the one endpoint is the node that fails
    reader = Reader(store, fill(store, 300))
    own_cluster.wait(own_cluster.replicated)
    assert reader.served() == 1.0
    fault(lost)
    assert reader.served() < 1.0
    while not own_cluster.has_promoted(promoted):
        reader.served()
    until = time.monotonic() + SERVED_AFTER_S
    while time.monotonic() < until:
        reader.served()
    assert reader.served(20.0) >= SERVED
    # The old master becomes a replica of the new one.
    lost.go_on() if fault is ValkeyServer.pause else lost.start()
    own_cluster.wait(lambda: role(lost) == b"slave" and own_cluster.works())
    for _ in range(5):
        assert reader.served(20.0) >= SERVED
    store.close()


# -- replies that nodes give in trouble ---------------------------------------------------


def slots(*ranges: tuple[int, int, bytes | None, int]) -> bytes:
    """Return a reply to ``CLUSTER SLOTS``: first and last slot, host and port of each master."""
    parts = [b"*%d\r\n" % len(ranges)]
    for first, last, host, port in ranges:
        name = b"$-1\r\n" if host is None else b"$%d\r\n%b\r\n" % (len(host), host)
        parts.append(b"*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, name, port))
    return b"".join(parts)


class Node:
    """A cluster node that has a value for every key, unless ``reply`` is set.

    Attributes:
        reply: its reply to every command on keys; None for values.
        slots: its reply to ``CLUSTER SLOTS``.
        asked: commands on keys that it received.
    """

    def __init__(self) -> None:
        self.reply: bytes | None = None
        self.slots = slots()
        self.asked = list[bytes]()

    def answer(self, words: list[bytes]) -> bytes:
        if words[0] in (b"PING", b"ASKING"):
            return b"+OK\r\n"
        self.asked.append(words[0])
        return self.reply or {b"SET": b"+OK\r\n", b"GET": b"$1\r\nx\r\n"}.get(words[0], b":1\r\n")


@contextlib.contextmanager
def a_node() -> Iterator[tuple[Node, ValkeyStore, int]]:
    """Run a node that owns all slots. Yields it, a store at its address, and its port."""
    node = Node()
    with hostile_server(node.answer, lambda _: node.slots) as url:
        address = parse_address(url)
        port = address.servers[0].port
        node.slots = slots((0, SLOTS - 1, None, port))
        store = ValkeyStore(address)
        yield node, store, port
        store.close()


def test_reads_go_on_as_soon_as_the_cluster_works_again() -> None:
    """While the node returns CLUSTERDOWN, as in a failover, lookups and reads report DOWN, and
    writes are refused. The first calls after that succeed."""
    (a,) = keys("a")
    with a_node() as (node, store, _):
        assert store.exists([a], soon()) == [HIT]
        node.reply = b"-CLUSTERDOWN The cluster is down\r\n"
        for _ in range(5):
            assert store.exists([a], soon()) == [DOWN]
            assert read_all(store, [a]) == {0: DOWN}
            assert store.put([(a, [b"x"])], soon()) == [REFUSED]
        node.reply = None
        assert store.exists([a], soon()) == [HIT]
        assert store.put([(a, [b"x"])], soon()) == [STORED]


@pytest.mark.parametrize("code", ["MOVED", "ASK"])
def test_nodes_that_redirect_in_circles_are_left(code: str) -> None:
    (a,) = keys("a")
    with a_node() as (node, store, port):
        node.reply = f"-{code} 7 127.0.0.1:{port}\r\n".encode()
        assert store.exists([a], soon()) == [MISS]
        assert node.asked.count(b"EXISTS") <= HOPS
        assert read_all(store, [a]) == {0: MISS}
        assert store.put([(a, [b"x"])], soon()) == [REFUSED]
        assert not store.delete([a], soon())


def test_a_node_that_cannot_be_reached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The cluster announces a node at an address that the client cannot reach. The error and the
    log name this node, and the values on the other node are served."""
    names = keys(*map(str, range(40)))
    with a_node() as (node, store, port), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        other = closed.getsockname()[1]
        node.slots = slots((0, 8191, b"", port), (8192, SLOTS - 1, b"127.0.0.1", other))
        with pytest.raises(ConnectionError, match=f"node 127.0.0.1:{other} cannot be reached"):
            store.check(soon())
        assert set(store.exists(names, soon())) == {HIT, DOWN}
        assert set(read_all(store, names).values()) == {b"x", DOWN}
    assert f"127.0.0.1:{other} (cluster valkey://127.0.0.1:{port}) is unavailable" in caplog.text


def test_a_user_who_may_not_list_the_slots_is_told(caplog: pytest.LogCaptureFixture) -> None:
    (a,) = keys("a")
    caplog.set_level(logging.INFO, "tiered_kv")
    with a_node() as (node, store, port):
        node.slots = b"-NOPERM User agent has no permissions to run the 'cluster|slots' command\r\n"
        node.reply = f"-MOVED 7 127.0.0.1:{port}\r\n".encode()
        until = time.monotonic() + 60.0
        while "cluster|slots" not in caplog.text:
            assert store.exists([a], soon()) == [MISS]
            assert store.put([(a, [b"x"])], soon()) == [REFUSED]
            assert time.monotonic() < until
        # Once the permission is granted, the next redirect is sufficient.
        node.slots = slots((0, SLOTS - 1, None, port))
        while "is a cluster" not in caplog.text:
            assert store.exists([a], soon()) == [MISS]
            assert time.monotonic() < until
        node.reply = None
        assert store.exists([a], soon()) == [HIT]


@pytest.mark.parametrize(
    "reply",
    [
        b"*0\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*2\r\n:0\r\n:99999\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 50,
        b"-LOADING the data\r\n",
        b"nonsense\r\n",
        slots((0, 1, b"\xff", 1)),
        slots((5, 4, b"host", 1)),
        slots((0, SLOTS, b"host", 1)),
    ],
)
def test_a_reply_that_lists_no_slots_is_not_used(reply: bytes) -> None:
    (a,) = keys("a")
    with a_node() as (node, store, _):
        good, node.slots = node.slots, reply
        assert store.exists([a], soon()) == [DOWN]
        assert store.put([(a, [b"x"])], soon()) == [DOWN]
        assert read_all(store, [a]) == {0: DOWN}
        assert not store.delete([a], soon())
        assert not node.asked
        node.slots, until = good, time.monotonic() + 60.0
        while store.exists([a], soon()) != [HIT]:
            assert time.monotonic() < until
            time.sleep(0.05)


REPLIES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-1, SLOTS) | st.binary(max_size=3), st.lists, max_leaves=30
)


@given(REPLIES)
def test_any_reply_gives_owners_or_is_refused(reply: Any) -> None:
    with contextlib.suppress(ValueError):
        assert len(owners_of_slots(reply, Server("host", 1))) == SLOTS


# -- who may call, and how nodes are named ------------------------------------------------


def test_every_node_gets_the_login(tmp_path: Path) -> None:
    """A user with the fewest rights that a cluster needs reads and writes on all nodes, while slots
    move. Clients without a valid login are refused."""
    with ValkeyCluster(tmp_path, masters=2, password="hunter2", node_timeout_s=CALM_S) as cluster:
        rights = "+ping +exists +get +set +unlink +cluster|slots +asking"
        for node in cluster.nodes:
            node.ask(
                b"ACL", b"SETUSER", b"agent", b"on", b">pw", b"~tkv:*", *rights.encode().split()
            )
        hosts = str(cluster.nodes[0].server)
        for login in ("", ":wrong@"):
            stranger = ValkeyStore(parse_address(f"valkey://{login}{hosts}"))
            with pytest.raises(RefusedError):
                stranger.check(soon())
            stranger.close()
        store = ValkeyStore(parse_address(f"valkey://agent:pw@{hosts}"))
        store.check(soon())
        names = fill(store, 40)
        for key in names[::4]:
            slot = slot_of_run(key)
            source = cluster.owner(slot)
            cluster.begin_move(slot, next(node for node in cluster.nodes[:2] if node is not source))
        names += fill(store, 80)[40:]
        assert read_all(store, names) == {at: value_of(key) for at, key in enumerate(names)}
        store.close()


def test_nodes_that_announce_names_are_reached_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint and the announced node are TLS proxies with two certificates. If only the
    endpoint's certificate is trusted, the error names the node. If both are, values are stored and
    read."""
    folders = [tmp_path / name for name in ("endpoint", "node")]
    for folder in folders:
        folder.mkdir()
    with ValkeyCluster(tmp_path, masters=1, node_timeout_s=CALM_S) as cluster:
        node = cluster.nodes[0]
        with (
            encrypted(node, folders[0]) as (endpoint, first),
            encrypted(node, folders[1]) as (announced, second),
        ):
            node.ask(b"CONFIG", b"SET", b"cluster-announce-port", b"%d" % announced)
            node.ask(b"CONFIG", b"SET", b"cluster-announce-hostname", b"localhost")
            node.ask(b"CONFIG", b"SET", b"cluster-preferred-endpoint-type", b"hostname")
            monkeypatch.setenv("SSL_CERT_FILE", str(first))
            store = ValkeyStore(parse_address(f"valkeys://localhost:{endpoint}"))
            with pytest.raises(ConnectionError, match=f"localhost:{announced}.*certificate"):
                store.check(soon())
            store.close()
            both = tmp_path / "both.pem"
            both.write_text(first.read_text() + second.read_text())
            monkeypatch.setenv("SSL_CERT_FILE", str(both))
            store = ValkeyStore(parse_address(f"valkeys://localhost:{endpoint}"))
            store.check(soon())
            names = fill(store, 8)
            assert read_all(store, names) == {at: value_of(key) for at, key in enumerate(names)}
            store.close()


def test_an_endpoint_that_moves_to_a_promoted_replica_is_written_again(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host name points to a primary, which becomes a replica and keeps its connections. Its
    values are still read, but writes are refused until the name points to the new primary."""
    primary, replica = make_server(), make_server()
    replica.ask(b"REPLICAOF", b"127.0.0.1", b"%d" % primary.port)
    named, real = [primary], socket.getaddrinfo

    def resolve(host: str, port: int, *more: Any, **options: Any) -> Any:
        if host != "store.example":
            return real(host, port, *more, **options)
        if options["flags"] & socket.AI_NUMERICHOST:
            raise socket.gaierror
        return real("127.0.0.1", named[0].port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    (a, b), until = keys("a", "b"), time.monotonic() + 60.0
    store = ValkeyStore(parse_address("valkey://store.example:6379"))
    put_all(store, [a], [b"old"])
    while replica.ask(b"EXISTS", b"a") != 1:
        assert time.monotonic() < until
        time.sleep(0.02)
    primary.ask(b"FAILOVER")
    while role(replica) != b"master":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert store.put([(b, [b"new"])], soon()) == [REFUSED]
    assert read_all(store, [a, b]) == {0: b"old", 1: MISS}, "the replica is read"
    named[0] = replica
    while store.put([(b, [b"new"])], soon()) != [STORED]:
        assert read_all(store, [a]) == {0: b"old"}
        assert time.monotonic() < until
        time.sleep(0.05)
    assert replica.ask(b"GET", b"b") == b"new"
    store.close()


def test_pages_for_other_masters_do_not_wait_for_one_that_fails(cluster: ValkeyCluster) -> None:
    tier = RemoteTier(load_config({"TIERED_KV_REMOTE": cluster.url(cluster.nodes[0])}))
    assert tier.spec.in_runs
    pages = tier.open(SITE)
    assert pages.retry_s is None
    key = page_key(1)
    assert not pages.put([(key, page_bytes(key))])
    pages.close()
