"""The remote tier: pages that engines share through a store that many machines can reach.

The module also creates the remote store of an address.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from secrets import token_bytes

from tiered_kv.codecs.registry import from_table
from tiered_kv.config import TierConfig
from tiered_kv.errors import ConfigError
from tiered_kv.remote.address import RemoteAddress
from tiered_kv.remote.base import Outcome, Parts, RefusedError, RemoteKey, RemoteStore
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.storage.disk.probe import DiskSpeed
from tiered_kv.storage.shared_root.root_store import SharedRoot
from tiered_kv.tiers import REMOTE, Knowledge, TierSpec

from .base import PageStore, StoreSite
from .codec_choice import choose_codec
from .remote_pages import RETRY_S, NoPages, RemotePages


def make_store(address: RemoteAddress) -> RemoteStore:
    """Create the store of an address. The store makes no connection and opens no file before its
    first call."""
    if address.folder is not None:
        return SharedRoot(address.folder, address.most_bytes)
    return ValkeyStore(address)


logger = logging.getLogger(__name__)

PROBE_PREFIX = b"tkv:probe:"
PROBE_VALUES = 16
PROBE_BYTES = 256 << 10
"""Size of a value used to measure the link, bytes. Several values of about a page's size are used,
so that latency has the same weight as in a transfer of a context."""
PROBE_S = 2.0
ASSUMED_SPEED = DiskSpeed(read=1e8, write=1e8)
"""Assumed speed of a link that could not be measured, bytes per second: about 1 Gbit/s."""
SLOWEST = 1e4


class RemoteTier:
    """The remote tier at ``config.remote``.

    Raises:
        ConfigError: no address is configured.
    """

    def __init__(self, config: TierConfig) -> None:
        if config.remote is None:
            raise ConfigError("TIERED_KV_TIERS=remote needs an address: set TIERED_KV_REMOTE")
        # A single server may belong to a cluster, which only its reply shows.
        in_runs = config.remote.folder is None
        self.spec = TierSpec(REMOTE, Knowledge.ASKED, shared=True, in_runs=in_runs)
        self.bandwidth = 0.0
        self._address = config.remote
        self._codec_name = config.codec
        self._link: DiskSpeed | None = None

    def open(self, site: StoreSite) -> PageStore:
        """Open the rank's connection to the store. The first call measures the link and chooses the
        codec. A store that cannot be reached is tried again later. If no other engine can have the
        same fingerprint, the returned store stores nothing."""
        if not site.lasting:
            return NoPages()
        if self._link is None:
            with closing(make_store(self._address)) as store:
                self._link = _measured(store, self._address)
                if isinstance(store, ValkeyStore):
                    # Later connections then find a cluster even if its configured node has failed.
                    self._address = replace(self._address, servers=store.servers)
        # One thread reads, checks and decodes.
        codec, self.bandwidth = choose_codec(self._codec_name, site.page_format, self._link, 1)
        make = partial(from_table, trusted=self._codec_name)
        retry_s = None if len(self._address.servers) > 1 else RETRY_S
        way = partial(make_store, self._address)
        return RemotePages(way, site, codec, make, self._link.write, retry_s)


def _measured(store: RemoteStore, address: RemoteAddress) -> DiskSpeed:
    """Measure the speed of the link. If the store cannot be reached or rejects writes, logs a
    warning and returns ``ASSUMED_SPEED``.

    Raises:
        ConfigError: the server refuses access.
    """
    try:
        store.check(time.monotonic() + PROBE_S)
    except RefusedError as error:
        raise ConfigError(
            f"TIERED_KV_REMOTE={address} rejects the login ({error}): set the user as in "
            "valkey://user@host:port, and the password in TIERED_KV_REMOTE_PASSWORD_FILE"
        ) from error
    except Exception as error:
        logger.warning(
            "TIERED_KV_REMOTE=%s cannot be reached (%s). The engine will try again", address, error
        )
        return ASSUMED_SPEED
    speed = measure_link(store)
    if speed.write <= SLOWEST:  # nothing to measure with, but pages can be read
        logger.warning(
            "the store at TIERED_KV_REMOTE=%s rejects writes, so its speed is unknown. Pages are "
            "still read from it, and writes will be retried",
            address,
        )
        return ASSUMED_SPEED
    logger.info(
        "TIERED_KV_REMOTE=%s reads %.0f MB/s and writes %.0f MB/s",
        address,
        speed.read / 1e6,
        speed.write / 1e6,
    )
    return speed


def measure_link(store: RemoteStore) -> DiskSpeed:
    """Measure the speed of reads and writes with temporary values, bytes per second. Each speed is
    at least ``SLOWEST``."""
    name = PROBE_PREFIX + token_bytes(8).hex().encode()
    keys = [RemoteKey(name + b":%d" % at, name + b":%d" % at) for at in range(PROBE_VALUES)]
    value = memoryview(token_bytes(PROBE_BYTES))
    parts: Parts = [value]
    try:
        began = time.monotonic()
        stored = store.put([(key, parts) for key in keys], began + PROBE_S)
        put_s = time.monotonic() - began
        began = time.monotonic()
        buffer = memoryview(bytearray(PROBE_BYTES))
        found = [one.outcome for one in store.get(keys, buffer, began + PROBE_S)]
        get_s = time.monotonic() - began
    finally:
        store.delete(keys, time.monotonic() + PROBE_S)
    return DiskSpeed(
        read=max(SLOWEST, found.count(Outcome.HIT) * PROBE_BYTES / get_s),
        write=max(SLOWEST, stored.count(Outcome.STORED) * PROBE_BYTES / put_s),
    )
