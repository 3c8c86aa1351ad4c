"""Files written by commit 913b4b9, and the contents of their pages. See ``README.md``."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256, shake_128
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.keys import PageKey, page_keys, tail_key

ARCHIVE = Path(__file__).with_name("written_by_913b4b9.tar.xz")
FORMAT = PageFormat(ElementType.BF16, page_bytes=2048, tokens=16)
FINGERPRINT = bytes(range(16))


def page(key: bytes, page_format: PageFormat = FORMAT) -> Bytes:
    """Return the page of a key: bf16 numbers with absolute values from 1/128 to 2, which compress
    well."""
    bits = np.frombuffer(shake_128(key).digest(page_format.page_bytes), np.uint8).copy()
    bits[1::2] = bits[1::2] & 0x80 | 0x3C | bits[1::2] & 0x03
    return bits


def keys_of(first: int, count: int, tails: int = 0) -> list[PageKey]:
    """Return the keys of ``count`` full blocks, and of ``tails`` partial blocks after the last full
    one."""
    hashes = [sha256(n.to_bytes(4, "big")).digest() for n in range(first, first + count)]
    keys = page_keys(FINGERPRINT, hashes)
    return keys + [tail_key(keys[-1], range(n + 1), None) for n in range(tails)]


def pages_of(keys: list[PageKey]) -> dict[PageKey, bytes]:
    """Return the page of each key."""
    return {key: page(key).tobytes() for key in keys}


def changed(content: bytes, at: int) -> bytes:
    """Return the content with one bit of the byte at offset ``at`` flipped."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def changes(content: bytes, offsets: range) -> Iterator[tuple[int, bytes]]:
    """Yield each offset, and the content with one bit flipped there."""
    for at in offsets:
        yield at, changed(content, at)
