"""Untrusted text, sanitized for a terminal."""

from __future__ import annotations

import unicodedata
from typing import Any

MOST_CHARS = 200
"""Default maximum length of a text, characters."""
_FROM_THE_RIGHT = frozenset({"R", "AL", "AN"})
"""Bidirectional classes of characters that a terminal may reorder together with adjacent
characters."""
_ABOVE = frozenset({"Mn", "Me"})
"""Categories of marks that are drawn over the previous character."""


def harmless(text: str, most: int = MOST_CHARS) -> str:
    """Return the text with escapes for characters that a terminal does not display plainly.

    Characters are escaped if they move the cursor, have no width, are drawn over others, or are
    written from right to left.

    Args:
        most: maximum number of characters that are kept. An ellipsis replaces the rest of a longer
            text.
    """
    if len(text) <= most and text.isascii() and text.isprintable():
        return text
    shown = "".join(char if _is_plain(char) else _escaped(char) for char in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def harmless_json(found: Any, most: int = MOST_CHARS) -> Any:
    """Return a parsed JSON value with all texts sanitized, including field names.

    Raises:
        RecursionError: the value is nested too deeply.
    """
    if isinstance(found, str):
        return harmless(found, most)
    if isinstance(found, list):
        return [harmless_json(one, most) for one in found]
    if isinstance(found, dict):
        return {harmless(name, most): harmless_json(one, most) for name, one in found.items()}
    return found


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
