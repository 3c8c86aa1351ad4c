"""Answers are parsed on another thread, and no answer stops that thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.policies.tools.adversary import MARKERS, soups
from tests.policies.tools.test_calls import FORMATS
from tiered_kv.connectors.runtime import tool_reader
from tiered_kv.connectors.runtime.tool_reader import (
    MAX_TOKENS,
    MAX_TOKENS_AGAIN,
    THREAD_NAME,
    UNREAD,
    ToolReader,
)
from tiered_kv.policies.base import NO_TOOL, ToolUse

Result = tuple[str, ToolUse]
MakeReader = Callable[..., ToolReader]


class CharacterTokenizer:
    """A tokenizer with one token per character, which records its calls."""

    def __init__(self) -> None:
        self.decoded: list[int] = []
        self.threads: set[str] = set()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        self.decoded.append(len(token_ids))
        self.threads.add(threading.current_thread().name)
        return "".join(map(chr, token_ids))


def tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture
def make_reader(tokenizer: CharacterTokenizer) -> Iterator[MakeReader]:
    readers: list[ToolReader] = []

    def make(load: Callable[[], Any] = lambda: tokenizer) -> ToolReader:
        readers.append(ToolReader(load))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def take_all(reader: ToolReader, queued: int) -> list[Result]:
    """Wait until all ``queued`` answers have been read, and return the results."""
    taken: list[Result] = []
    waiting = threading.Event()
    for _ in range(30_000):
        taken += reader.take()
        if len(taken) == queued:
            return taken
        waiting.wait(0.01)
    raise AssertionError("the reader does not come to an end")


def read_one(reader: ToolReader, text: str) -> ToolUse:
    reader.read("a", tokens(text))
    ((ticket, use),) = take_all(reader, 1)
    assert ticket == "a"
    return use


def test_tools_are_returned_with_their_tickets_in_order(
    make_reader: MakeReader, tokenizer: CharacterTokenizer
) -> None:
    reader = make_reader()
    assert reader.take() == []
    reader.read("one", tokens(FORMATS["mini-swe-agent"]))
    reader.read("two", tokens("All done."))
    reader.read("three", tokens(FORMATS["Hermes"]))

    taken = take_all(reader, 3)

    assert [ticket for ticket, _ in taken] == ["one", "two", "three"]
    assert [use.path for _, use in taken] == [
        ("bash", "ls", "ls -l"),
        NO_TOOL.path,
        ("bash", "ls", "ls -l"),
    ]
    assert reader.take() == []
    assert (reader.dropped, reader.errors) == (0, 0)
    assert tokenizer.threads == {THREAD_NAME}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS.keys())
def test_every_format_is_read(make_reader: MakeReader, text: str) -> None:
    assert read_one(make_reader(), text).command == "ls -l"


def test_the_token_that_ends_the_turn_is_no_part_of_a_call(make_reader: MakeReader) -> None:
    text = f"<think>Well.</think>{FORMATS['Hermes']}<|im_end|>"
    assert read_one(make_reader(), text).command == "ls -l"


def test_a_broken_call_is_read(make_reader: MakeReader) -> None:
    assert read_one(make_reader(), FORMATS["Hermes"].replace("}", "")).command == "ls -l"


def test_only_the_end_of_an_answer_is_decoded(
    make_reader: MakeReader, tokenizer: CharacterTokenizer
) -> None:
    reader = make_reader()
    assert read_one(reader, "x" * 5000 + FORMATS["Hermes"]).command == "ls -l"
    assert tokenizer.decoded == [MAX_TOKENS]


def test_a_call_that_started_before_the_decoded_end_is_found(
    make_reader: MakeReader, tokenizer: CharacterTokenizer
) -> None:
    reader = make_reader()
    text = FORMATS["Hermes"].replace("ls -l", "cat <<EOF" + "x" * 3000)
    assert read_one(reader, "y" * 50_000 + text).path[:2] == ("bash", "cat")
    assert tokenizer.decoded == [MAX_TOKENS, MAX_TOKENS_AGAIN]
    assert read_one(reader, "z" * 50_000) == NO_TOOL


def test_without_a_tokenizer_no_tool_is_read(
    make_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        raise OSError("no such model")

    reader = make_reader(load)
    assert read_one(reader, "hello") == UNREAD
    assert read_one(reader, "hello") == UNREAD
    assert reader.errors == 1
    assert caplog.text.count("no such model") == 1


def test_an_answer_that_breaks_the_tokenizer_is_counted(make_reader: MakeReader) -> None:
    class Broken(CharacterTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if token_ids == [1]:
                raise OverflowError("no such token")
            return super().decode(token_ids, skip_special_tokens)

    reader = make_reader(Broken)
    reader.read("bad", [1])
    reader.read("good", tokens(FORMATS["Hermes"]))
    reader.read("empty", [])
    uses = dict(take_all(reader, 3))
    assert uses["bad"] == UNREAD
    assert uses["good"].command == "ls -l"
    assert uses["empty"] == NO_TOOL
    assert reader.errors == 1


def test_answers_are_dropped_and_counted_when_there_are_too_many(
    make_reader: MakeReader, tokenizer: CharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_reader, "MAX_QUEUED", 5)
    loading = threading.Event()

    def load() -> Any:
        loading.wait(300)
        return tokenizer

    reader = make_reader(load)
    for n in range(20):
        reader.read(str(n), tokens(FORMATS["Hermes"]))
    assert reader.dropped == 15
    assert reader.take() == []
    loading.set()
    assert [ticket for ticket, _ in take_all(reader, 5)] == ["0", "1", "2", "3", "4"]


def test_closing_stops_the_thread_whatever_is_queued(
    tokenizer: CharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_reader, "MAX_QUEUED", 3)
    loading = threading.Event()

    def load() -> Any:
        loading.wait(300)
        return tokenizer

    reader = ToolReader(load)
    for n in range(9):
        reader.read(str(n), [65])
    threading.Timer(0.05, loading.set).start()
    reader.close()
    reader.close()
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def test_importing_the_reader_imports_no_engine() -> None:
    code = (
        "import sys, tiered_kv.connectors.runtime.tool_reader\n"
        "assert not any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules)"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=soups(MARKERS))
def test_no_answer_stops_the_reader(text: str, tokenizer: CharacterTokenizer) -> None:
    reader = ToolReader(lambda: tokenizer)
    try:
        assert read_one(reader, text).path
    finally:
        reader.close()
