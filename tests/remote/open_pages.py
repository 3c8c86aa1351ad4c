"""A helper that opens pages in a remote store."""

from __future__ import annotations

from functools import partial

from tests.storage.test_remote_pages import BANDWIDTH, SITE
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.remote.address import parse_address
from tiered_kv.storage.remote_pages import FromTable, RemotePages
from tiered_kv.storage.remote_tier import make_store
from tiered_kv.testing.conformance.store import PAGE_FORMAT


def open_at(address: str, codec: str = "raw", make: FromTable = from_table) -> RemotePages:
    """Open a rank's pages in the store at this address, as another engine would."""
    way = partial(make_store, parse_address(address))
    return RemotePages(way, SITE, parse(codec)(PAGE_FORMAT), make, BANDWIDTH)
