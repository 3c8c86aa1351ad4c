"""``tiered-kv store``: list, count, verify and delete stores on SSD, and export their pages."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.formatting import count, size
from tiered_kv.keys import PageKey
from tiered_kv.storage.admin.export import export
from tiered_kv.storage.admin.gc import (
    Selection,
    delete_leftover,
    delete_store,
    holder_of,
    leftovers,
)
from tiered_kv.storage.admin.inventory import (
    Inventory,
    Listing,
    find_stores,
    is_root,
    take_inventory,
)
from tiered_kv.storage.admin.verify import VerifyResult, verify_store
from tiered_kv.storage.segment.format import MAX_KEY_BYTES, MIN_KEY_BYTES
from tiered_kv.storage.store.locks import StoreError

from .store_report import (
    FINGERPRINT_DIGITS,
    STORE_COLUMNS,
    add_up,
    describe_bad,
    describe_store,
    store_row,
    total_rows,
)
from .terminal import (
    AsJson,
    Command,
    bar,
    one_sentence,
    refuse,
    report,
    skipped,
)

app = typer.Typer(
    help="List, check, export and delete pages on SSD.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DAY_S = 86400.0

Where = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="Store folder (the value of TIERED_KV_SSD_PATH), or one store in it."
    ),
]


def read_stores(path: Path) -> tuple[Listing, list[Inventory]]:
    """Find the stores under PATH and read their footers, with a progress bar.

    Raises:
        typer.Exit: with 2 if a path cannot be read.
    """
    inventories = []
    with one_sentence():
        found = find_stores(path)
        with bar("reading footers", len(found.stores)) as advance:
            for store in found.stores:
                inventories.append(take_inventory(store))
                advance(1)
    return found, inventories


def report_on(
    path: Path,
    as_json: bool,
    fields: Mapping[str, object],
    table: tuple[Mapping[str, bool], list[list[str]]],
    odd: Mapping[Path, str],
    *,
    good: bool = True,
) -> None:
    """Print the result of a command for PATH as JSON, or as a table.

    Args:
        fields: the JSON fields.
        table: columns and rows of the table.
        odd: reasons for skipped paths.
        good: False if the command should exit with 1.

    Raises:
        typer.Exit: the result is not good, or a path was skipped.
    """
    left_out = skipped(odd)
    result = {"path": str(path), **fields, "skipped": left_out}
    report(as_json, result, *table, good=good and not left_out)


@app.command("ls", cls=Command)
def list_command(path: Where, as_json: AsJson = False) -> None:
    """List the stores under PATH, least recently used first.

    Exits with 1 if a path was skipped because it could not be read or is not part of a store.
    """
    found, inventories = read_stores(path)
    fields = {"stores": [describe_store(one) for one in inventories]}
    table = STORE_COLUMNS, [store_row(one) for one in inventories]
    report_on(path, as_json, fields, table, found.odd)


@app.command("stat", cls=Command)
def stat_command(path: Where, as_json: AsJson = False) -> None:
    """Print totals of all stores under PATH.

    Exits with 1 if a path was skipped because it could not be read or is not part of a store.
    """
    found, inventories = read_stores(path)
    total = add_up(inventories)
    table = {"": False, str(path): False}, total_rows(total)
    report_on(path, as_json, asdict(total), table, found.odd)


@app.command("verify", cls=Command, short_help="Read and check every page under PATH.")
def verify_command(path: Where, as_json: AsJson = False) -> None:
    """Read and check every page under PATH. Changes nothing.

    Exits with 1 if a page or a segment is bad, or a path was skipped.
    """
    checked = VerifyResult()
    began = time.monotonic()
    with one_sentence():
        found = find_stores(path)
        stores = found.stores
        with bar("reading pages", sum(store.nbytes for store in stores)) as advance:
            for store in stores:
                checked.add(verify_store(store, advance))
    seconds = time.monotonic() - began
    bad_segments = [
        {"store": str(segment.parent), "segment": segment.name, "reason": reason}
        for segment, reason in checked.bad_segments.items()
    ]
    bad_pages = [describe_bad(bad) for bad in checked.bad_pages]
    good = checked.good and not found.odd
    fields = {
        "good": good,
        "stores": len(stores),
        "segments": checked.segments,
        "pages": checked.pages,
        "bytes_read": checked.nbytes,
        "seconds": seconds,
        "bad_pages": bad_pages,
        "bad_segments": bad_segments,
    }
    if not as_json:
        for bad in bad_segments:
            typer.echo("bad segment {store}/{segment}: {reason}".format(**bad))
        for page in bad_pages:
            typer.echo("bad page {key} in {store}/{segment} at {offset}: {reason}".format(**page))
    bad_counts = f"bad: {count(len(bad_pages), 'page')}, {count(len(bad_segments), 'segment')}"
    columns = {"stores": True, "segments": True, "pages": True, "read": True, "": False}
    counts = [str(len(stores)), str(checked.segments), f"{checked.pages:,}", size(checked.nbytes)]
    table = columns, [[*counts, "all good" if good else bad_counts]]
    report_on(path, as_json, fields, table, found.odd, good=good)


@app.command("gc", cls=Command, short_help="Delete stores that no process has open.")
def gc_command(
    path: Where,
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="DAYS", help="Delete only stores last used more than DAYS ago."
        ),
    ] = None,
    fingerprint: Annotated[
        str,
        typer.Option(
            metavar="HEX", help="Delete only stores with this fingerprint; 8 digits are enough."
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all stores that are not in use.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the selected stores under PATH that no process has open, and files that dead processes
    left behind.

    Exits with 1 if a selected store is in use, or could not be read or deleted.
    """
    with one_sentence():
        found = find_stores(path)
    if everything == (older_than is not None or bool(fingerprint)):
        refuse("select stores with --older-than DAYS, --fingerprint HEX or both, or use --all")
    digits = fingerprint.lower()
    if digits and not re.fullmatch(rf"[0-9a-f]{{{FINGERPRINT_DIGITS},32}}", digits):
        refuse(f"{fingerprint!r} is not a fingerprint: use its first 8 to 32 hexadecimal digits")
    selection = Selection((older_than or 0.0) * DAY_S, digits)
    with one_sentence():
        now = time.time()
        stores = [store for store in found.stores if selection.takes(store, now)]
        removed, refused = [], {}
        for store in stores:
            try:
                if store.locked and dry_run:
                    raise StoreError(f"{store.path} is in use by {holder_of(store)}")
                if not dry_run:
                    delete_store(store)
                removed.append(store)
            except (StoreError, OSError) as error:
                refused[store.path] = str(error)
        rest = []
        for leftover in leftovers(path) if is_root(path) else []:
            try:
                if not dry_run:
                    delete_leftover(path, leftover)
                rest.append(leftover)
            except (StoreError, OSError) as error:
                refused[leftover] = f"{leftover}: {error}"
    freed = sum(store.nbytes for store in removed)
    fields = {
        "dry_run": dry_run,
        "removed": [str(store.path) for store in removed],
        "leftovers": [str(leftover) for leftover in rest],
        "bytes_freed": freed,
        "refused": {str(folder): reason for folder, reason in refused.items()},
    }
    word = "would delete" if dry_run else "deleted"
    rows = [[word, str(store.path), size(store.nbytes)] for store in removed]
    rows += [[word, str(leftover), "left over"] for leftover in rest]
    rows += [["kept", reason, ""] for reason in refused.values()]
    columns = {"": False, f"{size(freed)} in {len(removed)} stores": False, " ": False}
    report_on(path, as_json, fields, (columns, rows), found.odd, good=not refused)


