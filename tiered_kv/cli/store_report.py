"""Reports of ``tiered-kv store``: as JSON, and as tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiered_kv.formatting import NONE, brief, count, size
from tiered_kv.storage.admin.gc import holder_of
from tiered_kv.storage.admin.inventory import Inventory, StoreInfo
from tiered_kv.storage.admin.verify import BadPage

QUANTILES = {"newest": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "oldest": 1.0}
FINGERPRINT_DIGITS = 8
"""Number of hexadecimal digits of a fingerprint that ``ls`` shows, and minimum that ``gc`` accepts.
"""

STORE_COLUMNS = {
    "store": False,
    "rank": False,
    "pages": True,
    "stored": True,
    "raw": True,
    "ratio": True,
    "segments": True,
    "codec": False,
    "newest": True,
    "oldest": True,
    "last use": True,
    "open in": False,
}
"""Columns of ``ls``; the value is True for columns of numbers."""


def store_name(store: StoreInfo) -> str:
    """Return a short name of a store. Its fingerprint is long enough for ``gc --fingerprint``."""
    return f"{store.fingerprint.hex()[:FINGERPRINT_DIGITS]}/{store.path.name}"


def ages(inventories: Sequence[Inventory]) -> dict[str, float]:
    """Return quantiles of the pages' ages, seconds; empty without pages."""
    now = time.time()
    written = [place.entry.written for one in inventories for place in one.pages.values()]
    if not written:
        return {}
    found = np.quantile(now - np.array(written), list(QUANTILES.values())).tolist()
    return {name: max(0.0, seconds) for name, seconds in zip(QUANTILES, found, strict=True)}


def ratio(raw_bytes: int, stored_bytes: int) -> float | None:
    """Return the compression ratio; None without pages."""
    return raw_bytes / stored_bytes if stored_bytes else None


def _as_ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def describe_store(one: Inventory) -> dict[str, object]:
    """Return the description of a store for ``ls --json``."""
    info = one.info
    page_ages = ages([one])
    return {
        "path": str(info.path),
        "fingerprint": info.fingerprint.hex(),
        "replica": info.replica,
        "rank": info.rank,
        "ranks": one.ranks,
        "pages": len(one.pages),
        "stored_bytes": one.stored_bytes,
        "raw_bytes": one.raw_bytes,
        "ratio": ratio(one.raw_bytes, one.stored_bytes),
        "bytes_on_disk": info.nbytes,
        "segments": len(info.segments),
        "unreadable_segments": len(one.unreadable),
        "codecs": one.codecs,
        "oldest_page_s": page_ages.get("oldest"),
        "newest_page_s": page_ages.get("newest"),
        "last_use_s": max(0.0, time.time() - info.last_use),
        "locked": info.locked,
        "holder": info.holder if info.locked else None,
    }


def store_row(one: Inventory) -> list[str]:
    """Return the row of a store, under ``STORE_COLUMNS``."""
    info, page_ages = one.info, ages([one])
    return [
        store_name(info),
        f"{info.rank} of {one.ranks}" if one.ranks else str(info.rank),
        f"{len(one.pages):,}",
        size(one.stored_bytes),
        size(one.raw_bytes),
        _as_ratio(ratio(one.raw_bytes, one.stored_bytes)),
        str(len(info.segments)),
        ", ".join(one.codecs) or NONE,
        brief(page_ages.get("newest")),
        brief(page_ages.get("oldest")),
        brief(time.time() - info.last_use),
        holder_of(info) or NONE,
    ]


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of all stores. The fields are the same as in ``stat --json``.

    Attributes:
        locked: number of stores that a process has open.
        dead_bytes: size of superseded records in live segments, bytes.
        page_age_s: quantiles of the pages' ages, seconds.
    """

    stores: int
    locked: int
    fingerprints: list[str]
    pages: int
    bytes_on_disk: int
    stored_bytes: int
    raw_bytes: int
    ratio: float | None
    dead_bytes: int
    segments: int
    unreadable_segments: int
    codecs: list[str]
    page_age_s: dict[str, float]


def add_up(inventories: Sequence[Inventory]) -> Totals:
    """Return the totals of the stores, for ``stat``."""
    raw = sum(one.raw_bytes for one in inventories)
    stored = sum(one.stored_bytes for one in inventories)
    return Totals(
        stores=len(inventories),
        locked=sum(one.info.locked for one in inventories),
        fingerprints=sorted({one.info.fingerprint.hex() for one in inventories}),
        pages=sum(len(one.pages) for one in inventories),
        bytes_on_disk=sum(one.info.nbytes for one in inventories),
        stored_bytes=stored,
        raw_bytes=raw,
        ratio=ratio(raw, stored),
        dead_bytes=sum(one.dead_bytes for one in inventories),
        segments=sum(len(one.info.segments) for one in inventories),
        unreadable_segments=sum(len(one.unreadable) for one in inventories),
        codecs=sorted({name for one in inventories for name in one.codecs}),
        page_age_s=ages(inventories),
    )


def total_rows(total: Totals) -> list[list[str]]:
    """Return the rows of the totals: names and values."""
    rows = [
        ["stores", f"{total.stores}, {total.locked} of them open"],
        ["pages", f"{total.pages:,}"],
        ["on disk", f"{size(total.bytes_on_disk)} in {count(total.segments, 'segment')}"],
        ["stored", size(total.stored_bytes)],
        ["raw", size(total.raw_bytes)],
        ["ratio", _as_ratio(total.ratio)],
        ["dead", size(total.dead_bytes)],
        ["codecs", ", ".join(total.codecs) or NONE],
        [
            "page age",
            ", ".join(f"{name} {brief(s)}" for name, s in total.page_age_s.items()) or NONE,
        ],
        *(["fingerprint", name] for name in total.fingerprints),
    ]
    if total.unreadable_segments:
        rows.append(
            [
                "unreadable",
                f"{count(total.unreadable_segments, 'segment')}: run tiered-kv store verify",
            ]
        )
    return rows


def describe_bad(bad: BadPage) -> dict[str, object]:
    """Return the description of a bad page for ``verify --json``."""
    return {
        "store": str(bad.segment.parent),
        "segment": bad.segment.name,
        "offset": bad.offset,
        "key": bad.key.hex() if bad.key is not None else None,
        "reason": bad.reason,
    }
