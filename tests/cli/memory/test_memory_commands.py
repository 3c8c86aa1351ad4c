"""``tiered-kv memory`` lists memory files, and deletes those that no process has open."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.transfer.memory_file.made_memory import GEOMETRY, open_in, save
from tiered_kv.cli.app import app


def run(*arguments: object, code: int = 0) -> str:
    """Run a command, and return its standard output. For exit code 2, returns its one-line
    error."""
    result = CliRunner().invoke(app, ["memory", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code != 2:
        return result.stdout
    assert result.stderr.count("\n") == 1
    return result.stderr


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json", code=code))
    assert isinstance(found, dict)
    return found


def test_ls_shows_the_contents_and_the_owner_of_a_file(tmp_path: Path) -> None:
    memory = open_in(tmp_path, rank=1, ranks=2)
    for slot in range(3):
        save(memory, slot, time.time_ns() - 5 * 10**9)
    save(memory, 0, time.time_ns() - 90 * 10**9)

    (file,) = run_json("ls", tmp_path)["files"]
    assert (file["path"], file["rank"], file["ranks"]) == (str(tmp_path / "0-1.slots"), 1, 2)
    assert (file["pages"], file["slots"]) == (3, GEOMETRY.slots)
    assert file["bytes"] == (tmp_path / "0-1.slots").stat().st_size
    assert 5 <= file["newest_page_s"] < 60
    assert (file["locked"], file["owner"]["pid"], file["unusable"]) == (True, os.getpid(), None)
    with (tmp_path / "0-1.slots").open("r+b") as torn:
        torn.seek(4096 + 127)
        torn.write(b"\x5a\xa5")  # the end of one header and the state of the next
    (file,) = run_json("ls", tmp_path)["files"]
    assert (file["pages"], file["torn"]) == (1, 0), "it may be written to just now"
    table = run("ls", tmp_path)
    assert "0-1.slots" in table
    assert f"process {os.getpid()}" in table
    assert "1 of 2" in table
    memory.close()
    (file,) = run_json("ls", tmp_path)["files"]
    assert (file["locked"], file["owner"], file["torn"]) == (False, None, 2)


def test_gc_deletes_files_of_dead_owners_alone(tmp_path: Path) -> None:
    alive = open_in(tmp_path)
    open_in(tmp_path, replica=1).close()
    (tmp_path / "2-0.slots").write_bytes(b"TKVMEM\0\0 and then something torn")
    (tmp_path / "3-0.slots").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")

    dry = run_json("gc", tmp_path, "--dry-run")
    names = [str(tmp_path / name) for name in ("1-0.slots", "2-0.slots", "3-0.slots")]
    assert dry["removed"] == names
    assert all(Path(name).exists() for name in names)
    done = run_json("gc", tmp_path)
    assert (done["removed"], done["bytes_freed"]) == (names, dry["bytes_freed"])
    assert done["kept"] == [str(tmp_path / "0-0.slots")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0.slots", "notes.txt"]
    assert "in use" in run("gc", tmp_path)
    alive.close()
    assert "deleted" in run("gc", tmp_path)


def test_foreign_files_are_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "0-0.slots").write_bytes(b"a diary")
    (tmp_path / "1-0.slots").symlink_to(tmp_path / "0-0.slots")
    (tmp_path / "2-0.slots").mkdir()
    for command in ("ls", "gc"):
        skipped = run_json(command, tmp_path, code=1)["skipped"]
        assert set(skipped) == {str(tmp_path / f"{n}-0.slots") for n in range(3)}
        assert "not a memory file of tiered-kv" in skipped[str(tmp_path / "0-0.slots")]
    assert (tmp_path / "0-0.slots").read_bytes() == b"a diary"


def test_a_file_that_cannot_be_used_is_listed_with_the_reason(tmp_path: Path) -> None:
    open_in(tmp_path).close()
    os.truncate(tmp_path / "0-0.slots", 5000)
    (tmp_path / "1-0.slots").write_bytes(bytes(100))
    first, second = run_json("ls", tmp_path)["files"]
    assert "has 5000 bytes instead of" in first["unusable"]
    assert second["unusable"] == "the creation of the file was not completed"
    assert "instead of" in run("ls", tmp_path)


def test_a_missing_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    assert run_json("ls", tmp_path)["files"] == []
    for command in ("ls", "gc"):
        assert "TIERED_KV_CPU_PATH" in run(command, tmp_path / "none", code=2)
