"""The conformance suite of remote stores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tiered_kv.remote.base import Outcome, Parts, RemoteKey, RemoteStore

HIT, MISS = Outcome.HIT, Outcome.MISS
SOON_S = 20.0
LONGEST = 1 << 20


def soon() -> float:
    """Return a deadline that every call should meet."""
    return time.monotonic() + SOON_S


def some_keys(count: int, name: str = "key") -> list[RemoteKey]:
    """Return ``count`` keys, in runs of four."""
    return [
        RemoteKey(f"{name} {at}".encode(), f"{name} run {at // 4}".encode()) for at in range(count)
    ]


def put_all(store: RemoteStore, keys: Sequence[RemoteKey], values: Sequence[bytes]) -> None:
    """Store values, each in two parts. The store must accept all of them."""
    parts: list[tuple[RemoteKey, Parts]] = [
        (key, (value[:3], memoryview(value)[3:])) for key, value in zip(keys, values, strict=True)
    ]
    assert set(store.put(parts, soon())) <= {Outcome.STORED}


def read_all(
    store: RemoteStore, keys: Sequence[RemoteKey], most: int = LONGEST
) -> dict[int, Outcome | bytes]:
    """Read the values of keys. Returns values by the index of their key; a failed read is returned
    as its outcome.

    Args:
        most: maximum length of a value.
    """
    buffer = memoryview(bytearray(most))
    found: dict[int, Outcome | bytes] = {}
    for at, outcome, nbytes in store.get(keys, buffer, soon()):
        assert at not in found, "each key has a single outcome"
        found[at] = bytes(buffer[:nbytes]) if outcome is HIT else outcome
    return found


class RemoteConformance:
    """Conformance suite of remote stores. Create a subclass, name it ``Test…`` and define
    ``make_store``.
    """

    def make_store(self, root: Path) -> RemoteStore:
        """Return the store under test, empty."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[RemoteStore]:
        store = self.make_store(tmp_path / "root")
        yield store
        store.close()

    @pytest.mark.parametrize("nbytes", [0, 1, 100, 40_000, 700_000])
    def test_values_come_back(self, store: RemoteStore, nbytes: int) -> None:
        keys, values = some_keys(40), [bytes([at]) * nbytes for at in range(40)]
        put_all(store, keys, values)
        asked = [*keys, *some_keys(1, "missing")]
        assert store.exists(asked, soon()) == [HIT] * 40 + [MISS]
        assert read_all(store, asked) == {**dict(enumerate(values)), 40: MISS}

    def test_the_newer_value_wins(self, store: RemoteStore) -> None:
        keys = some_keys(1)
        for value in (b"older", b"new"):
            put_all(store, keys, [value])
        assert read_all(store, keys) == {0: b"new"}

    def test_a_value_that_is_too_long_is_bad_and_the_others_are_good(
        self, store: RemoteStore
    ) -> None:
        keys = some_keys(3)
        put_all(store, keys, [b"one", b"x" * 100_000, b"three"])
        assert read_all(store, keys, most=1_000) == {0: b"one", 1: Outcome.BAD, 2: b"three"}

    def test_many_keys_are_looked_up(self, store: RemoteStore) -> None:
        keys = some_keys(5000)
        put_all(store, [keys[7], keys[4999]], [b"a", b"b"])
        found = store.exists(keys, soon())
        assert [at for at, one in enumerate(found) if one is HIT] == [7, 4999]

    def test_a_reader_that_stops_early_spoils_nothing(self, store: RemoteStore) -> None:
        keys = some_keys(30)
        put_all(store, keys, [b"%d" % at for at in range(30)])
        buffer = memoryview(bytearray(100))
        for got in store.get(keys, buffer, soon()):
            if got.at == 3:
                break
        assert read_all(store, keys[10:12]) == {0: b"10", 1: b"11"}

    def test_a_deleted_value_is_gone(self, store: RemoteStore) -> None:
        keys = some_keys(10)
        put_all(store, keys, [b"value"] * 10)
        assert store.delete(keys[:5], soon())
        assert store.exists(keys, soon()) == [MISS] * 5 + [HIT] * 5
        assert store.delete(keys[:5], soon())

    def test_a_call_whose_deadline_is_over_ends_and_spoils_nothing(
        self, store: RemoteStore
    ) -> None:
        keys, over = some_keys(4), time.monotonic() - 1
        put_all(store, keys, [b"value"] * 4)
        nothing = {Outcome.LATE, Outcome.DOWN}
        assert set(store.exists(keys, over)) <= nothing
        assert set(store.put([(keys[0], [b"new"])], over)) <= nothing
        assert {one.outcome for one in store.get(keys, memoryview(bytearray(9)), over)} <= nothing
        assert not store.delete(keys, over)
        assert read_all(store, keys) == dict.fromkeys(range(4), b"value")

    def test_nothing_to_do_is_done(self, store: RemoteStore) -> None:
        assert store.exists([], soon()) == store.put([], soon()) == []
        assert not [*store.get([], memoryview(bytearray(1)), soon())]
        assert store.delete([], soon())

    def test_a_closed_store_is_down(self, store: RemoteStore) -> None:
        keys = some_keys(1)
        put_all(store, keys, [b"value"])
        store.close()
        store.close()
        assert (
            store.exists(keys, soon()) == store.put([(keys[0], [b"x"])], soon()) == [Outcome.DOWN]
        )
        assert read_all(store, keys) == {0: Outcome.DOWN}
        assert not store.delete(keys, soon())
