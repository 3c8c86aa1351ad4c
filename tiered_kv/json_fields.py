"""JSON from untrusted sources, and JSON of frozen dataclasses.

- ``read_json`` parses a text of known length, and ``parse`` a text of any length. ``parse`` checks
  bounds first, so that parsing takes at most a few times the memory of the text.
- ``open_lines`` and ``lines_of`` read files with JSON on each line, plain or gzipped.
- Checks such as ``whole`` take a parsed value, and return it with its type or raise ``ValueError``.
  ``Fields`` applies checks to the fields of an object, and names the field in errors.
- ``read`` and ``said`` convert between JSON and frozen dataclasses, with rounded numbers, and
  without fields that have their default. Unknown fields are ignored, so that a later version may
  add fields.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

import xxhash

DIGITS = 5
"""Significant digits of written numbers, with at most six decimal places."""
MOST = (1 << 63) - 1
"""Largest accepted integer."""
MOST_BYTES = 64 << 20
"""Longest text that is parsed, bytes."""
MOST_DEPTH = 64
"""Maximum nesting depth of values that ``plain`` converts."""
MOST_TEXT = 1 << 16
"""Longest text in a field, characters."""

_BOUNDS = (
    (b",", 1 << 22, "values"),
    (b"[", 1 << 20, "lists"),
    (b"{", 1 << 16, "objects"),
    (b":", 1 << 18, "names"),
)

Read = Callable[[Any], Any]
Part = TypeVar("Part")
Value = TypeVar("Value")
Limits = ParamSpec("Limits")


# -- texts --------------------------------------------------------------------------------


def read_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON.

    Args:
        finite: reject numbers that are not finite, such as ``NaN`` and ``1e999``. False for values
            that this program wrote for other code, which may use such numbers.

    Raises:
        ValueError: the text is not JSON, has a rejected number, or is nested too deeply.
    """
    try:
        if not finite:
            return json.loads(text)
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def parse(data: bytes) -> object:
    """Parse a text of any origin and length.

    Raises:
        ValueError: the text is not JSON in UTF-8, is too large, repeats a name in an object, or has
            a number that is not finite.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"the JSON has {len(data)} bytes, more than the maximum of {MOST_BYTES}")
    for mark, most, what in _BOUNDS:
        if data.count(mark) > most:
            raise ValueError(f"the JSON has more than {most} {what}")
    try:
        return _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def canonical(value: object) -> bytes:
    """Encode a value as canonical JSON (ASCII, sorted names, no spaces), for digests.

    Raises:
        ValueError: the value cannot be written as JSON, or is nested too deeply.
    """
    try:
        return _ENCODER.encode(value).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the value cannot be written as JSON: {error}") from None


def plain(value: object, depth: int = MOST_DEPTH) -> Any:
    """Convert settings of any Python types to the values that a round trip through JSON would give.

    Args:
        depth: maximum number of nesting levels.

    Raises:
        ValueError: the value has more nesting levels than ``depth``.
    """
    if depth <= 0:
        raise ValueError(f"the value is nested deeper than {MOST_DEPTH} levels")
    if isinstance(value, Mapping):
        return {plain_text(str(name)): plain(one, depth - 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, depth - 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(one, depth - 1) for one in value), key=str)
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and -MOST <= value <= MOST:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    return plain_text(value if type(value) is str else str(value))


def plain_text(value: str) -> str:
    """Return the text with question marks in place of surrogates, which UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a JSON object has a duplicate name")
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.20} is outside the range of a float")
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word:.20} is not a number that JSON allows")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))


# -- files -------------------------------------------------------------------------------

_GZIPPED = b"\x1f\x8b"


def open_lines(path: Path) -> IO[bytes]:
    """Open a file for reading. Gzipped data is unpacked, whatever the file's name.

    Read it with ``lines_of``, which raises the same errors for plain and gzipped files.

    Raises:
        OSError: the file cannot be opened.
    """
    file = path.open("rb")
    try:
        is_packed = file.peek(len(_GZIPPED)).startswith(_GZIPPED)
    except BaseException:
        file.close()
        raise
    return cast("IO[bytes]", _Unpacked(file)) if is_packed else file


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of an open file, each with its line feed. Only a line feed ends a line: JSON
    text may contain U+2028 and U+0085 unescaped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the gzipped data is damaged or truncated. The lines before the damage have
            been yielded.
    """
    try:
        yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError("the gzip data is damaged or truncated") from error


class _Unpacked(gzip.GzipFile):
    """Reads gzipped data, and closes the underlying file as well."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._packed = file

    def close(self) -> None:
        super().close()
        self._packed.close()


# -- checks -------------------------------------------------------------------------------


