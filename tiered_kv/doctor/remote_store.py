"""Check of the remote store: whether it answers, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tiered_kv.remote.address import RemoteAddress
from tiered_kv.remote.base import RefusedError
from tiered_kv.storage.make_store import make_store
from tiered_kv.storage.remote_tier import SLOWEST, measure_link

from .finding import Finding, fail, ok, warn

CHECK = "remote store"
ANSWER_S = 2.0


def check_remote(address: RemoteAddress | None) -> Iterator[Finding]:
    """Check that the store lets us in, and measure the link. What is written is deleted."""
    if address is None:
        return
    store = make_store(address)
    try:
        store.check(time.monotonic() + ANSWER_S)
        speed = measure_link(store)
    except RefusedError as error:
        advice = (
            "Give the user in TIERED_KV_REMOTE, the password in TIERED_KV_REMOTE_PASSWORD_FILE."
        )
        yield fail(CHECK, f"{address}: {error}", advice)
    except Exception as error:
        advice = "Start it, or correct TIERED_KV_REMOTE: engines compute what it would have."
        yield warn(CHECK, f"{address}: {error}", advice)
    else:
        seen = f"reads {speed.read / 1e6:,.0f} MB/s, writes {speed.write / 1e6:,.0f} MB/s"
        if min(speed.read, speed.write) <= SLOWEST:
            advice = "It is full (maxmemory-policy noeviction), a replica, or its user lacks SET."
            if address.folder is not None:
                advice = "Its file system may be full: a tenth of it is left to others."
            yield warn(CHECK, f"{address}: {seen}", advice)
        else:
            yield ok(CHECK, seen)
    finally:
        store.close()
