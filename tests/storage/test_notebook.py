"""Notebooks as read by the next process: it finds the newest facts, and no incomplete ones."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.hugetlbfs import huge_folder
from tiered_kv.storage import notebook
from tiered_kv.storage.notebook import NoNotebook, Notebook, folder_for_notes, open_notebook


def book(path: Path, *, keep: bool = True) -> Notebook:
    return Notebook(path / "jobs.jsonl", keep=keep)


def test_the_next_process_finds_the_newest_facts_in_the_order_they_were_noted(
    tmp_path: Path,
) -> None:
    first = book(tmp_path)
    for name, number in (("a", 1), ("b", 2), ("a", 3), ("tail 1", 4)):
        first.note(name, {"n": number})
    first.close()
    second = book(tmp_path)
    assert list(second.facts("").items()) == [
        ("b", {"n": 2}),
        ("a", {"n": 3}),
        ("tail 1", {"n": 4}),
    ]
    assert second.facts("tail ") == {"tail 1": {"n": 4}}
    second.strike_all("tail ")
    second.close()
    third = book(tmp_path)
    assert set(third.facts("")) == {"a", "b"}
    third.close()


def test_a_notebook_is_deleted_at_the_end_unless_it_is_kept(tmp_path: Path) -> None:
    one = book(tmp_path, keep=False)
    one.note("a", {})
    one.close()
    one.close()
    assert not (tmp_path / "jobs.jsonl").exists()
    again = book(tmp_path)
    assert again.facts("") == {}
    again.close()


def test_a_full_disk_loses_new_facts_and_restores_no_deleted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, room, real = book(tmp_path), [10_000], os.write

    def write(fd: int, data: memoryview) -> int:
        free = room[0] - (tmp_path / "jobs.jsonl").stat().st_size
        if free <= 0:
            raise OSError(errno.ENOSPC, "no space")
        return real(fd, data[:free])

    monkeypatch.setattr(os, "write", write)
    one.note("kept", {"n": 1})
    one.note("tail 1", {"n": 1})
    assert one.drain(60.0)
    room[0] = (tmp_path / "jobs.jsonl").stat().st_size + 10
    one.note("too long", {"n": 2})
    assert one.drain(60.0)
    assert one.lost == 1
    one.strike_all("tail ")
    one.strike("too long")
    assert one.drain(60.0)
    room[0] = 10_000
    one.note("later", {"n": 3})
    one.close()
    again = book(tmp_path)
    assert again.facts("") == {"kept": {"n": 1}, "later": {"n": 3}}
    again.close()


def test_a_notebook_is_used_by_one_process(tmp_path: Path) -> None:
    first = open_notebook(tmp_path, 3, keep=True)
    second = open_notebook(tmp_path, 3, keep=True)
    first.note("a", {"of": 1})
    second.note("a", {"of": 2})
    first.close()
    second.close()
    again = open_notebook(tmp_path, 3, keep=True)
    assert again.facts("") == {"a": {"of": 1}}
    again.close()
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert names == ["jobs-3-0.jsonl", "jobs-3-1.jsonl"]


@given(st.integers(0, 200), st.binary(max_size=8))
def test_a_torn_file_is_read_up_to_the_damage(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    one = book(folder)
    for number in range(6):
        one.note(f"job {number}", {"n": number})
    one.close()
    path = folder / "jobs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + junk)
    found = book(folder)
    for name, fact in found.facts("job ").items():
        assert fact == {"n": int(name.removeprefix("job "))}
    assert len(found.facts("")) >= whole[:cut].count(b"\n")
    found.note("job 7", {"n": 7})
    found.close()
    again = book(folder)
    assert again.facts("job 7") == {"job 7": {"n": 7}}, "a torn line spoils no later one"
    again.close()


def test_replaced_lines_do_not_let_the_file_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "SPARE_BYTES", 1_000)
    one = book(tmp_path)
    for number in range(5_000):
        one.note(f"job {number % 10}", {"n": number})
    one.close()
    assert (tmp_path / "jobs.jsonl").stat().st_size < 20_000
    again = book(tmp_path)
    assert {fact["n"] for fact in again.facts("").values()} == set(range(4_990, 5_000))
    again.close()


def test_the_oldest_facts_are_forgotten_if_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "MOST_FACTS", 3)
    one = book(tmp_path)
    for number in range(9):
        one.note(f"job {number}", {})
    one.close()
    again = book(tmp_path)
    assert list(again.facts("")) == ["job 6", "job 7", "job 8"]
    again.close()


def digested(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


FOREIGN = [b"[]", b'{"name": 1, "fact": {}}', b'{"name": "a"}', b"{", b"[" * 100_000]


@pytest.mark.parametrize("body", FOREIGN)
def test_foreign_lines_are_left_out(tmp_path: Path, body: bytes) -> None:
    good = digested(b'{"name":"a","fact":{}}')
    bare = b'{"name":"b","fact":{}}\n'
    (tmp_path / "jobs.jsonl").write_bytes(digested(body) + bare + good)
    one = book(tmp_path)
    assert one.facts("") == {"a": {}}
    one.close()


def test_a_line_that_was_changed_is_not_used(tmp_path: Path) -> None:
    """A note whose line was changed is ignored, and other notes are read. A changed note could
    restore a page for the wrong text."""
    one = book(tmp_path)
    one.note("tail 1", {"tokens": [17, 18]})
    one.note("tail 2", {"tokens": [19, 20]})
    one.close()
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(path.read_bytes().replace(b"18", b"28"))
    again = book(tmp_path)
    assert again.facts("") == {"tail 2": {"tokens": [19, 20]}}
    again.close()


def test_deleting_a_name_does_not_delete_longer_ones(tmp_path: Path) -> None:
    one = book(tmp_path)
    for name in ("job 1", "job 12"):
        one.note(name, {})
    one.strike("job 1")
    one.strike("never noted")
    one.close()
    again = book(tmp_path)
    assert again.facts("") == {"job 12": {}}
    again.close()


def test_that_all_notebooks_are_in_use_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notebook, "MOST_BOOKS", 1)
    first = open_notebook(tmp_path, 0, keep=True)
    assert type(open_notebook(tmp_path, 0, keep=True)) is NoNotebook
    assert f"all 1 notebook files in {tmp_path} are in use" in caplog.text
    first.close()


def test_without_a_usable_folder_there_is_no_notebook(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = open_notebook(tmp_path / "file" / "folder", 0, keep=True)
    assert type(made) is NoNotebook
    assert type(open_notebook(None, 0, keep=True)) is NoNotebook
    made.note("a", {})
    made.close()


def test_hugetlbfs_cannot_hold_jobs_which_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert folder_for_notes(tmp_path / "disk") == tmp_path / "disk"
    assert folder_for_notes(None) is None
    (tmp_path / "file").touch()
    elsewhere = tmp_path / "file" / "folder"
    assert folder_for_notes(elsewhere) == elsewhere, "whoever opens it says what is wrong"
    assert not caplog.messages
    with huge_folder() as huge:
        assert folder_for_notes(huge / "memory") is None
        assert not any((huge / "memory").iterdir())
    (said,) = caplog.messages
    assert "TIERED_KV_SSD_PATH" in said


def test_a_folder_without_writes_is_reported_even_without_hugetlbfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EINVAL, "as hugetlbfs says")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert folder_for_notes(tmp_path) is None
    (said,) = caplog.messages
    assert str(tmp_path) in said
    assert "TIERED_KV_SSD_PATH" in said


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "jobs-0-0.jsonl").symlink_to(tmp_path / "elsewhere")
    made = open_notebook(tmp_path, 0, keep=True)
    made.note("a", {})
    made.close()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"
