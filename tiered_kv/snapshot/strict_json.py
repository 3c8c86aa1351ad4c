"""JSON that anybody may have written: bounded before it is parsed, and read without leniency.

Parsing takes at most a few times the memory of the text and of as many values as are let in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 64 << 20
MOST_VALUES = 1 << 22
MOST_LISTS = 1 << 20
MOST_OBJECTS = 1 << 16
MOST_NAMES = 1 << 18
MOST_DEPTH = 64
MOST_TEXT = 1 << 16
MOST_WHOLE = (1 << 63) - 1

_BOUNDS = (
    (b",", MOST_VALUES, "values"),
    (b"[", MOST_LISTS, "lists"),
    (b"{", MOST_OBJECTS, "objects"),
    (b":", MOST_NAMES, "names"),
)


def parse(data: bytes) -> object:
    """Parse a text of ASCII.

    Raises:
        ValueError: it is no JSON, too large, or has a name twice or a number that is none.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and {MOST_BYTES} are the most")
    if not data.isascii():
        raise ValueError("it has bytes that are not ASCII")
    for mark, most, what in _BOUNDS:
        if data.count(mark) > most:
            raise ValueError(f"it has more than {most} {what}")
    try:
        return _DECODER.decode(data.decode("ascii"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def canonical(value: object) -> bytes:
    """Write the one text of a value that digests are made of.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return _ENCODER.encode(value).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None


def plain(value: object, room: int = MOST_DEPTH) -> Any:
    """Make of any settings what JSON has for them, as it would come back.

    Args:
        room: levels that may still follow.

    Raises:
        ValueError: nested too deeply.
    """
    if room <= 0:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
    if isinstance(value, Mapping):
        return {plain_text(str(name)): plain(one, room - 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, room - 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(one, room - 1) for one in value), key=str)
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and -MOST_WHOLE <= value <= MOST_WHOLE:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    return plain_text(value if type(value) is str else str(value))


def plain_text(value: str) -> str:
    """A text without halves of characters, which could not be printed."""
    return value.encode("utf-8", "replace").decode("utf-8")


class Fields:
    """Fields of an object, each to be read by its type.

    Args:
        found: what JSON gave.

    Raises:
        ValueError: it is no object. So do the methods, if a field lacks or is another thing than
            asked for; the message names it.
    """

    def __init__(self, found: object) -> None:
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        self._left: dict[str, object] = dict(found)

    def take(self, name: str) -> object:
        """Read a field of any type."""
        if name not in self._left:
            raise ValueError(f"it lacks {name!r}")
        return self._left.pop(name)

    def text(self, name: str) -> str:
        """Read a text."""
        return checked_text(self.take(name), name)

    def whole(self, name: str, least: int = 0, most: int = MOST_WHOLE) -> int:
        """Read a whole number of a range."""
        return checked_whole(self.take(name), name, least, most)

    def real(self, name: str, least: float, most: float) -> float:
        """Read a number of a range."""
        value = self.take(name)
        # Compared as it is: a huge whole number is no float.
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name!r} is no number")
        if not least <= value <= most:
            raise ValueError(f"{name!r} is not between {least} and {most}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Read true or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name!r} is neither true nor false")
        return value

    def items(self, name: str) -> list[Any]:
        """Read a list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise ValueError(f"{name!r} is no list")
        return value

    def settings(self, name: str) -> dict[str, Any]:
        """Read an object of any JSON that is not too deep."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise ValueError(f"{name!r} is no object")
        try:
            same = plain(value) == value
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        if not same:
            raise ValueError(f"{name!r} has numbers or characters that there are not")
        return value

    def done(self) -> None:
        """Refuse fields that nobody has read: what they ask for would not be done."""
        if self._left:
            raise ValueError(f"it has a field {next(iter(self._left))!r:.60}, not known here")


def checked_text(value: object, name: str) -> str:
    """Check that a value is a text that can be printed.

    Raises:
        ValueError: it is not, or too long.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is no text")
    if len(value) > MOST_TEXT:
        raise ValueError(f"{name!r} has more than {MOST_TEXT} characters")
    if plain_text(value) != value:
        raise ValueError(f"{name!r} has half a character")
    return value


def checked_whole(value: object, name: str, least: int, most: int) -> int:
    """Check that a value is a whole number of a range.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int:
        raise ValueError(f"{name!r} is no whole number")
    if not least <= value <= most:
        raise ValueError(f"{name!r} is not between {least} and {most}")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has an object with one name twice")
    return found


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("it has a number that is too large")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"it has {text}, which is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_real, parse_constant=_refuse)
_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
