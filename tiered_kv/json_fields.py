"""JSON of frozen dataclasses: short numbers, bounded texts, and no field that has its default.

Readers pass over fields that they do not know, so that a later version may add some.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, TypeVar

import xxhash

DIGITS = 5
"""Digits of a number that are written, and at most six of them behind the point."""

MOST = (1 << 63) - 1
"""Largest whole number that is read."""

Read = Callable[[Any], Any]
Part = TypeVar("Part")


def number(value: float) -> float | int | None:
    """A number as it is written; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{round(value, 6):.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def cut(text: str, room: int) -> str:
    """A text of which JSON takes at most ``room`` bytes (17 or more).

    Of a longer one the beginning is left, and a digest of all of it: long texts that differ stay
    different, and equal ones equal.
    """
    if len(text) <= room and size(text) <= room:
        return text
    digest = "~" + xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
    left, kept = room - len(digest), 0
    for char in text[:left]:
        left -= size(char)
        if left < 0:
            break
        kept += 1
    return text[:kept] + digest


def size(text: str) -> int:
    """Bytes that a text takes in JSON, without its quotes."""
    return len(encode_basestring_ascii(text)) - 2


def said(part: object) -> dict[str, object]:
    """A dataclass as JSON knows it, without fields that have their default."""
    found = dict[str, object]()
    kind: Any = type(part)
    for name, default in _defaults(kind).items():
        value = getattr(part, name)
        written = None if value == default else _written(value)
        if written is not None and written != {} and written != default:  # once rounded
            found[name] = written
    return found


def _written(value: object) -> object:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _written(one) for name, one in value.items()}
    return said(value) if is_dataclass(value) else None


@cache
def _defaults(kind: Any) -> dict[str, object]:
    """Defaults by the names of the fields; ``MISSING``, which equals nothing, if there is none."""
    return {field.name: _default(field) for field in fields(kind)}


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def read(kind: type[Part], found: object) -> Part:
    """Read a dataclass from what JSON gave.

    Its numbers are counts, sizes and times, which are never below 0. In a dataclass that has
    ``signed`` set, those that are no whole numbers may be.

    Raises:
        ValueError: a field lacks, is of another type or below 0; the message names it.
    """
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    known: Any = kind
    readers, values, name = _readers(known), dict[str, Any](), ""
    try:
        for name, value in found.items():
            if name not in readers:
                continue
            plain, reader = readers[name]
            # Most values are what they should be, and there may be millions of them.
            if type(value) is plain and (plain is not float or 0.0 <= found[name] < math.inf):
                values[name] = value
            else:
                values[name] = reader(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    try:
        return kind(**values)
    except TypeError:
        lacks = [name for name, default in _defaults(known).items() if default is MISSING]
        missing = ", ".join(name for name in lacks if name not in values)
        raise ValueError(f"it lacks {missing}") from None


class _Field(NamedTuple):
    """Reader of a field, and the type whose values it returns as they are, but for numbers that are
    not finite."""

    plain: type | None
    read: Read


@cache
def _readers(kind: Any) -> dict[str, _Field]:
    hints = typing.get_type_hints(kind)
    real = _signed if getattr(kind, "signed", False) else _real
    return {
        field.name: _Field(_PLAIN_TYPES.get(hints[field.name]), _reader(hints[field.name], real))
        for field in fields(kind)
    }


def _reader(hint: Any, real: Read) -> Read:
    """Reader of one field's type; ``real`` reads its numbers that are no whole ones."""
    if isinstance(hint, types.UnionType):
        inner = _reader(next(one for one in hint.__args__ if one is not types.NoneType), real)
        return lambda value: None if value is None else inner(value)
    if hint is float:
        return real
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin = typing.get_origin(hint)
    if origin is tuple:
        one_of = _reader(typing.get_args(hint)[0], real)
        return lambda value: tuple(map(one_of, _list(value)))
    if origin is not None:  # a mapping of names to numbers
        inner = _reader(typing.get_args(hint)[1], real)
        return lambda value: {_text(name): inner(one) for name, one in _object(value).items()}
    kind: type[Any] = hint
    if issubclass(kind, Enum):
        return _Values(kind)
    own: Read | None = getattr(kind, "from_json", None)
    return own or (lambda value: read(kind, value))


class _Values:
    """Reader of an enum."""

    def __init__(self, kind: type[Enum]) -> None:
        self._of = {one.value: one for one in kind}

    def __call__(self, value: object) -> Enum:
        found = self._of.get(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{value!r:.40} is none of {', '.join(self._of)}")
        return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is no whole number")
    if value < 0:
        raise ValueError(f"{value!r:.40} is below 0")
    if value > MOST:
        raise ValueError("it is too large")
    return value


def _real(value: object) -> float:
    real = _signed(value)
    if real < 0:
        raise ValueError(f"{value!r:.40} is below 0")
    return real


def _signed(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    try:
        real = float(value)  # type: ignore[arg-type]
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise ValueError("it is too large")
    return real


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is neither true nor false")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list")
    return value


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no object")
    return value


_PLAIN_TYPES: dict[Any, type] = {
    str: str,
    str | None: str,
    bool: bool,
    float: float,
    float | None: float,
}
_PLAIN: dict[Any, Read] = {str: _text, int: _whole, bool: _bool}


class JsonObject:
    """A dataclass that is written with every field, and with numbers and texts unchanged.

    Attributes:
        signed: True, so that numbers may be below 0, except whole numbers.
        renamed: names in JSON that a field of Python cannot have, by field.
    """

    __slots__ = ()
    signed: typing.ClassVar[bool] = True
    renamed: typing.ClassVar[Mapping[str, str]] = {}

    def to_json(self) -> Any:
        """Convert it to what the ``json`` module writes."""
        kind: Any = type(self)
        found = {}
        for field, name, is_plain in _names(kind):
            value = getattr(self, field)
            found[name] = value if is_plain else _unchanged(value)
        return found

    @classmethod
    def from_json(cls, found: object) -> typing.Self:
        """Read it from what the ``json`` module parsed.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        if isinstance(found, dict):
            for field, name in cls.renamed.items():
                if name not in found:
                    raise ValueError(f"it lacks {name}")
                found = {**found, field: found[name]}
        return read(cls, found)


@cache
def _names(kind: Any) -> list[tuple[str, str, bool]]:
    """Name of each field, its name in JSON, and whether JSON has its values as they are."""
    plain = (str, int, float, bool, str | None, int | None, float | None)
    hints = typing.get_type_hints(kind)
    return [
        (field.name, kind.renamed.get(field.name, field.name), hints[field.name] in plain)
        for field in fields(kind)
    ]


def _unchanged(value: Any) -> Any:
    if isinstance(value, JsonObject):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(map(_unchanged, value))
    if isinstance(value, Mapping):
        return {name: _unchanged(one) for name, one in value.items()}
    return value