def string(value: object, least: int = 0, most: int = MOST_TEXT) -> str:
    """Return ``value`` if it is a string of ``least`` to ``most`` characters.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a string")
    _check_length(len(value), least, most, "characters")
    return value


def text(value: object, least: int = 0, most: int = MOST_TEXT) -> str:
    """Return ``value`` if it is a string of ``least`` to ``most`` characters without surrogates,
    which UTF-8 cannot encode.

    Raises:
        ValueError: ``value`` is anything else.
    """
    found = string(value, least, most)
    if plain_text(found) != found:
        raise ValueError("the string contains a surrogate, which UTF-8 cannot encode")
    return found


def whole(value: object, least: int = 0, most: int = MOST) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``most``.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if type(value) is not int:
        raise ValueError(f"{_shown(value)} is not a whole number")
    _check_range(value, least, most)
    return value


def real(value: object, least: float = 0, most: float = sys.float_info.max) -> float:
    """Return ``value`` as a float if it is a number from ``least`` to ``most``. Integers are
    accepted.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a number")
    _check_range(value, least, most)
    return float(value)


def _check_range(value: float, least: float, most: float) -> None:
    if value < least:
        raise ValueError(f"{_shown(value)} is below {least}")
    if not value <= most:  # including NaN
        raise ValueError(f"{_shown(value)} is above {most}")


def _check_length(length: int, least: int, most: int, what: str) -> None:
    if not least <= length <= most:
        allowed = str(most) if least == most else f"{least} to {most}"
        raise ValueError(f"the value has {length} {what}, but {allowed} are allowed")


def flag(value: object) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


def items(value: object, least: int = 0, most: int = MOST) -> list[Any]:
    """Return ``value`` if it is a list of ``least`` to ``most`` items, of any type.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if not isinstance(value, list):
        raise ValueError(f"{_shown(value)} is not a list")
    _check_length(len(value), least, most, "items")
    return value


def strings(value: object) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a list of strings.

    Raises:
        ValueError: ``value`` is anything else.
    """
    return tuple(map(string, items(value)))


def mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, as parsed from a JSON object.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{_shown(value)} is not an object")
    return value


