"""The codec of new pages, fitted to the first of them if it wants that."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiered_kv.codecs.base import Bytes, Codec

logger = logging.getLogger(__name__)

MIN_SAMPLE = 16
MAX_SAMPLE = 64
"""Pages from which a codec is trained."""


class Training:
    """Trains a codec once.

    Attributes:
        codec: what new pages are to be encoded with.
        wanted: whether it would learn from pages.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.wanted = codec.wants_training
        self._samples: list[Bytes] = []

    def skip(self, trained: Codec) -> None:
        """An earlier process has trained it already."""
        self.codec = trained
        self.wanted = False

    def see(self, pages: Sequence[Bytes]) -> bool:
        """Pages to learn from, of which copies are kept until there are enough.

        Returns:
            Whether what is encoded from now on needs another table.
        """
        sample = [*self._samples, *pages][:MAX_SAMPLE]
        if len(sample) < MIN_SAMPLE:
            self._samples += [page.copy() for page in pages]
            return False
        self.wanted = False
        self._samples = []
        try:
            trained = self.codec.trained(sample)
        except Exception:
            logger.exception("the codec cannot be trained; pages are stored without that")
            return False
        before, self.codec = self.codec, trained
        return trained.table != before.table

    def forget(self) -> None:
        """No page seen so far may be learnt from."""
        self._samples.clear()
