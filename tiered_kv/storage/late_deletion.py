"""Deletion of values from a remote store that did not answer when it was told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Thread

from tiered_kv.remote.base import RemoteKey, RemoteStore

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two attempts: doubled each time."""
CALL_S = 10.0
THREAD_NAME = "tiered-kv-deletion"


def delete_later(make_store: Callable[[], RemoteStore], keys: Sequence[RemoteKey]) -> None:
    """Delete values as soon as the store answers, by a way of its own, beside all else.

    Until then others may find them. So it is logged as an error.
    """
    logger.error(
        "the remote store does not answer, and %d pages of before the cache reset are still there: "
        "if weights were changed before it, engines that find these pages compute with KV of both. "
        "They are deleted once the store answers, while this engine runs",
        len(keys),
    )
    Thread(target=_delete, args=(make_store, keys), name=THREAD_NAME, daemon=True).start()


def _delete(make_store: Callable[[], RemoteStore], keys: Sequence[RemoteKey]) -> None:
    pause_s = FIRST_PAUSE_S
    while True:
        time.sleep(pause_s)
        with closing(make_store()) as store:
            if store.delete(keys, time.monotonic() + CALL_S):
                logger.warning("%d pages of before a cache reset are deleted now", len(keys))
                return
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
