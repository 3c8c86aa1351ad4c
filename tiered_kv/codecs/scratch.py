"""Memory of a thread for bytes under way."""

from __future__ import annotations

import threading

import numpy as np

from .base import Bytes
from .raw import NOTHING


class Scratch(threading.local):
    """Memory of this thread; grows, and lives as long as the thread."""

    def __init__(self) -> None:
        self._memory: Bytes = NOTHING

    def bytes(self, count: int) -> Bytes:
        """Give ``count`` bytes of any content, until this thread asks again."""
        if self._memory.nbytes < count:
            self._memory = np.empty(count, dtype=np.uint8)
        return self._memory[:count]