@app.command("export", cls=Command, short_help="Write decoded pages to a folder.")
def export_command(
    path: Where,
    targets: Annotated[list[str], typer.Argument(metavar="[KEY] OUT", hidden=True)],
    everything: Annotated[
        bool, typer.Option("--all", help="Export every page. Takes no KEY.")
    ] = False,
    stored: Annotated[
        bool,
        typer.Option(
            "--stored",
            help="Also write each page's encoded plane and zstd frame, and the codec table.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write decoded pages and a manifest to the folder OUT, which must be empty or new. KEY selects
    one page by its key, in hexadecimal. --all selects every page.

    Exits with 1 if a page could not be read or a path was skipped.
    """
    if len(targets) != (1 if everything else 2):
        refuse("expected KEY and OUT, or --all and OUT")
    key = None if everything else parse_key(targets[0])
    out = Path(targets[-1])
    found, inventories = read_stores(path)
    with one_sentence():
        total = sum(len(one.pages) for one in inventories) if key is None else 1
        with bar("writing pages", total) as advance:
            exported = export(inventories, key, out, stored=stored, advance=advance)
    unreadable = {path: why for one in inventories for path, why in one.unreadable.items()}
    fields = {
        "out": str(out),
        "pages": len(exported.pages),
        "raw_bytes": exported.nbytes,
        "failed": exported.failed,
    }
    for where, reason in () if as_json else exported.failed.items():
        typer.echo(f"not exported: {reason} ({where})", err=True)
    columns = {"pages": True, "bytes": True, "to": False}
    table = columns, [[f"{len(exported.pages):,}", size(exported.nbytes), str(out)]]
    report_on(path, as_json, fields, table, found.odd | unreadable, good=not exported.failed)


def parse_key(digits: str) -> PageKey:
    """Parse a page's key from hexadecimal digits.

    Raises:
        typer.Exit: ``digits`` is not a key.
    """
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        refuse(f"{digits!r} is not a page key: use the hexadecimal digits that export --all lists")
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        refuse(f"a page key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, but KEY has {len(key)}")
    return PageKey(key)
