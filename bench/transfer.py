"""Speed of page copies between VRAM and CPU memory, relative to one contiguous copy of the same
size.

    python -m bench.transfer --json

Pages have the sizes of real models and are in random blocks and slots, so that only bytes within a
page are contiguous. ``d2h_fraction``, ``h2d_fraction`` and ``both_fraction`` (saves, loads, and
both concurrently) are the minimum over all shapes and layouts with at least 256 pages. Each row is
the median over rounds, in which the backend and contiguous copies between the same memories
alternate. A contiguous copy is as large as all pages of the row, or as the memory if they do not
fit, and runs on one thread, like the backend's copies. The time is measured from the first call
until the last byte is copied. Small batches, and the contiguous copies that are compared with them,
are repeated back to back.

``compute_slowdown``: time of bf16 matrix products of 8192³ during continuous copies of 256 pages,
over their time alone. It is the largest median over shapes, layouts and directions.

Without CUDA, the CPU backend is compared with memcpy, with fewer pages. ``fraction`` is the
smallest of the three fractions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, Tick, benchmark, run_benchmark
from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

TOKENS = 16
MATRIX, MATMULS = 8192, 100
COUNTS_FROM = 256
"""Minimum pages per batch for a row to be included in the reported fractions of the bandwidth."""
SAMPLE_BYTES = 64 << 20
"""Smaller batches are repeated until a sample has at least this size."""
WAYS = {
    "d2h": (Direction.SAVE,),
    "h2d": (Direction.LOAD,),
    "both": (Direction.SAVE, Direction.LOAD),
}
SHAPES = {
    "Llama-3.1-8B": (32, 2 * 8 * 128 * 2),
    "Llama-3.1-70B TP4": (80, 2 * 2 * 128 * 2),
    "Llama-3.1-70B TP8": (80, 2 * 1 * 128 * 2),
    "DeepSeek-V3 MLA": (61, 576 * 2),
}
"""Size of a token's KV on one rank, by model: number of layers, and bytes per layer."""
ORDERS = ("layers", "blocks")
"""Layouts of the engine's KV memory, by the outermost dimension."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of data to copy.

    Attributes:
        batches: numbers of pages per job.
        memory_bytes: size of the VRAM storage and of the pool, each. A batch that does not fit
            repeats pages.
        rounds: number of rounds.
    """

    batches: tuple[int, ...]
    memory_bytes: int
    rounds: int


GPU = Scale((1, 4, 16, 64, 256, 1024, 4096), 4 << 30, 5)
CPU = Scale((1, 4, 16, 64, 256), 512 << 20, 9)


def layout_of(shape: str, order: str, memory_bytes: int) -> PageLayout:
    """Return the layout of a model's pages, with as many blocks as fit into ``memory_bytes``."""
    layers, layer_bytes = SHAPES[shape]
    run = layer_bytes * TOKENS
    blocks = memory_bytes // (layers * run)
    strides = (blocks * run, run) if order == "layers" else (run, layers * run)
    return page_layout([Placement(layers, *strides, 0)], blocks)


