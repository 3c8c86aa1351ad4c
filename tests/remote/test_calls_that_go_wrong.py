"""Failed calls of a remote store. Their leftover bytes are not taken for the next call's answer,
and an error that concerns one call does not count for every call."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from tests.remote.conftest import MakeServer, keys
from tests.remote.hostile import NO_CLUSTER, hostile_server, value
from tiered_kv.remote.address import parse_address, server_of
from tiered_kv.remote.base import Outcome, RefusedError, RemoteKey
from tiered_kv.remote.breaker import Breaker
from tiered_kv.remote.valkey.connection import THREAD_NAME
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.testing.conformance.remote import read_all, soon
from tiered_kv.testing.valkey import ValkeyServer

HIT, DOWN, LATE, STORED = Outcome.HIT, Outcome.DOWN, Outcome.LATE, Outcome.STORED
MISS, BAD, REFUSED = Outcome.MISS, Outcome.BAD, Outcome.REFUSED
PASSWORD = "hunter2"


def read(store: ValkeyStore, *names: RemoteKey) -> list[bytes | Outcome]:
    buffer = memoryview(bytearray(1 << 10))
    found = list[bytes | Outcome]()
    for _, outcome, nbytes in store.get(names, buffer, soon()):
        found.append(bytes(buffer[:nbytes]) if outcome is HIT else outcome)
    return found


def filled(server: ValkeyServer, *names: str) -> tuple[ValkeyStore, list[RemoteKey]]:
    """Return a store whose values equal their keys' names, and the keys."""
    store, found = ValkeyStore(server.address), keys(*names)
    assert set(store.put([(key, [key.name]) for key in found], soon())) == {STORED}
    return store, found


def test_excess_bytes_are_not_the_next_answer() -> None:
    extra = [value(b"nobody asked for this")]

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"PING":
            return b"+PONG\r\n"
        return value(words[1]) + (extra.pop() if extra else b"")

    a, b = keys("a", "b")
    with hostile_server(answer) as url:
        store = ValkeyStore(parse_address(url))
        assert read(store, a) == [b"a"]
        for key in (b, a, b):
            assert read(store, key) == [key.name]
        store.close()


def test_an_interrupted_read_leaves_nothing_for_the_next_one(server: ValkeyServer) -> None:
    store, (a, b) = filled(server, "a", "b")
    server.pause()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            read(store, a)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        server.go_on()
    assert read(store, b) == [b"b"]
    store.close()


def test_an_abandoned_read_leaves_nothing_for_the_next_one(
    server: ValkeyServer,
) -> None:
    store, (a, b, c) = filled(server, "a", "b", "c")
    left = store.get([a, b], memoryview(bytearray(10)), soon())
    assert next(left).outcome is HIT
    assert read(store, c) == [b"c"]
    store.close()


