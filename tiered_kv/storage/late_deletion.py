"""Deletion of values from a remote store that did not answer when it was told, or may since have
read values that were given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from threading import Thread

from tiered_kv.remote.base import RemoteKey, RemoteStore

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two attempts: doubled each time."""
CALL_S = 10.0
THREAD_NAME = "tiered-kv-deletion"


def delete_later(store: RemoteStore, keys: Sequence[RemoteKey]) -> None:
    """Delete values as soon as the store answers, beside all else. Until then others may find them.
    So it is logged as an error.

    Args:
        store: the way by which they were put, for nothing else from now on. A shared folder is
            written by whoever has its lock, and by nobody else.
    """
    logger.error(
        "the remote store has not answered, and %d pages of before the cache reset may be there "
        "yet: if weights were changed before it, engines that find them compute with KV of both. "
        "They are deleted once the store answers, while this engine runs",
        len(keys),
    )
    Thread(target=_delete, args=(store, keys), name=THREAD_NAME, daemon=True).start()


def _delete(store: RemoteStore, keys: Sequence[RemoteKey]) -> None:
    pause_s = FIRST_PAUSE_S
    with closing(store):
        while True:
            time.sleep(pause_s)
            if store.delete(keys, time.monotonic() + CALL_S):
                logger.warning("%d pages of before a cache reset are deleted now", len(keys))
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