def settings(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping that ``plain`` would not change.

    Raises:
        ValueError: ``value`` is anything else.
    """
    found = mapping(value)
    if plain(found) != found:
        raise ValueError("the value contains numbers or characters that JSON does not allow")
    return found


def exactly(value: object, expected: str | int) -> None:
    """Raise ValueError unless ``value`` has the type and the value of ``expected``."""
    if type(value) is not type(expected) or value != expected:
        raise ValueError(f"{_shown(value)} is not {expected!r}")


def _shown(value: object) -> str:
    """Return a short text that shows a value. Takes constant time."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, int | float):
        return f"{value!r:.40}"
    return "a list" if isinstance(value, list) else f"a value of type {type(value).__name__}"


class Fields:
    """The fields of a JSON object. Each field can be taken once.

    Raises:
        ValueError: the value is not an object. The methods raise ValueError with the field's name.
    """

    def __init__(self, found: object) -> None:
        self._left = dict(mapping(found))

    def take(
        self,
        name: str,
        check: Callable[Concatenate[Any, Limits], Value],
        *limits: Limits.args,
        **more: Limits.kwargs,
    ) -> Value:
        """Remove a required field, and return what ``check`` returns for its value. Further
        arguments are passed to ``check`` as its limits.

        Raises:
            ValueError: the field is missing or was already taken, or ``check`` rejects its value.
        """
        if name not in self._left:
            raise ValueError(f"missing field: {name}")
        try:
            return check(self._left.pop(name), *limits, **more)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def done(self) -> None:
        """Raise ValueError if a field was not taken, because it would be ignored silently."""
        if self._left:
            raise ValueError(f"unknown field {_shown(next(iter(self._left)))}")


# -- dataclasses --------------------------------------------------------------------------


def number(value: float) -> float | int | None:
    """Round a number to the digits that JSON files keep: ``DIGITS`` significant digits, and at most
    six decimal places. Returns an int if the rounded number is whole, and None if the number is not
    finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{round(value, 6):.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def cut(text: str, room: int) -> str:
    """Shorten a text so that it takes at most ``room`` bytes in JSON; ``room`` is at least 17.

    A longer text is replaced by its beginning and a digest of the whole: different long texts stay
    different, and equal texts stay equal.
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
    """Return the size of a text in JSON without its quotes, bytes."""
    return len(encode_basestring_ascii(text)) - 2


def said(part: object) -> dict[str, object]:
    """Convert a dataclass to JSON values, with numbers rounded as by ``number``. Fields that have
    their default, empty mappings and numbers that are not finite are omitted."""
    found = dict[str, object]()
    kind: Any = type(part)
    for name, default in _defaults(kind).items():
        value = getattr(part, name)
        written = None if value == default else _written(value)
        if written is not None and written != {} and written != default:  # after rounding
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
    """Return the default of each field by its name. It is ``MISSING``, which no value equals, for
    fields without a default."""
    return {field.name: _default(field) for field in fields(kind)}


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def read(kind: type[Part], found: object) -> Part:
    """Read a dataclass from parsed JSON.

    The numbers are counts, sizes and times, which must not be negative. In a dataclass with
    ``signed`` set, numbers other than integers may be negative.

    Raises:
        ValueError: a field is missing, has another type or is negative; the message names it.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{_shown(found)} is not an object")
    known: Any = kind
    readers, values, name = _readers(known), dict[str, Any](), ""
    try:
        for name, value in found.items():
            if name not in readers:
                continue
            exact, reader = readers[name]
            # Fast path: most values have the exact type, and there may be millions of them.
            if type(value) is exact and (exact is not float or 0.0 <= found[name] < math.inf):
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
        raise ValueError(f"missing fields: {missing}") from None


class _Field(NamedTuple):
    """Reader of a field, and the type whose values ``read`` keeps without calling the reader,
    except for negative and non-finite numbers."""

    exact: type | None
    read: Read


@cache
def _readers(kind: Any) -> dict[str, _Field]:
    hints = typing.get_type_hints(kind)
    numbers = partial(real, least=-sys.float_info.max) if getattr(kind, "signed", False) else real
    found = {
        field.name: _Field(_PLAIN_TYPES.get(hints[field.name]), _reader(hints[field.name], numbers))
        for field in fields(kind)
    }
    for name, value in getattr(kind, "unneeded", {}).items():
        found[name] = _Field(found[name].exact, partial(_read_or, found[name].read, value))
    return found


def _read_or(read: Read, otherwise: Any, value: Any) -> Any:
    try:
        return read(value)
    except ValueError:
        return otherwise


def _reader(hint: Any, numbers: Read) -> Read:
    """Return the reader of a field's type. ``numbers`` reads floating-point numbers."""
    if isinstance(hint, types.UnionType):
        inner = _reader(next(one for one in hint.__args__ if one is not types.NoneType), numbers)
        return lambda value: None if value is None else inner(value)
    if hint is float:
        return numbers
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin = typing.get_origin(hint)
    if origin is tuple:
        one_of = _reader(typing.get_args(hint)[0], numbers)
        return lambda value: tuple(map(one_of, items(value)))
    if origin is not None:  # a mapping of names to numbers
        inner = _reader(typing.get_args(hint)[1], numbers)
        return lambda value: {string(name): inner(one) for name, one in mapping(value).items()}
    kind: type[Any] = hint
    if issubclass(kind, Enum):
        return _Values(kind)
    own: Read | None = getattr(kind, "from_json", None)
    return own or (lambda value: read(kind, value))


class _Values:
    """Function that returns the member of an enum with a given value, which must be a string."""

    def __init__(self, kind: type[Enum]) -> None:
        self._of = {one.value: one for one in kind}

    def __call__(self, value: object) -> Enum:
        found = self._of.get(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{_shown(value)} is not one of {', '.join(self._of)}")
        return found


_PLAIN_TYPES: dict[Any, type] = {
    str: str,
    str | None: str,
    bool: bool,
    float: float,
    float | None: float,
}
_PLAIN: dict[Any, Read] = {str: string, int: whole, bool: flag}


class JsonObject:
    """A dataclass that is written with every field, and with numbers and texts unchanged.

    Attributes:
        signed: True, so that numbers may be negative, except integers.
        renamed: names in JSON that are not valid names of Python fields, by field.
        unneeded: values, by field, for fields that are missing in the JSON or have another type.
            The program's own clients work without these fields.
    """

    __slots__ = ()
    signed: typing.ClassVar[bool] = True
    renamed: typing.ClassVar[Mapping[str, str]] = {}
    unneeded: typing.ClassVar[Mapping[str, Any]] = {}

    def to_json(self) -> Any:
        """Convert the object to values that the ``json`` module can write."""
        kind: Any = type(self)
        found = {}
        for field, name, is_plain in _names(kind):
            value = getattr(self, field)
            found[name] = value if is_plain else _unchanged(value)
        return found

    @classmethod
    def from_json(cls, found: object) -> typing.Self:
        """Create the object from values that the ``json`` module parsed.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        if isinstance(found, dict):
            for field, name in cls.renamed.items():
                if name not in found:
                    raise ValueError(f"missing field: {name}")
                found = {**found, field: found[name]}
            found = {**cls.unneeded, **found}
        return read(cls, found)


@cache
def _names(kind: Any) -> list[tuple[str, str, bool]]:
    """Return for each field its name, its name in JSON, and whether its values are written
    unchanged."""
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
