"""Copies of runs between CPU buffers, at the speed of one large memcpy.

Pages are larger than caches and are not read again soon. So the target is written with non-temporal
stores, which bypass the caches and avoid reading the target first. memcpy uses such stores for
large copies only, not for runs of some KiB. While one run is copied, the first lines of the next
run are prefetched, because the hardware prefetcher cannot predict them.

The functions are compiled when the module is imported, and run without the interpreter lock. They
check nothing: the caller is responsible for valid addresses.
"""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .copy_plan import Numbers

VECTOR = 32
STRIP = 8 * VECTOR
AHEAD = 512
"""Number of bytes of the next run that are prefetched."""
LINE = 64
PAGE = 4096
"""Size of a memory page, bytes. One cache line of each memory page of the next run is prefetched
too, because the page walk takes longest."""

_BYTES = types.Array(types.uint8, 1, "C")
_SOURCE = types.Array(types.uint8, 1, "C", readonly=True)
_NUMBERS = types.Array(types.int64, 1, "C", readonly=True)


def _strips(typing: Any, to: Any, source: Any, strips: Any) -> Any:
    """Copy ``strips`` of ``STRIP`` bytes between addresses; ``to`` is aligned to ``VECTOR``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, strips = args
        vector = ir.VectorType(ir.IntType(64), VECTOR // 8)
        past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        def pointer(base: Any, strip: Any, i: int) -> Any:
            offset = builder.mul(strip, ir.Constant(strip.type, STRIP))
            offset = builder.add(offset, ir.Constant(strip.type, i * VECTOR))
            return builder.inttoptr(builder.add(base, offset), vector.as_pointer())

        with cgutils.for_range(builder, strips) as loop:
            indices = range(STRIP // VECTOR)
            held = [builder.load(pointer(source, loop.index, i), align=1) for i in indices]
            for i, value in zip(indices, held, strict=True):
                stored = builder.store(value, pointer(to, loop.index, i), align=VECTOR)
                stored.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _prefetch(typing: Any, address: Any) -> Any:
    """Prefetch a cache line without waiting. A load instruction would wait for the page walk, which
    a distant run requires."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, soon, data = 0, 3, 1
        settings = [ir.Constant(number, one) for one in (read, soon, data)]
        builder.call(function, [builder.inttoptr(args[0], pointer), *settings])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _fence(typing: Any) -> Any:
    """Order the non-temporal stores, which not even releasing a lock orders: a thread that observes
    the end of the copy must see its bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_copy_strips = intrinsic(_strips)
_fetch = intrinsic(_prefetch)
_order_stores = intrinsic(_fence)


def _copy(to: Any, to_at: Numbers, source: Any, source_at: Numbers, nbytes: Numbers) -> None:
    to_address, source_address = to.ctypes.data, source.ctypes.data
    for run in range(len(nbytes)):
        if run + 1 < len(nbytes):
            after = source_address + source_at[run + 1]
            for page in range(0, nbytes[run + 1], PAGE):
                _fetch(after + page)
            for line in range(0, min(AHEAD, nbytes[run + 1]), LINE):
                _fetch(after + line)
        a, b, n = to_at[run], source_at[run], nbytes[run]
        head = min(n, -(to_address + a) % VECTOR)
        for i in range(head):
            to[a + i] = source[b + i]
        strips = (n - head) // STRIP
        _copy_strips(to_address + a + head, source_address + b + head, strips)
        for i in range(head + strips * STRIP, n):
            to[a + i] = source[b + i]
    _order_stores()


_SIGNATURE = types.void(_BYTES, _NUMBERS, _SOURCE, _NUMBERS, _NUMBERS)
try:
    _compiled = numba.njit(_SIGNATURE, nogil=True, cache=True)(_copy)
except RuntimeError:  # the cache is not writable: compile in each process
    _compiled = numba.njit(_SIGNATURE, nogil=True)(_copy)


def copy_runs(
    to: NDArray[Any], to_at: Numbers, source: NDArray[Any], source_at: Numbers, nbytes: Numbers
) -> None:
    """Copy ``nbytes[i]`` bytes from ``source_at[i]`` of ``source`` to ``to_at[i]`` of ``to``.

    Args:
        to, source: uint8 ``[bytes]``, contiguous, that do not overlap.
        to_at, source_at, nbytes: int64 ``[runs]``; every run lies inside its array.
    """
    _compiled(to, to_at, source, source_at, nbytes)
