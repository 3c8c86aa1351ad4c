"""Helpers that create stores in a root folder, and run ``tiered-kv store`` on the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tiered_kv.cli.app import app
from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.keys import PageKey
from tiered_kv.storage.admin.inventory import Inventory, find_stores, take_inventory
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import page_key
from tiered_kv.testing.segment_store import store_options

PAGE_FORMAT = PageFormat(ElementType.BF16, 16384, 16)
OTHER = bytes(15) + b"\1"


def run(*arguments: object, code: int = 0) -> str:
    """Run a command, and return its standard output. For exit code 2, returns its one-line
    error."""
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code != 2:
        return result.stdout
    assert result.stdout == ""
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``, and return the object that it prints."""
    found = json.loads(run(*arguments, "--json", code=code))
    assert isinstance(found, dict)
    return found


class Disk:
    """A root folder with stores."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages: dict[PageKey, bytes] = {}

    def open(self, codec: str = "raw", **changes: object) -> SegmentStore:
        options = store_options(
            self.root, page_format=PAGE_FORMAT, capacity_bytes=64 << 20, **changes
        )
        return SegmentStore(options, parse(codec)(PAGE_FORMAT), from_table)

    def put(self, store: SegmentStore, *names: int, version: int = 0) -> list[PageKey]:
        keys = [page_key(name, store.options.fingerprint) for name in names]
        pages = [
            (key, synthetic_page(PAGE_FORMAT, seed=name + 1000 * version))
            for key, name in zip(keys, names, strict=True)
        ]
        assert not store.put(pages)
        self.pages.update((key, page.tobytes()) for key, page in pages)
        return keys

    def fill(self, count: int = 40, codec: str = "raw", **changes: object) -> Path:
        """Create a closed store with this number of pages, written in groups of ten. Returns its
        folder."""
        store = self.open(codec, **changes)
        for first in range(0, count, 10):
            self.put(store, *range(first, first + 10))
        store.close()
        return store.options.folder

    @property
    def inventory(self) -> Inventory:
        (info,) = find_stores(self.root).stores
        return take_inventory(info)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)
