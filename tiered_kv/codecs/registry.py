"""Codecs by name, as in ``TIERED_KV_CODEC``, and by the number and table in a segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, cast

from tiered_kv.errors import ConfigError
from tiered_kv.plugins import load

from .base import Codec, CodecClass, CodecError, PageFormat
from .centred import CentredCodec
from .out_of_tree import OUT_OF_TREE_ID, OutOfTreeCodec, split_table
from .raw import RawCodec
from .sections import SectionsCodec
from .zstd import MAX_LEVEL, ZstdCodec

CodecMaker: TypeAlias = Callable[[PageFormat], Codec]
"""Creates an untrained codec; raises ValueError for unsupported pages."""


class UnknownCodecError(CodecError):
    """A codec that is not available here. Its pages may be intact."""


@dataclass(frozen=True, slots=True)
class CodecKind:
    """A codec of this package.

    Attributes:
        cls: class of the codec.
        at_level: creates the codec with a level, which follows the name as in ``zstd:3``; None
            if it has no levels.
        levels: the valid levels.
        mixed: class for pages whose elements have several types; None if ``cls`` supports them.
    """

    cls: CodecClass
    at_level: Callable[[PageFormat, int], Codec] | None = None
    levels: range = range(0)
    mixed: CodecClass | None = None

    @property
    def classes(self) -> list[CodecClass]:
        """Return all classes of the codec."""
        return [self.cls] if self.mixed is None else [self.cls, self.mixed]

    def make(self, page_format: PageFormat) -> Codec:
        """Create an untrained codec.

        Raises:
            ValueError: the codec does not support this format.
        """
        cls = self.mixed if self.mixed is not None and page_format.mixed else self.cls
        return cls(page_format)


CODECS: Mapping[str, CodecKind] = MappingProxyType(
    {
        "raw": CodecKind(RawCodec),
        "zstd": CodecKind(ZstdCodec, ZstdCodec, range(1, MAX_LEVEL + 1)),
        "centred": CodecKind(CentredCodec, mixed=SectionsCodec),
    }
)
"""The codecs of this package by name."""


def parse(name: str) -> CodecMaker:
    """Return the function that creates the codec with that name for a page format.

    Args:
        name: a name in ``CODECS``, with ``:LEVEL`` if it has levels, or ``module:Class``.

    Raises:
        ConfigError: there is no such codec or level, or the class cannot be imported or used.
    """
    head, colon, rest = name.partition(":")
    kind = CODECS.get(head)
    if kind is None and colon and head and rest:
        cls = _load(name)
        return lambda page_format: OutOfTreeCodec(name, cls(page_format))
    if kind is not None and not colon:
        return kind.make
    at_level = kind.at_level if kind is not None else None
    if kind is None or at_level is None or not (rest.isascii() and rest.isdigit()):
        raise ConfigError(
            f"{name!r} is not a known codec: set {', '.join(_spellings())}, or your own "
            "module:Class"
        )
    level = int(rest)
    if level not in kind.levels:
        raise ConfigError(
            f"{head} has no level {level}: set a level from {head}:{kind.levels[0]} to "
            f"{head}:{kind.levels[-1]}, or {head} for its default level"
        )
    return lambda page_format: at_level(page_format, level)


def _spellings() -> list[str]:
    spellings = []
    for name, kind in CODECS.items():
        spellings.append(name)
        if kind.levels:
            spellings.append(f"{name}:LEVEL ({kind.levels[0]} to {kind.levels[-1]})")
    return spellings


def _load(name: str) -> CodecClass:
    known: Mapping[str, CodecClass] = {}
    return cast("CodecClass", load("codec", name, known, Codec, CodecClass))


def from_table(codec_id: int, table: bytes, page_format: PageFormat, trusted: str = "") -> Codec:
    """Create the codec that wrote a segment's pages, from the segment's header.

    Args:
        codec_id: number of the codec in the header.
        table: codec table in the header.
        trusted: name of the only codec from another package that may be imported. A class name in a
            file is not a sufficient reason to run its code.

    Raises:
        UnknownCodecError: the codec is from another package, and either not the trusted one or
            not available.
        CodecError: the number is unknown, or the table does not fit the codec and these pages.
    """
    if codec_id == OUT_OF_TREE_ID:
        return _stored_out_of_tree(table, page_format, trusted)
    for cls in (cls for kind in CODECS.values() for cls in kind.classes):
        if cls.codec_id == codec_id:
            return cls.from_table(page_format, table)
    raise CodecError(f"codec {codec_id} is unknown")


def _stored_out_of_tree(table: bytes, page_format: PageFormat, trusted: str) -> Codec:
    name, own_table = split_table(table)
    if name != trusted:
        raise UnknownCodecError(f"the pages can be read only with TIERED_KV_CODEC={name}")
    try:
        cls = _load(name)
    except ConfigError as error:
        raise UnknownCodecError(str(error)) from error
    return OutOfTreeCodec(name, cls.from_table(page_format, own_table))


def codec_name(codec_id: int, table: bytes) -> str:
    """Return the name of a segment's codec, which need not be available; its number if the name is
    unknown."""
    for name, kind in CODECS.items():
        if any(cls.codec_id == codec_id for cls in kind.classes):
            return name
    try:
        return split_table(table)[0] if codec_id == OUT_OF_TREE_ID else f"codec {codec_id}"
    except CodecError:
        return f"codec {codec_id}"
