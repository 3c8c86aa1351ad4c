"""The source of the CUDA kernel: run on the CPU, thread by thread, and compiled for GPUs.

Whether it is right about bytes is found out here; whether it is fast, and what only a GPU does
(caches, visibility, streams), in tests/gpu and bench.transfer.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.page_layouts import Move, moves
from tiered_kv.layout import PageLayout, Region
from tiered_kv.testing.conformance.transfer import Bytes
from tiered_kv.transfer.base import CopyJob, Direction
from tiered_kv.transfer.copy_plan import cut, page_runs

HERE = Path(__file__).parent
KERNEL = HERE.parents[2] / "tiered_kv" / "transfer" / "cuda" / "page_kernel.cu"


class Counts(ctypes.Structure):
    _fields_ = (
        ("misaligned", ctypes.c_longlong),
        ("outside", ctypes.c_longlong),
        ("written", ctypes.c_longlong),
    )


Run = Callable[..., Counts]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The kernel as a function of a CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("kernel") / "page_kernel.so"
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"),
            *("-fPIC", "-shared", f'-DPAGE_KERNEL="{KERNEL}"'),
            *("-o", str(library), str(HERE / "page_kernel_shim.cpp")),
        ],
        check=True,
    )
    function = ctypes.CDLL(str(library)).run
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong
    function.restype = Counts
    function.argtypes = (
        *(ctypes.c_uint, ctypes.c_uint, pointer, size, pointer, size),
        *(pointer, pointer, number, pointer, number, number, ctypes.c_int),
    )
    made: Run = function
    return made


def launch(
    run: Run, move: Move, piece_bytes: int, grid: tuple[int, int], lead: int
) -> tuple[Counts, Bytes, Bytes]:
    """Memories after the kernel's job; ``lead`` bytes lie before each."""
    storage, slab = (aligned(memory.reshape(-1), lead) for memory in (move.storage, move.slab))
    pieces = cut(page_runs(move.layout, move.layout.page_bytes), piece_bytes)
    table = np.stack([pieces.offset, pieces.stride, pieces.start, pieces.nbytes], axis=1)
    blocks, slots = (np.array(those, dtype=np.int64) for those in (move.job.blocks, move.job.slots))
    counts = run(
        *grid,
        *(storage.ctypes.data, storage.nbytes, slab.ctypes.data, slab.nbytes),
        *(blocks.ctypes.data, slots.ctypes.data, len(blocks)),
        *(table.ctypes.data, len(table), move.layout.page_bytes),
        move.job.direction is Direction.SAVE,
    )
    return counts, storage, slab.reshape(move.slab.shape)


def aligned(content: Bytes, lead: int) -> Bytes:
    """A copy that begins ``lead`` bytes behind a multiple of 256, as VRAM does behind none."""
    room = np.empty(content.nbytes + 512, dtype=np.uint8)
    start = -room.ctypes.data % 256 + lead
    room[start : start + content.nbytes] = content
    return room[start : start + content.nbytes]


@given(
    moves(longest=9000),
    st.sampled_from([64, 4096, 8192]),
    st.sampled_from([(1, 32), (2, 64), (3, 96)]),
    st.sampled_from([0, 0, 8, 4, 1]),
)
def test_the_kernel_moves_every_byte_once_and_touches_no_other(
    run: Run, move: Move, piece_bytes: int, grid: tuple[int, int], lead: int
) -> None:
    counts, storage, slab = launch(run, move, piece_bytes, grid, lead)

    assert np.array_equal(storage, move.moved[0])
    assert np.array_equal(slab, move.moved[1])
    assert (counts.misaligned, counts.outside) == (0, 0)
    assert counts.written == move.nbytes


@pytest.mark.parametrize("word", [1, 4, 8, 16])
def test_runs_of_every_length_end_where_they_end(run: Run, word: int) -> None:
    """The turns of the loops: whole rounds of words, single words, and the bytes behind."""
    rng = np.random.default_rng(word)
    for nbytes in range(word, 300 * word):
        stride = -(-nbytes // word) * word
        layout = PageLayout((Region(0, 1, 0, stride, nbytes),), 3)
        storage = rng.integers(0, 256, layout.storage_bytes, dtype=np.uint8)
        slab = np.zeros((1, nbytes), dtype=np.uint8)
        page = storage[stride : stride + nbytes]
        job = CopyJob(1, Direction.SAVE, (1,), (0,))
        move = Move(layout, job, storage, slab, (storage, page.reshape(1, -1)))

        counts, _, saved = launch(run, move, 8192, (1, 32), 0)

        assert np.array_equal(saved, move.moved[1])
        assert (counts.misaligned, counts.outside, counts.written) == (0, 0, nbytes)


@pytest.fixture
def nvcc() -> str:
    """The compiler of CUDA 13, which knows all that is asked of it here."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    said = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)
    if "release 13" not in said.stdout:
        pytest.skip("needs nvcc of CUDA 13")
    return compiler


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_the_kernel_compiles_for_gpus_without_spilling(
    nvcc: str, architecture: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(nvcc, "-std=c++17", f"-arch={architecture}", "-cubin", "-Werror=all-warnings"),
            *("-Xptxas=-v", "-o", str(tmp_path / "kernel.cubin"), str(KERNEL)),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


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


def test_structures_and_numbers_are_those_of_the_cuda_headers(nvcc: str, tmp_path: Path) -> None:
    """ctypes believes whatever it is told: here the compiler compares it with CUDA 13."""
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
