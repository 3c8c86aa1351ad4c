"""The remote store of an address."""

from __future__ import annotations

from tiered_kv.remote.address import RemoteAddress
from tiered_kv.remote.base import RemoteStore
from tiered_kv.remote.valkey.client import ValkeyStore
from tiered_kv.storage.shared_root.root_store import SharedRoot


def make_store(address: RemoteAddress) -> RemoteStore:
    """Make the store. Nothing is connected or opened before its first call."""
    if address.folder is not None:
        return SharedRoot(address.folder, address.most_bytes)
    return ValkeyStore(address)
