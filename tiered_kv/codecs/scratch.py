"""Reusable temporary memory of a thread."""

from __future__ import annotations

import threading

import numpy as np

from .base import Bytes
from .raw import NOTHING


class Scratch(threading.local):
    """Reusable memory of the thread that uses it. It grows on demand, and lives as long as the
    thread."""

    def __init__(self) -> None:
        self._memory: Bytes = NOTHING

    def bytes(self, count: int) -> Bytes:
        """Return ``count`` bytes of undefined content, valid until this thread's next call."""
        if self._memory.nbytes < count:
            self._memory = np.empty(count, dtype=np.uint8)
        return self._memory[:count]
