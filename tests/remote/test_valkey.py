"""Tests with a real Valkey server. Values are read back, and every call returns before its deadline
whatever happens to the server."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.conftest import MakeServer, keys
from tests.remote.hostile import NO_CLUSTER
from tiered_kv.remote.address import parse_address, server_of
from tiered_kv.remote.base import Outcome, RefusedError, RemoteKey, RemoteStore
from tiered_kv.remote.breaker import FIRST_PAUSE_S
from tiered_kv.remote.valkey.client import SILENCE_S
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.testing.conformance.remote import RemoteConformance, soon
from tiered_kv.testing.valkey import ValkeyServer

HIT, MISS, BAD, DOWN, LATE = Outcome.HIT, Outcome.MISS, Outcome.BAD, Outcome.DOWN, Outcome.LATE


def put(
    store: ValkeyStore, names: list[RemoteKey], value: bytes, deadline: float = 0
) -> set[Outcome]:
    parts: list[bytes | memoryview] = [value[:3], memoryview(value)[3:]]
    return set(store.put([(key, parts) for key in names], deadline or soon()))


def read(
    store: ValkeyStore, names: list[RemoteKey], most: int = 1 << 20, deadline: float = 0
) -> dict[int, Outcome | bytes]:
    buffer = memoryview(bytearray(most))
    found: dict[int, Outcome | bytes] = {}
    for at, outcome, nbytes in store.get(names, buffer, deadline or soon()):
        assert at not in found
        found[at] = bytes(buffer[:nbytes]) if outcome is HIT else outcome
    return found


class TestValkeyStore(RemoteConformance):
    """The conformance suite of remote stores, with one server."""

    @pytest.fixture(autouse=True)
    def serve(self, server: ValkeyServer) -> None:
        self.servers = [server]

    def make_store(self, root: Path) -> RemoteStore:
        return ValkeyStore(
            parse_address("valkey://" + ",".join(str(one.server) for one in self.servers))
        )


class TestSeveralServers(TestValkeyStore):
    """The conformance suite of remote stores, with three servers."""

    @pytest.fixture(autouse=True)
    def serve(self, make_server: MakeServer) -> None:
        self.servers = [make_server() for _ in range(3)]


def test_a_value_of_another_type_is_bad_and_the_others_are_good(
    store: ValkeyStore, server: ValkeyServer
) -> None:
    names = keys("a", "list", "b")
    put(store, [names[0], names[2]], b"value")
    server.talk(b"LPUSH", b"list", b"item")
    assert read(store, names) == {0: b"value", 1: BAD, 2: b"value"}


def test_a_full_server_refuses_writes(make_server: MakeServer) -> None:
    server = make_server(most="3mb", eviction="noeviction")
    store = ValkeyStore(server.address)
    names = keys(*(f"key {at}" for at in range(40)))
    assert Outcome.REFUSED in put(store, names, b"x" * 200_000)
    assert HIT in store.exists(names, soon()), "what was there before is there"
    store.close()


def test_a_killed_server_is_down_and_returns_empty(
    store: ValkeyStore, server: ValkeyServer
) -> None:
    put(store, keys("a"), b"value")
    server.kill()
    began = time.monotonic()
    assert read(store, keys("a", "b")) == {0: DOWN, 1: DOWN}
    assert put(store, keys("a"), b"value") == {DOWN}
    assert store.exists(keys("a"), soon()) == [DOWN]
    assert time.monotonic() - began < 5.0, "the call does not wait for the deadline"
    server.start()
    until = time.monotonic() + 20 * FIRST_PAUSE_S
    while (found := store.exists(keys("a"), soon())) == [DOWN]:
        assert time.monotonic() < until, "it is tried again"
        time.sleep(0.05)
    assert found == [MISS]
    assert put(store, keys("a"), b"value") == {Outcome.STORED}


def test_a_stopped_server_is_late_and_then_not_called(
    store: ValkeyStore, server: ValkeyServer
) -> None:
    put(store, keys("a"), b"value")
    server.pause()
    try:
        began = time.monotonic()
        assert store.exists(keys("a"), began + SILENCE_S + 0.05) == [LATE]
        assert SILENCE_S < time.monotonic() - began < SILENCE_S + 5.0
        began = time.monotonic()
        assert read(store, keys("a"), deadline=began + 10.0) == {0: DOWN}
        assert time.monotonic() - began < 5.0, "the breaker is open"
    finally:
        server.go_on()


def test_a_late_short_call_does_not_block_the_next_one(
    store: ValkeyStore, server: ValkeyServer
) -> None:
    put(store, keys("a"), b"value")
    server.pause()
    try:
        began = time.monotonic()
        assert store.exists(keys("a"), began + 0.05) == [LATE]
        assert 0.04 < time.monotonic() - began < 5.0
    finally:
        server.go_on()
    assert store.exists(keys("a"), soon()) == [HIT]


def test_a_server_that_sends_single_bytes_slowly_is_late() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 10)
                connection.sendall(b"+PONG\r\n")
                connection.recv(1 << 10)
                connection.sendall(NO_CLUSTER)
                connection.recv(1 << 10)
                connection.sendall(b"$100000\r\n")
                while not over.wait(0.005):
                    connection.sendall(b"x")

        server = threading.Thread(target=trickle)
        server.start()
        store = ValkeyStore(parse_address(f"valkey://127.0.0.1:{listener.getsockname()[1]}"))
        try:
            assert read(store, keys("a"), deadline=time.monotonic() + 0.3) == {0: LATE}
        finally:
            over.set()
            store.close()
            server.join()


def test_a_late_value_is_not_mistaken_for_another(store: ValkeyStore, server: ValkeyServer) -> None:
    """A read of one key is abandoned at its deadline. The next read of another key returns the
    value of that key, not the late answer."""
    put(store, keys("a"), b"old")
    put(store, keys("b"), b"new")
    server.pause()
    assert read(store, keys("a"), deadline=time.monotonic() + 0.05) == {0: LATE}
    server.go_on()
    until = time.monotonic() + 20 * FIRST_PAUSE_S
    while (found := read(store, keys("b"))) == {0: DOWN}:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert found == {0: b"new"}


def test_an_expired_deadline_is_not_a_failure(store: ValkeyStore) -> None:
    put(store, keys("a"), b"value")
    assert store.exists(keys("a"), time.monotonic() - 1) == [DOWN]
    assert store.exists(keys("a"), soon()) == [HIT]


def test_runs_are_spread_over_servers_and_one_may_be_down(make_server: MakeServer) -> None:
    servers = [make_server() for _ in range(3)]
    address = parse_address("valkey://" + ",".join(str(one.server) for one in servers))
    store = ValkeyStore(address)
    names = [RemoteKey(b"%d" % at, b"run %d" % (at // 4)) for at in range(60)]
    assert put(store, names, b"value") == {Outcome.STORED}
    assert store.exists(names, soon()) == [HIT] * 60
    servers[1].kill()
    labels = [str(one.server).encode() for one in servers]
    mine = {at for at, key in enumerate(names) if server_of(key.run, labels) == 1}
    assert 0 < len(mine) < 60
    found = read(store, names)
    assert {at for at, one in found.items() if one == DOWN} == mine
    assert all(found[at] == b"value" for at in found.keys() - mine)
    store.close()
    assert set(store.exists(names, soon())) == {DOWN}


def test_a_wrong_password_is_refused(make_server: MakeServer) -> None:
    server = make_server(password="hunter2")
    store = ValkeyStore(server.address)
    assert put(store, keys("a"), b"value") == {Outcome.STORED}
    store.close()
    for login in ("", ":wrong@", "nobody:hunter2@"):
        stranger = ValkeyStore(parse_address(f"valkey://{login}{server.server}"))
        with pytest.raises(RefusedError):
            stranger.check(soon())
        assert stranger.exists(keys("a"), soon()) == [DOWN]
        stranger.close()


def test_a_user_may_be_restricted_to_our_keys(server: ValkeyServer) -> None:
    server.talk(b"ACL", b"SETUSER", b"agent", b"on", b">pw", b"~tkv:*", b"+@all")
    store = ValkeyStore(parse_address(f"valkey://agent:pw@{server.server}"))
    assert put(store, keys("tkv:p:a"), b"value") == {Outcome.STORED}
    assert put(store, keys("others"), b"value") == {Outcome.REFUSED}
    store.close()


@contextlib.contextmanager
def encrypted(server: ValkeyServer, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield a port at which the server can be reached over TLS, and the certificate to trust."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    pipes: list[threading.Thread] = []

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                client = context.wrap_socket(plain, server_side=True)
            except (OSError, ssl.SSLError):
                plain.close()
                continue
            # One thread per connection, which answers a call before it reads the next.
            back = socket.create_connection(("127.0.0.1", server.port))
            pipes.append(threading.Thread(target=_relay, args=(client, back)))
            pipes[-1].start()

    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield listener.getsockname()[1], certificate
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for pipe in pipes:
            pipe.join()


def _relay(client: ssl.SSLSocket, back: socket.socket) -> None:
    """Copy bytes in both directions until one side closes the connection. One thread does both,
    because a TLS socket may be used by one thread only."""
    with client, back, contextlib.suppress(OSError, ssl.SSLError):
        while True:
            ready = [client] if client.pending() else select.select([client, back], [], [])[0]
            if client in ready:
                if not (data := client.recv(1 << 16)):
                    return
                back.sendall(data)
            elif not (data := back.recv(1 << 16)):
                return
            else:
                client.sendall(data)


def test_connections_are_encrypted_and_the_server_is_checked(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with encrypted(server, tmp_path) as (port, certificate):
        stranger = ValkeyStore(parse_address(f"valkeys://localhost:{port}"))
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger.check(soon())
        stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        store = ValkeyStore(parse_address(f"valkeys://localhost:{port}"))
        names = keys(*(f"key {at}" for at in range(20)))
        value = bytes(range(256)) * 300
        assert put(store, names, value) == {Outcome.STORED}
        assert set(read(store, names).values()) == {value}
        store.close()
        other = ValkeyStore(parse_address(f"valkeys://127.0.0.1:{port}"))
        with pytest.raises(ssl.SSLCertVerificationError):
            other.check(soon())
        other.close()
