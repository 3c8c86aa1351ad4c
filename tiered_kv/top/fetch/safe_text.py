"""Text from elsewhere, made harmless for a terminal."""

from __future__ import annotations

import unicodedata

MOST_CHARS = 200
"""Characters that are kept of a text, unless more are asked for."""
_FROM_THE_RIGHT = frozenset({"R", "AL", "AN"})
"""Classes of characters that a terminal may write from right to left, with what is beside them."""
_ABOVE = frozenset({"Mn", "Me"})
"""Categories of marks that are written over what is before them."""


def harmless(text: str, most: int = MOST_CHARS) -> str:
    """The text, or its beginning, with escapes for what is not plainly shown.

    Escaped is what moves the cursor, has no width, is written over other text, or is written from
    right to left.

    Args:
        most: characters that are kept of it.
    """
    shown = "".join(char if _is_plain(char) else _escaped(char) for char in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def _is_plain(char: str) -> bool:
    if char.isascii():
        return char.isprintable()
    return (
        char.isprintable()
        and unicodedata.category(char) not in _ABOVE
        and unicodedata.bidirectional(char) not in _FROM_THE_RIGHT
    )


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
