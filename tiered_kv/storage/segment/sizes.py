"""Sizes of segments: the usual one, and the bounds that a page format sets."""

from __future__ import annotations

from tiered_kv.codecs.base import PageFormat
from tiered_kv.storage.disk.files import BLOCK

from .format import MAX_KEY_BYTES, footer_bytes, record_bytes

SEGMENT_BYTES = 512 << 20
MIN_PAGES = 8
"""Pages for which every segment has room."""


def least_segment_bytes(page_format: PageFormat) -> int:
    """Size of a segment with room for ``MIN_PAGES`` pages, bytes."""
    # A codec may store a little more than it was given.
    page = page_format.page_bytes
    record = record_bytes(MAX_KEY_BYTES, page + page // 64 + BLOCK)
    header = 16 * BLOCK
    return header + MIN_PAGES * record + footer_bytes(MIN_PAGES, MIN_PAGES * MAX_KEY_BYTES)


def most_segment_bytes(page_format: PageFormat) -> int:
    """Largest size of a segment with these pages, whatever the capacity is or was, bytes."""
    return max(SEGMENT_BYTES, least_segment_bytes(page_format))
