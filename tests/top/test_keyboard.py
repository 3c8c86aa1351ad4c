"""The keyboard reads the key sequences that terminals send, in any chunks and with garbage between
them."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from tiered_kv.top.keyboard import Keyboard, cbreak_keyboard
from tiered_kv.top.view import Action, JobOrder


@pytest.fixture
def pipe() -> Iterator[tuple[Keyboard, int]]:
    """A keyboard, and the file descriptor to which a test writes its keys."""
    reading, writing = os.pipe()
    yield Keyboard(reading), writing
    os.close(reading)
    os.close(writing)


def typed(pipe: tuple[Keyboard, int], *pieces: bytes) -> list[Action | JobOrder]:
    found = list[Action | JobOrder]()
    for piece in pieces:
        os.write(pipe[1], piece)
        found += pipe[0].read()
    return found


def test_keys_are_read_singly_and_in_one_chunk(pipe: tuple[Keyboard, int]) -> None:
    wanted = [
        Action.NEXT_PAGE,
        JobOrder.CONTEXT,
        Action.PREVIOUS_ROW,
        Action.PREVIOUS_PAGE,
        Action.LAST,
        Action.QUIT,
    ]
    keys = [b" ", b"c", b"\x1b[A", b"\x1b[5~", b"\x1bOF", b"q"]
    assert typed(pipe, *keys) == wanted
    assert typed(pipe, b"".join(keys)) == wanted


def test_a_key_sequence_that_arrives_in_pieces_is_one_key(pipe: tuple[Keyboard, int]) -> None:
    assert typed(pipe, b"\x1b", b"[", b"6", b"~") == [Action.NEXT_PAGE]
    assert typed(pipe, b"s\x1b[", b"Bq") == [JobOrder.STATE, Action.NEXT_ROW, Action.QUIT]


def test_other_keys_do_nothing(pipe: tuple[Keyboard, int]) -> None:
    odd = b"\x1b[200~\x1b[15;2~\x1b[<0;1;1M\x1bOP" + "ü€".encode() + b"\x00\xff\x1bx\x1b\x1b[B"
    assert typed(pipe, odd) == [Action.NEXT_ROW]
    assert typed(pipe, b"\x1b[" + b"1" * 4000, b"q") == []
    assert typed(pipe, b"q") == [Action.QUIT]


def test_a_closed_terminal_quits() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert list(Keyboard(reading).read()) == [Action.QUIT]
    os.close(reading)
    assert list(Keyboard(reading).read()) == [Action.QUIT]


def test_the_terminal_settings_are_restored_after_an_exception() -> None:
    def fail() -> None:
        with cbreak_keyboard(theirs):
            assert termios.tcgetattr(theirs) != before
            raise RuntimeError

    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with pytest.raises(RuntimeError):
            fail()
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
