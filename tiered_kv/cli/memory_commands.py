"""``tiered-kv memory``: list and delete memory files, which outlive their engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.errors import ConfigError
from tiered_kv.file_lock import short_owner
from tiered_kv.formatting import brief, count, size
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.transfer.memory_file.memory_files import MemoryFile, list_memory
from tiered_kv.transfer.memory_file.opening import delete_memory

from .terminal import (
    AsJson,
    Command,
    one_sentence,
    report,
    sentence_of,
    skipped,
)

app = typer.Typer(
    help="List and delete memory files, which outlive their engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

COLUMNS = {
    "file": False,
    "rank": False,
    "pages": True,
    "slots": True,
    "size": True,
    "newest": True,
    "open in": False,
}
"""Columns of ``ls``; the value is True for columns of numbers."""

NANOSECONDS = 1e9

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Memory folder (the value of TIERED_KV_CPU_PATH).")
]


@app.command("ls", cls=Command)
def list_command(folder: Folder, as_json: AsJson = False) -> None:
    """List the memory files in FOLDER. Works while a server runs.

    Exits with 1 if a path was skipped because it could not be read or is not a memory file.
    """
    with one_sentence():
        found = list_memory(folder)
    left_out = skipped(found.odd)
    files = [describe(one) for one in found.files]
    result = {"path": str(folder), "files": files, "skipped": left_out}
    report(as_json, result, COLUMNS, map(row, found.files), good=not left_out)


@app.command("gc", cls=Command, short_help="Delete memory files that no process has open.")
def gc_command(
    folder: Folder,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the memory files in FOLDER that no process has open.

    Exits with 1 if a file could not be read or deleted.
    """
    with one_sentence():
        found = list_memory(folder)
    removed, kept, refused, freed = list[Path](), list[Path](), dict[str, str](), 0
    for one in found.files:
        if one.locked:
            kept.append(one.path)
            continue
        try:
            freed += one.nbytes if dry_run else delete_memory(one.path)
            removed.append(one.path)
        except (ConfigError, FormatError, OSError) as error:
            refused[str(one.path)] = sentence_of(error)
    left_out = skipped(found.odd)
    result = {
        "path": str(folder),
        "dry_run": dry_run,
        "removed": [str(path) for path in removed],
        "kept": [str(path) for path in kept],
        "bytes_freed": freed,
        "refused": refused,
        "skipped": left_out,
    }
    word = "would delete" if dry_run else "deleted"
    rows = [[word, str(path)] for path in removed]
    rows += [["in use", str(path)] for path in kept]
    rows += [["kept", f"{path}: {reason}"] for path, reason in refused.items()]
    columns = {"": False, f"{size(freed)} in {count(len(removed), 'file')}": False}
    report(as_json, result, columns, rows, good=not (refused or left_out))


def describe(one: MemoryFile) -> dict[str, object]:
    """Return the description of a file for ``ls --json``."""
    geometry = one.header.geometry if one.header is not None else None
    return {
        "path": str(one.path),
        "contents": geometry.contents.hex() if geometry else None,
        "replica": geometry.replica if geometry else None,
        "rank": geometry.rank if geometry else None,
        "ranks": geometry.ranks if geometry else None,
        "slots": geometry.slots if geometry else None,
        "slot_bytes": geometry.slot_bytes if geometry else None,
        "bytes": one.nbytes,
        "pages": one.pages,
        "torn": one.torn,
        "newest_page_s": newest_s(one),
        "locked": one.locked,
        "owner": one.owner if one.locked else None,
        "unusable": one.damage or None,
    }


def newest_s(one: MemoryFile) -> float | None:
    """Return the age of the newest page, seconds; None if the file has no pages."""
    return max(0.0, time.time() - one.newest / NANOSECONDS) if one.pages else None


def row(one: MemoryFile) -> list[str]:
    """Return the row of a file under ``COLUMNS``."""
    owner = short_owner(one.owner)
    if one.header is None:
        cells = [one.damage, "-", "-"]
    else:
        geometry = one.header.geometry
        rank = f"{geometry.rank} of {geometry.ranks}"
        cells = [rank, f"{one.pages:,}", f"{geometry.slots:,}"]
    return [
        one.path.name,
        *cells,
        size(one.nbytes),
        brief(newest_s(one)),
        owner if one.locked else "-",
    ]