class CpuSide:
    """The CPU backend, compared with memcpy: a storage of ``nbytes`` that stands in for VRAM, a
    pool of the same size, and a backend between them. Call ``use`` before any measurement.
    """

    name = "cpu"
    backend: TransferBackend
    pool: CpuPool

    def __init__(self, nbytes: int) -> None:
        self._used = ExitStack()
        self.close = self._used.close
        self.make_storage(nbytes)

    def make_storage(self, nbytes: int) -> None:
        """Allocate the storage."""
        self.storage: Any = AnonymousMemory(nbytes).view
        self.storage[:] = 1

    def use(self, layout: PageLayout) -> None:
        """Create the pool and the backend for a layout, in place of any earlier ones."""
        self.close()
        self.pool = self.make_pool(layout.num_blocks, layout.page_bytes)
        self._used.callback(self.pool.close)
        self.pool.slots[:] = 1
        self.backend = self.make_backend(layout, self.pool)
        self._used.callback(self.backend.close)

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        """Return a new pool."""
        return CpuPool(AnonymousMemory(slots * page_bytes), page_bytes)

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        """Return a new backend between the storage and a pool."""
        return CpuTransfer([layout], self.storage, pool)

    def seconds(self, jobs: Sequence[CopyJob]) -> float:
        """Run copy jobs. Returns the time from the first call until the last byte is copied,
        seconds.

        Raises:
            RuntimeError: a page was not copied.
        """
        began = time.perf_counter()
        for job in jobs:
            self.backend.submit(job)
        self.backend.drain()
        seconds = time.perf_counter() - began
        if any(result.failed for result in self.backend.poll()):
            raise RuntimeError("pages were not copied")
        return seconds

    def one_copy_s(self, way: str, nbytes: int, times: int) -> float:
        """Return the time of ``times`` contiguous copies of ``nbytes``, seconds. If ``way`` has
        both directions, each direction copies half of the bytes.
        """
        pool = self.flat_pool()
        half = nbytes // len(WAYS[way])
        began = time.perf_counter()
        for _ in range(times):
            for i, direction in enumerate(WAYS[way]):
                vram, host = (memory[i * half : (i + 1) * half] for memory in (self.storage, pool))
                self.copy(*((host, vram) if direction is Direction.SAVE else (vram, host)), i)
        self.synchronize()
        return time.perf_counter() - began

    def flat_pool(self) -> Any:
        """Return the pool as one array. Call only while no copy is in flight."""
        return self.pool.slots.reshape(-1)

    def copy(self, to: Any, source: Any, stream: int) -> None:
        """Make one contiguous copy.

        Args:
            stream: index of the CUDA stream; unused on the CPU.
        """
        np.copyto(to, source)

    def synchronize(self) -> None:
        """Wait for all copies. On the CPU, ``copy`` returns only when its copy has finished."""

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """Return the time of matrix products during continuous copies, over their time alone; None
        without a GPU.
        """
        return None


class CudaSide(CpuSide):
    """The CUDA backend, compared with one contiguous copy. The storage is in VRAM, and the pool is
    pinned.

    Args:
        by: value of a :class:`~tiered_kv.transfer.cuda.backend.CopyBy`.
    """

    def __init__(self, nbytes: int, by: str) -> None:
        import torch

        from tiered_kv.transfer.cuda.backend import CopyBy

        self._torch = torch
        self._by = CopyBy(by)
        self._streams = [torch.cuda.Stream() for _ in Direction]
        self._matrices = [
            torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2)
        ]
        self.name = torch.cuda.get_device_name()
        super().__init__(nbytes)

    def make_storage(self, nbytes: int) -> None:
        """Allocate the storage."""
        self.storage = self._torch.zeros(nbytes, dtype=self._torch.uint8, device="cuda")

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        """Return a new pool in pinned memory.

        Raises:
            RuntimeError: memory cannot be pinned.
        """
        pool = CpuPool(pinned(AnonymousMemory(slots * page_bytes)), page_bytes)
        if not pool.pinned:
            raise RuntimeError("memory cannot be pinned: raise the memlock limit (ulimit -l)")
        return pool

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        """Return a new backend between the storage and a pool."""
        from tiered_kv.transfer.cuda.backend import CudaTransfer

        return CudaTransfer([layout], self.storage, pool, self._by)

    def flat_pool(self) -> Any:
        """Return the pool as one array. Call only while no copy is in flight."""
        pool = self._torch.from_numpy(super().flat_pool())
        self.synchronize()
        return pool

    def copy(self, to: Any, source: Any, stream: int) -> None:
        """Start one contiguous copy on the CUDA stream with index ``stream``."""
        with self._torch.cuda.stream(self._streams[stream]):
            to.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._torch.cuda.synchronize()

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """Return the time of matrix products during continuous copies, over their time alone.

        Raises:
            RuntimeError: no copy finished during the products.
        """
        alone = self._matmuls_s(lambda: None)
        running = finished = 0

        def keep_copying() -> None:
            """Submit copies on another stream, as for another request, so that they do not wait for
            the matrix products.
            """
            nonlocal running, finished
            done = len(self.backend.poll())
            finished += done
            running -= done
            while running < 2 * len(jobs):
                with self._torch.cuda.stream(self._streams[0]):
                    for job in jobs:
                        self.backend.submit(job)
                running += len(jobs)

        keep_copying()
        together = self._matmuls_s(keep_copying)
        self.seconds([])
        if not finished:
            raise RuntimeError("the matrix products finished before a single copy did")
        return together / alone

    def _matmuls_s(self, meanwhile: Callable[[], None]) -> float:
        began, done = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(MATMULS):
            self._matrices[0] @ self._matrices[1]
        done.record()
        while not done.query():
            meanwhile()
        return float(began.elapsed_time(done)) / 1e3


