"""Trains the codec of new pages on the first pages that are stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .base import Bytes, Codec

logger = logging.getLogger(__name__)

MIN_SAMPLE = 16
MAX_SAMPLE = 64
"""Minimum and maximum number of pages on which a codec is trained."""


class CodecTraining:
    """Trains the codec of new pages once, on the first pages.

    Attributes:
        codec: codec of new pages.
        wanted: True until training has been tried or a trained codec was adopted; False from the
            start if the codec does not want training.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.wanted = codec.wants_training
        self._samples: list[Bytes] = []

    def adopt(self, other: Codec) -> bool:
        """Adopt a codec that was trained elsewhere, if training is wanted and the codec fits.

        Returns:
            True if pages that are encoded from now on need the table of that codec.
        """
        own = self.codec
        alike = (other.name, other.page_format) == (own.name, own.page_format)
        if not self.wanted or not alike or other.wants_training:
            return False
        self.wanted = False
        self._samples = []
        self.codec = other
        return True

    def see(self, pages: Sequence[Bytes]) -> bool:
        """Train the codec on the given and earlier pages if there are at least ``MIN_SAMPLE``,
        otherwise keep copies of the given pages. Call only while ``wanted`` is True. If training
        fails, the failure is logged and the untrained codec is kept.

        Returns:
            True if pages encoded from now on need another table.
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
            logger.exception(
                "the codec could not be trained; pages are encoded with the untrained codec"
            )
            return False
        before, self.codec = self.codec, trained
        return trained.table != before.table

    def forget(self) -> None:
        """Drop the copies of pages, because the codec must not be trained on any page seen so
        far."""
        self._samples.clear()
