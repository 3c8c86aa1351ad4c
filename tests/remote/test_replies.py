"""Replies are parsed in chunks of any length, and invalid bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.remote.valkey.replies import (
    ABSENT,
    BUFFER_BYTES,
    MOST_DEPTH,
    MOST_ITEMS,
    MOST_LINE,
    MOST_TEXT,
    ProtocolError,
    Replies,
    Reply,
    ServerError,
)


class Pieces:
    """A connection that delivers its data in chunks of these lengths, and then ends."""

    def __init__(self, data: bytes, *lengths: int) -> None:
        self._data = data
        self._lengths = list(lengths)

    def __call__(self, into: memoryview, beyond: memoryview) -> int:
        if not self._data:
            raise ConnectionResetError("over")
        length = self._lengths.pop(0) if self._lengths else len(self._data)
        piece = self._data[: max(1, min(length, len(into) + len(beyond)))]
        first = piece[: len(into)]
        into[: len(first)] = first
        beyond[: len(piece) - len(first)] = piece[len(first) :]
        self._data = self._data[len(piece) :]
        return len(piece)


@given(
    st.lists(st.binary(max_size=3 * BUFFER_BYTES), max_size=5),
    st.lists(st.integers(1, BUFFER_BYTES), max_size=20),
)
def test_values_of_any_length_may_arrive_in_any_chunks(
    values: list[bytes], pieces: list[int]
) -> None:
    stream = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    replies = Replies(Pieces(stream + b"+OK\r\n", *pieces))
    for at, value in enumerate(values):
        length = replies.length()
        assert length == len(value)
        if at % 2:
            replies.skip(length)
            continue
        out = bytearray(length)
        replies.value(memoryview(out))
        assert out == value
    replies.status()


@given(st.integers(0, 2**63), st.lists(st.integers(1, 3), max_size=30))
def test_numbers_may_arrive_in_any_chunks(number: int, pieces: list[int]) -> None:
    replies = Replies(Pieces(b":%d\r\n:1\r\n" % number, *pieces))
    assert replies.number() == number
    assert replies.number() == 1


def test_a_missing_value_has_no_bytes() -> None:
    replies = Replies(Pieces(b"$-1\r\n:7\r\n"))
    assert replies.length() == ABSENT
    assert replies.number() == 7


def test_an_error_is_reported_in_the_servers_words() -> None:
    replies = Replies(Pieces(b"-OOM command not allowed\r\n+OK\r\n"))
    with pytest.raises(ServerError, match="OOM command not allowed"):
        replies.status()
    replies.status()


@pytest.mark.parametrize(
    "stream",
    [
        b"$5\r\nabcdefg\r\n",
        b"$-2\r\n",
        b"$\r\n",
        b"$1x\r\n",
        b"$--1\r\n",
        b":1\r\n",
        b"$" + b"9" * 30 + b"\r\n",
        b"x" * (MOST_LINE + BUFFER_BYTES),
    ],
)
def test_an_invalid_value_is_refused(stream: bytes) -> None:
    replies = Replies(Pieces(stream))
    with pytest.raises((ProtocolError, ConnectionResetError)):
        replies.value(memoryview(bytearray(replies.length())))


def encode(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


@given(
    st.recursive(
        st.none() | st.integers(-(10**18), 10**18) | st.binary(max_size=2 * BUFFER_BYTES),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=10,
    ),
    st.lists(st.integers(1, BUFFER_BYTES), max_size=20),
)
def test_nested_replies_may_arrive_in_any_chunks(reply: Reply, pieces: list[int]) -> None:
    replies = Replies(Pieces(encode(reply) + b"+OK\r\n", *pieces))
    assert replies.nested(depth=100) == reply
    replies.status()


@pytest.mark.parametrize(
    "stream",
    [
        b"*%d\r\n" % (MOST_ITEMS + 1),
        b"$%d\r\n" % (MOST_TEXT + 1),
        b"*1\r\n" * (MOST_DEPTH + 1) + b":1\r\n",
        b"*-2\r\n",
        b"%1\r\n+map\r\n:1\r\n",
        b"\r\n",
    ],
)
def test_a_reply_that_is_too_large_or_unknown_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        Replies(Pieces(stream)).nested()


@given(st.binary(max_size=200), st.sampled_from(["status", "number", "length", "nested"]))
def test_any_bytes_give_a_reply_or_an_error(stream: bytes, kind: str) -> None:
    replies = Replies(Pieces(stream))
    try:
        while True:
            found = getattr(replies, kind)()
            if kind == "length" and found != ABSENT:
                replies.skip(found)
    except (ProtocolError, ServerError, ConnectionResetError):
        pass
