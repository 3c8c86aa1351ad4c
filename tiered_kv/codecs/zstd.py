"""zstd frames, and the codec that stores a page as one frame.

There are two types of frame. Both are standard, so any zstd decoder can read them. ``compress``
finds matches and entropy-codes the rest. ``compress_symbols`` only entropy-codes, for planes whose
matches are random and not worth searching for. Each thread has its own zstd contexts. Compression
holds no locks, not even the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from .base import Bytes, CodecError, EncodedPage, PageFormat, refuse_table
from .raw import NOTHING

MAX_LEVEL = 22

MAX_WINDOW = 8 << 20
"""Maximum memory that a frame may make a decoder allocate for its window, bytes. Frames that are
decoded in one call, as all frames written here are, need no window. Only a damaged frame requests a
window."""

WINDOW_LOG = 18  # below 17, blocks shrink with it, and each block has its own code
LITERALS_MODE = 1002  # ZSTD_c_literalCompressionMode, "experimental" since 1.3.5
ALWAYS = 1  # ZSTD_ps_enable
MAX_STRIDE = 131072  # ZSTD_TARGETLENGTH_MAX

SymbolEncoder = Callable[[Bytes], Bytes]


class LiteralEncoder:
    """Encodes with zstd configured to find no matches: one Huffman code per block of 128 KiB.

    The fast strategy advances through its input in steps of ``targetLength``, and the longest step
    never finds a match. But zstd then leaves literals uncoded, unless a parameter is set that only
    the cffi half of ``zstandard`` exposes. This encoder is twice as fast as the closest equivalent
    with ordinary parameters, and its frames are faster to decode, because they have no sequences.

    Use from one thread at a time.

    Raises:
        ImportError: ``zstandard`` was built or installed without cffi.
        RuntimeError: zstd rejected a parameter.
    """

    def __init__(self) -> None:
        from zstandard import backend_cffi

        self._ffi: Any = backend_cffi.ffi  # type: ignore[attr-defined]
        self._lib: Any = backend_cffi.lib  # type: ignore[attr-defined]
        lib = self._lib
        self._context = self._ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
        for parameter, value in (
            (lib.ZSTD_c_strategy, lib.ZSTD_fast),
            (lib.ZSTD_c_windowLog, WINDOW_LOG),
            (lib.ZSTD_c_hashLog, 6),
            (lib.ZSTD_c_minMatch, 7),
            (lib.ZSTD_c_targetLength, MAX_STRIDE),
            (LITERALS_MODE, ALWAYS),
        ):
            self._checked(lib.ZSTD_CCtx_setParameter(self._context, parameter, value))
        self._buffer: Bytes = NOTHING

    def __call__(self, symbols: Bytes) -> Bytes:
        bound = self._lib.ZSTD_compressBound(symbols.nbytes)
        if self._buffer.nbytes < bound:
            self._buffer = np.empty(bound, dtype=np.uint8)
        to, source = self._ffi.from_buffer(self._buffer), self._ffi.from_buffer(symbols)
        size = self._lib.ZSTD_compress2(self._context, to, len(to), source, len(source))
        return self._buffer[: self._checked(size)].copy()

    def _checked(self, code: int) -> int:
        if self._lib.ZSTD_isError(code):
            reason = self._ffi.string(self._lib.ZSTD_getErrorName(code)).decode()
            raise RuntimeError(f"zstd failed: {reason}")
        return code


def plain_encoder() -> SymbolEncoder:
    """Create an encoder with ordinary parameters, whose table is so small that few matches are
    found."""
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=WINDOW_LOG,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return lambda symbols: np.frombuffer(compressor.compress(symbols.data), dtype=np.uint8)


def symbol_encoder() -> SymbolEncoder:
    """Create the faster encoder if it is available, otherwise the plain encoder."""
    try:
        return LiteralEncoder()
    except (ImportError, AttributeError, RuntimeError):  # no cffi, or an unexpected zstd version
        return plain_encoder()


class _Contexts(threading.local):
    """zstd contexts of a thread, created on first use."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._symbols: SymbolEncoder | None = None

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self._compressors:
            self._compressors[level] = zstandard.ZstdCompressor(level=level)
        return self._compressors[level]

    @property
    def symbols(self) -> SymbolEncoder:
        if self._symbols is None:
            self._symbols = symbol_encoder()
        return self._symbols


_contexts = _Contexts()


def compress(page: Bytes, level: int) -> Bytes:
    """Compress a page at a zstd level. Returns one frame, whose header has the content size."""
    return np.frombuffer(_contexts.compressor(level).compress(page.data), dtype=np.uint8)


def compress_symbols(symbols: Bytes) -> Bytes:
    """Compress symbols without searching for matches. Returns one frame, whose header has the
    content size."""
    return _contexts.symbols(symbols)


def decompress(frame: Bytes, out: Bytes) -> None:
    """Decompress a frame into ``out``. Bytes after the frame are ignored.

    Raises:
        CodecError: the data is not a frame of exactly ``out.nbytes`` bytes.
    """
    try:
        size = zstandard.get_frame_parameters(frame.data).content_size
        if size != out.nbytes:
            raise CodecError(
                f"the header of the zstd frame specifies {size} bytes instead of {out.nbytes}"
            )
        # Directly into ``out``: zstd sees that the whole frame fits, and allocates no window.
        filled = _contexts.decompressor.stream_reader(frame.data).readinto(out)
    except zstandard.ZstdError as error:
        raise CodecError(f"the zstd frame is damaged: {error}") from error
    if filled != out.nbytes:
        raise CodecError(f"the zstd frame ends after {filled} of {out.nbytes} decompressed bytes")


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """Stores the whole page in one frame, for pages of unknown type.

    Attributes:
        level: level, 1 to 22; pages written at one level can be read at any other.

    Raises:
        ValueError: the level is invalid.
    """

    page_format: PageFormat
    level: int = 1
    codec_id = 1
    table = b""
    wants_training = False
    stores_in_place = False

    def __post_init__(self) -> None:
        if not 1 <= self.level <= MAX_LEVEL:
            raise ValueError(f"zstd level {self.level} is not between 1 and {MAX_LEVEL}")

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> ZstdCodec:
        refuse_table(cls.codec_id, table)
        return cls(page_format)

    @property
    def name(self) -> str:
        return "zstd" if self.level == 1 else f"zstd:{self.level}"

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(NOTHING, compress(page, self.level))

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        if encoded.plane.nbytes:
            raise CodecError(
                f"the page has {encoded.plane.nbytes} raw bytes, but zstd pages have none"
            )
        decompress(encoded.frame, out)

    def trained(self, pages: list[Bytes]) -> ZstdCodec:
        return self
