"""The definitions of CUDA runtime calls in ctypes, compared with CUDA's headers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tiered_kv.transfer.base import Direction


@pytest.fixture
def nvcc() -> str:
    """The compiler of CUDA 13, whose headers define all types that the test uses."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    said = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)
    if "release 13" not in said.stdout:
        pytest.skip("needs nvcc of CUDA 13")
    return compiler


CALLS = """
#include <cuda_runtime_api.h>
#include <cstddef>
static_assert(sizeof(cudaMemLocation) == {location}, "");
static_assert(sizeof(cudaMemcpyAttributes) == {attributes}, "");
static_assert(offsetof(cudaMemcpyAttributes, srcLocHint) == {source_hint}, "");
static_assert(offsetof(cudaMemcpyAttributes, flags) == {flags}, "");
static_assert(cudaMemcpySrcAccessOrderStream == {order}, "");
static_assert(cudaMemcpyFlagPreferOverlapWithCompute == {overlap}, "");
static_assert(cudaMemcpyHostToDevice == {load} && cudaMemcpyDeviceToHost == {save}, "");
static_assert((cudaHostRegisterPortable | cudaHostRegisterMapped) == {register}, "");
cudaError_t (*batch)(void *const *, const void *const *, const size_t *, size_t,
    cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t) = cudaMemcpyBatchAsync;
cudaError_t (*copy)(void *, const void *, size_t, cudaMemcpyKind, cudaStream_t) = cudaMemcpyAsync;
cudaError_t (*pointer)(void **, void *, unsigned) = cudaHostGetDevicePointer;
cudaError_t (*pin)(void *, size_t, unsigned) = cudaHostRegister;
cudaError_t (*unpin)(void *) = cudaHostUnregister;
"""


def test_structures_and_constants_match_the_cuda_headers(nvcc: str, tmp_path: Path) -> None:
    """ctypes does not check definitions, so the compiler compares them with the headers of CUDA
    13."""
    from tiered_kv.transfer.cuda import runtime as cudart

    source = tmp_path / "calls.cu"
    attributes = cudart.MemcpyAttributes
    source.write_text(
        CALLS.format(
            location=ctypes.sizeof(cudart.MemLocation),
            attributes=ctypes.sizeof(attributes),
            source_hint=attributes.source_hint.offset,
            flags=attributes.flags.offset,
            order=cudart.STREAM_ORDER,
            overlap=cudart.PREFER_OVERLAP,
            load=cudart.KINDS[Direction.LOAD],
            save=cudart.KINDS[Direction.SAVE],
            register=cudart.REGISTER_FLAGS,
        )
    )
    done = subprocess.run(
        [nvcc, "-std=c++17", "-c", "-o", str(tmp_path / "calls.o"), str(source)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
