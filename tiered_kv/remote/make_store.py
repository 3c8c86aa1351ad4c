"""The store of an address."""

from __future__ import annotations

from .address import RemoteAddress
from .base import RemoteStore
from .shared_root.root_store import SharedRoot
from .valkey.servers import ValkeyStore


def make_store(address: RemoteAddress) -> RemoteStore:
    """Make a way to the place; it is gone there with the first call."""
    if address.folder is not None:
        return SharedRoot(address.folder, address.most_bytes)
    return ValkeyStore(address)
