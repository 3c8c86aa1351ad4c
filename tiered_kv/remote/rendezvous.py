"""Rendezvous hashing: the server of a run, the same on every machine that knows the same servers.

A server that comes or goes moves the runs that are its own, and no others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

RUN_PAGES = 128
"""Pages of a run. Were pages placed one by one, a server that is down would cut every context at
about its first page; placed by runs, it cuts one context in so many at its first run."""


def server_of(run: bytes, servers: Sequence[bytes]) -> int:
    """Index of the run's server: the one with the highest hash of both names together."""
    if len(servers) == 1:
        return 0
    return max(range(len(servers)), key=lambda at: xxhash.xxh3_64_intdigest(run + servers[at]))