def jobs_of(way: str, pages: int, there: int) -> list[CopyJob]:
    """Return a copy job for each direction of ``way``, with random blocks and slots.

    With both directions, saves and loads each get half of the blocks and slots, because no job may
    read memory that another job writes.

    Args:
        pages: number of pages per job.
        there: number of blocks and of slots.
    """
    rng, share = np.random.default_rng(0), there // len(WAYS[way])
    jobs = []
    for i, direction in enumerate(WAYS[way]):
        blocks, slots = (rng.permutation(share) + i * share for _ in range(2))
        named = np.resize(blocks, pages).tolist(), np.resize(slots, pages).tolist()
        jobs.append(CopyJob(i, direction, *named))
    return jobs


def measure_row(
    side: CpuSide, layout: PageLayout, way: str, pages: int, rounds: int
) -> dict[str, float]:
    """Return GB/s of pages, GB/s of contiguous copies, and their ratio, as medians over rounds."""
    jobs = jobs_of(way, pages, layout.num_blocks)
    nbytes = layout.page_bytes * pages * len(jobs)
    repeats = -(-SAMPLE_BYTES // nbytes)
    span = min(nbytes, layout.page_bytes * layout.num_blocks)
    copies = nbytes * repeats // span
    side.seconds(jobs)
    side.one_copy_s(way, span, 1)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(nbytes * repeats / side.seconds(jobs * repeats) / 1e9)
        theirs.append(span * copies / side.one_copy_s(way, span, copies) / 1e9)
    return {
        "gbs": statistics.median(ours),
        "one_copy_gbs": statistics.median(theirs),
        "fraction": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def measure(side: CpuSide, scale: Scale, tick: Tick) -> dict[str, Any]:
    """Measure all rows and, with a GPU, the slowdown for each shape, layout and direction."""
    rows, slowdowns = list[dict[str, Any]](), list[dict[str, Any]]()
    for shape in SHAPES:
        for order in ORDERS:
            layout, where = layout_of(shape, order, scale.memory_bytes), (shape, order)
            side.use(layout)
            for pages in scale.batches:
                for way in WAYS:
                    figures = measure_row(side, layout, way, pages, scale.rounds)
                    about = {"page_kib": layout.page_bytes / 1024, "pages": pages, "way": way}
                    rows.append({"shape": shape, "outermost": order, **about, **figures})
                tick(", ".join(where))
            for way in WAYS:
                jobs = jobs_of(way, COUNTS_FROM, layout.num_blocks)
                seen = [side.slowdown(jobs) for _ in range(scale.rounds)]
                if known := [one for one in seen if one is not None]:
                    slowdown = statistics.median(known)
                    about = {"shape": shape, "outermost": order, "way": way}
                    slowdowns.append({**about, "slowdown": slowdown})
    side.close()
    return {
        **worst(rows),
        "compute_slowdown": max((one["slowdown"] for one in slowdowns), default=None),
        "on": side.name,
        "rounds": scale.rounds,
        "rows": rows,
        "slowdowns": slowdowns,
    }


def worst(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the smallest fraction of each direction, and of all directions, over the rows with at
    least ``COUNTS_FROM`` pages.
    """
    counted = [row for row in rows if row["pages"] >= COUNTS_FROM]
    least = {way: min(row["fraction"] for row in counted if row["way"] == way) for way in WAYS}
    fractions = {f"{way}_fraction": fraction for way, fraction in least.items()}
    return {**fractions, "fraction": min(least.values())}


def main(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use the CPU backend, even with a GPU.")
    ] = False,
    by: Annotated[
        Literal["faster", "staged", "runs"],
        typer.Option(
            help="Copy method on a GPU: through a buffer, one copy per run, or the faster one."
        ),
    ] = "faster",
    as_json: AsJson = False,
) -> None:
    """Measure the speed of page copies."""
    scale = GPU if not cpu and _has_cuda() else CPU
    steps = len(SHAPES) * len(ORDERS) * len(scale.batches)
    with benchmark("Pages between VRAM and CPU memory", steps, as_json=as_json) as run:
        size = scale.memory_bytes
        side = CudaSide(size, by) if scale is GPU else CpuSide(size)
        run.result = measure(side, scale, run.tick)


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    run_benchmark(main, __doc__)
