"""Calls of the CUDA runtime that torch does not expose, in the library that torch loaded.

The library is called through ctypes, because a batch of copies is then three arrays of numbers,
whereas bindings would require Python lists.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Numbers

BATCHES_SINCE = 13
"""First CUDA version whose cudaMemcpyBatchAsync has the signature used here. In 12.8, the signature
is different."""
REGISTER_FLAGS = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped: pinned for every device, and accessible to
kernels."""
KINDS = {Direction.LOAD: 1, Direction.SAVE: 2}  # cudaMemcpyHostToDevice, -DeviceToHost
STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
PREFER_OVERLAP = 1  # cudaMemcpyFlagPreferOverlapWithCompute


class CudaError(RuntimeError):
    """Failure of a call of the CUDA runtime."""


class MemLocation(Structure):
    """The C structure cudaMemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemcpyAttributes(Structure):
    """The C structure cudaMemcpyAttributes."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", MemLocation),
        ("target_hint", MemLocation),
        ("flags", c_uint),
    )


def cuda_major() -> int:
    """Return the major CUDA version with which torch was built."""
    import torch

    return int(torch.version.cuda.partition(".")[0])


class CudaRuntime:
    """Runtime library of CUDA version ``major``. Calls apply to the calling thread's device.

    Raises:
        OSError: the library is missing.
    """

    def __init__(self, major: int) -> None:
        # Loaded by name only, so that the loader returns the library that torch has loaded.
        self._library = ctypes.CDLL(f"libcudart.so.{major}")
        self.has_batches = major >= BATCHES_SINCE
        self._library.cudaGetErrorString.restype = c_char_p
        self._library.cudaHostRegister.argtypes = (c_void_p, c_size_t, c_uint)
        self._library.cudaHostUnregister.argtypes = (c_void_p,)
        self._library.cudaHostGetDevicePointer.argtypes = (POINTER(c_void_p), c_void_p, c_uint)
        self._library.cudaMemcpyAsync.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        if self.has_batches:
            self._library.cudaMemcpyBatchAsync.argtypes = (
                *(c_void_p, c_void_p, c_void_p, c_size_t),
                *(POINTER(MemcpyAttributes), POINTER(c_size_t), c_size_t, c_void_p),
            )

    def register(self, host: int, nbytes: int) -> None:
        """Pin memory of this process.

        Raises:
            CudaError: the memory cannot be pinned.
        """
        self._check(self._library.cudaHostRegister(host, nbytes, REGISTER_FLAGS))

    def unregister(self, host: int) -> None:
        """Undo :meth:`register`.

        Raises:
            CudaError: the memory was not registered.
        """
        self._check(self._library.cudaHostUnregister(host))

    def device_pointer(self, host: int) -> int:
        """Return the address at which kernels access registered host memory.

        Raises:
            CudaError: the memory is not registered.
        """
        pointer = c_void_p()
        self._check(self._library.cudaHostGetDevicePointer(byref(pointer), host, 0))
        return int(pointer.value or 0)

    def copy(self, direction: Direction, to: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue one copy.

        Raises:
            CudaError: the copy was not enqueued.
        """
        self._check(
            self._library.cudaMemcpyAsync(to, source, nbytes, KINDS[direction], stream or None)
        )

    def copy_batch(self, to: Numbers, source: Numbers, nbytes: Numbers, stream: int) -> None:
        """Enqueue copies in one call. The copies may run in any order.

        Args:
            to, source: addresses, int64 ``[copies]``, contiguous.
            nbytes: lengths, int64 ``[copies]``, contiguous.
            stream: any stream except the default stream.

        Raises:
            CudaError: some copies were not enqueued; others may have been.
        """
        # Sources are read in stream order, after earlier work has written them.
        attributes = MemcpyAttributes(source_order=STREAM_ORDER, flags=PREFER_OVERLAP)
        first = c_size_t(0)
        self._check(
            self._library.cudaMemcpyBatchAsync(
                to.ctypes.data,
                source.ctypes.data,
                nbytes.ctypes.data,
                len(nbytes),
                byref(attributes),
                byref(first),
                1,
                stream,
            )
        )

    def _check(self, error: int) -> None:
        if error == 0:
            return
        # Clear the runtime's last error, which torch would attribute to its next kernel.
        self._library.cudaGetLastError()
        raise CudaError(f"CUDA error {error}: {self._library.cudaGetErrorString(error).decode()}")