def test_a_connection_closed_by_the_server_is_reopened(server: ValkeyServer) -> None:
    store, (a,) = filled(server, "a")
    server.talk(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")
    assert store.exists([a], soon()) == [HIT]
    store.close()


def test_a_server_that_repeats_the_password_does_not_put_it_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server's error repeats the password, as Valkey does if it does not know a command.
    Neither the exception nor the log contains the password."""

    def answer(words: list[bytes]) -> bytes:
        said = b" ".join(b"'%b'" % word for word in words[1:])
        return b"-ERR unknown command '%b', with args beginning with: %b\r\n" % (words[0], said)

    with hostile_server(answer) as url:
        store = ValkeyStore(parse_address(url.replace("://", f"://:{PASSWORD}@")))
        with pytest.raises(Exception, match="has no password set") as raised:
            store.check(soon())
        assert store.exists(keys("a"), soon()) == [DOWN]
        store.close()
    assert PASSWORD not in str(raised.value)
    assert "has no password set" in caplog.text
    assert PASSWORD not in caplog.text


def test_values_may_be_in_parts_of_any_items(server: ValkeyServer) -> None:
    store, (a,) = filled(server, "a")
    wide = array("H", range(100))
    assert store.put([(a, [b"head", memoryview(wide)])], soon()) == [STORED]
    assert read(store, a) == [b"head" + wide.tobytes()]
    store.close()


def test_a_deletion_must_be_repeated_if_values_may_still_arrive(server: ValkeyServer) -> None:
    store, (a,) = filled(server, "a")
    server.pause()
    assert store.put([(a, [b"new"])], time.monotonic() + 0.2) == [LATE]
    server.go_on()
    assert not store.delete([a], soon()), "the server may read it after this"
    assert store.delete([a], soon())
    assert store.exists([a], soon()) == [Outcome.MISS]
    store.close()


def test_a_silent_server_does_not_hide_values_on_the_others(make_server: MakeServer) -> None:
    servers = [make_server() for _ in range(2)]
    store = ValkeyStore(parse_address("valkey://" + ",".join(str(one.server) for one in servers)))
    labels = [str(one.server).encode() for one in servers]
    names = [RemoteKey(b"%d" % at, b"run %d" % at) for at in range(16)]
    good = [at for at, key in enumerate(names) if server_of(key.run, labels) == 1]
    assert 0 < len(good) < len(names)
    assert set(store.put([(key, [b"value"]) for key in names], soon())) == {STORED}
    servers[0].pause()
    first = store.exists(names, time.monotonic() + 0.5)
    assert {first[at] for at in good} == {HIT}
    until = time.monotonic() + 30.0
    while store.exists(names, time.monotonic() + 0.5).count(LATE):
        assert time.monotonic() < until, "the silent one is asked for ever"
    assert store.exists(names, soon()).count(HIT) == len(good)
    servers[0].go_on()
    store.close()


# -- connecting ---------------------------------------------------------------------------


def test_all_addresses_of_a_name_share_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = listener.getsockname()
        waiting = [socket.socket() for _ in range(8)]  # these connections fill the listener's queue
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(place)
        found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", place)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found] * 4)
        store, began = ValkeyStore(parse_address("valkey://several.example:6379")), time.monotonic()
        assert store.exists(keys("a"), began + 1.0) == [LATE]
        assert time.monotonic() - began < 2.5, "each had all of it"
        store.close()
        for one in waiting:
            one.close()


def test_a_silent_name_server_does_not_exceed_the_deadline(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real = threading.Event(), socket.getaddrinfo

    def slow(host: str, port: int, *more: Any, **named: Any) -> Any:
        if host != "name.example" or named["flags"] & socket.AI_NUMERICHOST:
            return real(host, port, *more, **named)
        answers.wait()
        return real("127.0.0.1", port, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    store = ValkeyStore(parse_address(f"valkey://name.example:{server.port}"))
    assert store.exists(keys("a"), time.monotonic() + 0.1) == [LATE]
    answers.set()
    until = time.monotonic() + 30.0
    while store.exists(keys("a"), soon()) != [Outcome.MISS]:
        assert time.monotonic() < until
    answers.clear()  # the known addresses are used meanwhile
    server.talk(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")
    assert store.exists(keys("a"), soon()) == [Outcome.MISS]
    answers.set()
    store.close()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


# -- refusals -----------------------------------------------------------------------------

Answer = Callable[[list[bytes]], bytes]

OF_WRITES = ["READONLY", "MISCONF", "OOM", "NOREPLICAS"]
OF_COMMAND = ["NOPERM", "DENIED", "CLUSTERDOWN", "TRYAGAIN", "ERR", "SOMETHINGNEW"]
OF_KEY = {"WRONGTYPE": BAD, "MOVED": MISS, "ASK": MISS}
OF_SERVER = ["LOADING", "MASTERDOWN", "BUSY", "NOAUTH", "WRONGPASS"]


def answering(errors: dict[bytes, str], bad_key: bytes = b"") -> Answer:
    """Return the answer function of a server that has a value under every key, and returns errors
    for some commands or for one key."""

    def answer(words: list[bytes]) -> bytes:
        command = words[0]
        if command in errors and (not bad_key or words[1] == bad_key):
            return f"-{errors[command]} and why\r\n".encode()
        match command:
            case b"PING":
                return b"+PONG\r\n"
            case b"EXISTS" | b"UNLINK":
                return b":1\r\n"
            case b"GET":
                return value(words[1])
        return b"+OK\r\n"

    return answer


@pytest.fixture
def _not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)


@pytest.mark.parametrize("code", [*OF_WRITES, *OF_COMMAND, *OF_KEY])
def test_a_server_that_refuses_writes_is_read(code: str) -> None:
    a, b = keys("a", "b")
    with hostile_server(answering({b"SET": code})) as url:
        store = ValkeyStore(parse_address(url))
        assert store.put([(a, [b"x"]), (b, [b"y"])], soon()) == [REFUSED] * 2
        assert store.exists([a, b], soon()) == [HIT] * 2
        assert read_all(store, [a, b]) == {0: b"a", 1: b"b"}
        assert store.delete([a], soon())
        store.close()


@pytest.mark.parametrize("code", [*OF_WRITES, *OF_COMMAND])
def test_a_server_that_refuses_reads_takes_writes(code: str) -> None:
    (a,) = keys("a")
    with hostile_server(answering({b"GET": code, b"EXISTS": code})) as url:
        store = ValkeyStore(parse_address(url))
        assert store.exists([a], soon()) == [DOWN]
        assert read_all(store, [a]) == {0: DOWN}
        assert store.put([(a, [b"x"])], soon()) == [STORED]
        store.close()


@pytest.mark.parametrize(
    ("code", "outcome"), [*OF_KEY.items(), *((code, DOWN) for code in OF_COMMAND)]
)
def test_an_error_for_one_key_does_not_count_for_the_others(code: str, outcome: Outcome) -> None:
    names = keys(*"abcdefghijklmno")
    errors = dict.fromkeys((b"GET", b"EXISTS", b"SET", b"UNLINK"), code)
    with hostile_server(answering(errors, bad_key=b"c")) as url:
        store = ValkeyStore(parse_address(url))
        for _ in range(2):
            found = store.put([(key, [b"x"]) for key in names], soon())
            assert found == [STORED] * 2 + [REFUSED] + [STORED] * 12
            assert read_all(store, names) == {
                at: outcome if at == 2 else key.name for at, key in enumerate(names)
            }
            assert store.exists(names, soon()) == [HIT] * 2 + [outcome] + [HIT] * 12
            assert not store.delete(names, soon()), "one may still be there"
        assert store.delete(names[3:], soon())
        store.close()


@pytest.mark.parametrize("code", OF_SERVER)
@pytest.mark.parametrize("command", [b"GET", b"EXISTS"])
def test_a_server_that_refuses_everything_is_not_called(code: str, command: bytes) -> None:
    asked: list[bytes] = []
    answer, (a,) = answering({command: code}), keys("a")

    def counting(words: list[bytes]) -> bytes:
        asked.append(words[0])
        return answer(words)

    with hostile_server(counting) as url:
        store = ValkeyStore(parse_address(url))
        if command == b"GET":
            assert read_all(store, [a]) == {0: DOWN}
        else:
            assert store.exists([a], soon()) == [DOWN]
        asked.clear()
        assert store.put([(a, [b"x"])], soon()) == [DOWN]
        assert store.exists([a], soon()) == [DOWN]
        assert not store.delete([a], soon())
        assert not asked
        store.close()


def test_a_connection_on_which_a_call_failed_is_closed_without_a_further_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = [b"+PONG\r\n", NO_CLUSTER, b"!no reply\r\n"]
        ended = list[bytes]()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60.0)
                for answer in answers:
                    connection.recv(4096)
                    connection.sendall(answer)
                ended.append(connection.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        store = ValkeyStore(parse_address(f"valkey://127.0.0.1:{listener.getsockname()[1]}"))
        assert store.exists(keys("a"), soon()) == [DOWN]
        thread.join()
        assert ended == [b""]
        store.close()


def test_a_server_that_refuses_writes_is_retried_occasionally(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered, now = list[float](), [1000.0]
    answer, (a,) = answering({b"SET": "READONLY", b"UNLINK": "READONLY"}), keys("a")

    def counting(words: list[bytes]) -> bytes:
        if words[0] == b"SET":
            offered.append(now[0])
        return answer(words)

    with hostile_server(counting) as url:
        store = ValkeyStore(parse_address(url))
        real, began = time.monotonic, time.monotonic()
        monkeypatch.setattr(
            "tiered_kv.remote.valkey.client.time.monotonic", lambda: now[0] + real() - began
        )
        for _ in range(200):
            assert store.put([(a, [b"x"])], now[0] + 30.0) == [REFUSED]
            assert not store.delete([a], now[0] + 30.0)
            now[0] += 0.5
        assert 5 <= len(offered) <= 12, "a hundred seconds"
        store.close()


@pytest.mark.usefixtures("_not_paused")
@pytest.mark.parametrize("code", [*OF_WRITES, *OF_COMMAND, *OF_SERVER])
def test_the_same_error_is_logged_once(code: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_kv")
    errors, (a,) = {b"SET": code}, keys("a")
    with hostile_server(answering(errors)) as url:
        store = ValkeyStore(parse_address(url))
        for _ in range(20):
            store.exists([a], soon())
            store.put([(a, [b"x"])], soon())
        assert 1 <= len([said for said in caplog.records if said.levelname == "WARNING"]) <= 1
        assert f"{code} and why" in caplog.text
        errors.clear()
        for _ in range(3):
            assert store.put([(a, [b"x"])], soon()) == [STORED]
        assert len(caplog.records) <= 3
        assert "again" in caplog.messages[-1]
        store.close()


def test_a_replica_is_read_and_takes_writes_once_it_is_promoted(make_server: MakeServer) -> None:
    primary, replica = make_server(), make_server()
    (a, b), ours = keys("a", "b"), ValkeyStore(primary.address)
    assert ours.put([(a, [b"of the primary"])], soon()) == [STORED]
    replica.talk(b"REPLICAOF", b"127.0.0.1", b"%d" % primary.port)
    theirs, until = ValkeyStore(replica.address), time.monotonic() + 60.0
    while theirs.exists([a], soon()) != [HIT]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert theirs.put([(b, [b"new"])], soon()) == [REFUSED]
    assert read_all(theirs, [a, b]) == {0: b"of the primary", 1: MISS}
    replica.talk(b"REPLICAOF", b"NO", b"ONE")
    while theirs.put([(b, [b"new"])], soon()) != [STORED]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert read_all(theirs, [a, b]) == {0: b"of the primary", 1: b"new"}
    ours.close()
    theirs.close()


def test_a_user_without_ping_permission_is_accepted(server: ValkeyServer) -> None:
    server.talk(b"ACL", b"SETUSER", b"agent", b"on", b">pw", b"~*", b"-@all", b"+get", b"+set")
    (a,), store = keys("a"), ValkeyStore(parse_address(f"valkey://agent:pw@{server.server}"))
    store.check(soon())
    assert store.put([(a, [b"x"])], soon()) == [STORED]
    assert read_all(store, [a]) == {0: b"x"}
    assert not store.delete([a], soon()), "which he may not"
    assert read_all(store, [a]) == {0: b"x"}
    store.close()


def test_a_server_in_protected_mode_is_reported() -> None:
    with hostile_server(lambda _: b"-DENIED it runs in protected mode\r\n") as url:
        store = ValkeyStore(parse_address(url))
        with pytest.raises(RefusedError, match="protected"):
            store.check(soon())
        store.close()
