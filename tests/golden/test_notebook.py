"""A notebook that a killed process of commit 913b4b9 left, with facts that are valid, replaced or
deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.golden.conftest import Copy
from tests.golden.written import changed
from tiered_kv.storage.notebook import Notebook, open_notebook

NAME = "jobs-2-0.jsonl"
NOTED: list[tuple[str, Any] | None] = [
    ("job 1", {"turns": 1, "blocks": 19, "started": 1000.0}),
    ("tail 1", {"parent": "ab", "extra": "", "tokens": [1, 2, 3]}),
    ("job 1", {"turns": 2, "blocks": 19, "started": 1000.0}),
    ("job 2", {"turns": 1, "name": "ü 🎉"}),
    ("tail 2", {"tokens": []}),
    None,  # deletes all tails
    ("tail 3", {"tokens": [4]}),
    None,  # deletes job 2
]
"""The fact on each line. None is a deletion."""
LATEST = (2, 6)
"""Numbers of the lines whose facts are still valid."""


def expected() -> list[tuple[str, Any]]:
    return [fact for line in LATEST if (fact := NOTED[line]) is not None]


def read(folder: Path) -> list[tuple[str, Any]]:
    """Return the facts that the next engine finds, oldest first."""
    book = open_notebook(folder, 2, keep=True)
    book.close()
    return list(book.facts("").items())


def test_the_next_engine_finds_every_fact(copy: Copy) -> None:
    folder = copy("notebook")
    lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    assert read(folder) == expected()
    assert (folder / NAME).read_bytes() == b"".join(lines[at] for at in LATEST)
    assert read(folder) == expected(), "and the one after it"


def test_lines_are_written_in_the_same_format(copy: Copy) -> None:
    folder = copy("notebook")
    there = (folder / NAME).read_bytes()
    (folder / NAME).unlink()
    book = Notebook(folder / NAME, keep=True)
    for at, fact in enumerate(NOTED):
        if fact is not None:
            book.note(*fact)
        elif at == 5:
            book.strike_all("tail ")
        else:
            book.strike("job 2")
    assert book.drain(60.0)
    now = (folder / NAME).read_bytes()
    book.close()
    assert now == there


def test_a_changed_byte_is_noticed(copy: Copy) -> None:
    """A line whose digest does not match is ignored, so an older fact may become valid again."""
    folder = copy("notebook")
    content = (folder / NAME).read_bytes()
    begins = [0, *(at + 1 for at, byte in enumerate(content) if byte == ord("\n"))]
    for line, begin in enumerate(begins[:-1]):
        decides = line in LATEST or NOTED[line] is None
        for at in range(begin, begins[line + 1] - 1):
            (folder / NAME).write_bytes(changed(content, at))
            found = read(folder)
            assert (found != expected()) is decides, f"changed at {at}"
            assert all(fact in NOTED for fact in found), f"the change at {at} gave a wrong fact"
