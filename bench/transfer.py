"""Speed of pages between VRAM and CPU memory, over one contiguous copy of as many bytes.

    python -m bench.transfer --json

Pages of real models, in blocks and slots drawn at random, so that nothing is contiguous except what
the layout makes so. ``d2h_fraction``, ``h2d_fraction`` and ``both_fraction`` (saves, loads, and
both concurrently) are the least over all shapes and layouts from 256 pages on. Each row is the
median of its rounds, in which the backend and contiguous copies between the same memories take
turns. A copy is as large as all pages of the row, or as the memory if they do not fit, and on one
thread, as the backend's. Seconds are those of the caller: from the first call until the last byte
is copied. Small batches, and their copies, are submitted back to back.

``compute_slowdown``: seconds of bf16 matrix products of 8192³ while copies of 256 pages follow each
other, over their seconds alone; the worst median over shapes, layouts and ways.

Without CUDA the CPU backend runs beside memcpy, with fewer pages. ``fraction`` is the least of the
three fractions.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Literal

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, benchmark, run_benchmark
from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

TOKENS = 16
MATRIX, MATMULS = 8192, 100
COUNTS_FROM = 256
"""Pages of a batch, from which on fractions count."""
SAMPLE_BYTES = 64 << 20
"""Smaller batches are repeated until a sample has so many."""

Tick = Callable[[str], None]


class Way(Enum):
    """Direction of a copy."""

    D2H = "d2h"
    H2D = "h2d"
    BOTH = "both"

    @property
    def directions(self) -> tuple[Direction, ...]:
        return {
            Way.D2H: (Direction.SAVE,),
            Way.H2D: (Direction.LOAD,),
            Way.BOTH: (Direction.SAVE, Direction.LOAD),
        }[self]


class Side(ABC):
    """A storage and a pool of ``nbytes`` each, and a backend between them: VRAM and pinned memory
    on a GPU, two pieces of CPU memory without one. Call ``use`` before anything else."""

    name: str
    backend: TransferBackend | None = None
    pool: CpuPool | None = None

    def use(self, layout: PageLayout, slots: int) -> None:
        """Create the backend for a layout."""
        if self.pool is not None and self.pool.slots.shape == (slots, layout.page_bytes):
            self._close_backend()  # pinning takes seconds: the pool is kept where it fits
        else:
            self.close()
            self.pool = self.make_pool(slots, layout.page_bytes)
            self.pool.slots[:] = 1
        self.backend = self.make_backend(layout, self.pool)

    @abstractmethod
    def make_pool(self, slots: int, page_bytes: int) -> CpuPool: ...

    @abstractmethod
    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend: ...

    def seconds(self, jobs: Sequence[CopyJob]) -> float:
        """Seconds from the first call until the last byte is copied.

        Raises:
            RuntimeError: a page was not copied.
        """
        assert self.backend is not None
        began = time.perf_counter()
        for job in jobs:
            self.backend.submit(job)
        self.backend.drain()
        seconds = time.perf_counter() - began
        if any(result.failed for result in self.backend.poll()):
            raise RuntimeError("pages were not copied")
        return seconds

    @abstractmethod
    def one_copy_s(self, way: Way, nbytes: int, times: int) -> float:
        """Seconds of a contiguous copy of ``nbytes``, made that many times; for both ways, of half
        as much each."""

    @abstractmethod
    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """Seconds of matrix products while these copies are made again and again, over their
        seconds alone; None without a GPU."""

    def _close_backend(self) -> None:
        if self.backend is not None:
            self.backend.close()
            self.backend = None

    def close(self) -> None:
        self._close_backend()
        if self.pool is not None:
            self.pool.close()
            self.pool = None


class CpuSide(Side):
    """The CPU backend beside memcpy."""

    name = "cpu"

    def __init__(self, nbytes: int) -> None:
        self._bytes = AnonymousMemory(nbytes).view
        self._bytes[:] = 1

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        return CpuPool(AnonymousMemory(slots * page_bytes), page_bytes)

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        return CpuTransfer([layout], self._bytes, pool)

    def one_copy_s(self, way: Way, nbytes: int, times: int) -> float:
        assert self.pool is not None
        slab = self.pool.slots.reshape(-1)
        half = nbytes // len(way.directions)
        began = time.perf_counter()
        for _ in range(times):
            for i, direction in enumerate(way.directions):
                vram, host = (memory[i * half : (i + 1) * half] for memory in (self._bytes, slab))
                np.copyto(*((host, vram) if direction is Direction.SAVE else (vram, host)))
        return time.perf_counter() - began

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        return None


class CudaSide(Side):
    """The CUDA backend beside one pinned copy.

    Args:
        by: a :class:`~tiered_kv.transfer.cuda.backend.CopyBy`'s value.
    """

    def __init__(self, nbytes: int, by: str) -> None:
        import torch

        from tiered_kv.transfer.cuda.backend import CopyBy

        self._torch = torch
        self._by = CopyBy(by)
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self._streams = [torch.cuda.Stream() for _ in Direction]
        self._matrices = [
            torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2)
        ]
        self.name = torch.cuda.get_device_name()

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        pool = CpuPool(pinned(AnonymousMemory(slots * page_bytes)), page_bytes)
        if not pool.pinned:
            raise RuntimeError("memory cannot be pinned here: raise the memlock limit")
        return pool

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        from tiered_kv.transfer.cuda.backend import CudaTransfer

        return CudaTransfer([layout], self._bytes, pool, self._by)

    def one_copy_s(self, way: Way, nbytes: int, times: int) -> float:
        assert self.pool is not None
        torch = self._torch
        slab = torch.from_numpy(self.pool.slots.reshape(-1))
        torch.cuda.synchronize()
        half = nbytes // len(way.directions)
        began = time.perf_counter()
        for _ in range(times):
            for i, direction in enumerate(way.directions):
                vram, host = (memory[i * half : (i + 1) * half] for memory in (self._bytes, slab))
                with torch.cuda.stream(self._streams[i]):
                    if direction is Direction.SAVE:
                        host.copy_(vram, non_blocking=True)
                    else:
                        vram.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """See the base class.

        Raises:
            RuntimeError: not one copy was made meanwhile.
        """
        alone = self._matmuls_s(lambda: None)
        running = finished = 0

        def keep_copying() -> None:
            """Submit copies as for another request: they do not wait for these products."""
            nonlocal running, finished
            assert self.backend is not None
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
        torch = self._torch
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(MATMULS):
            self._matrices[0] @ self._matrices[1]
        done.record()
        while not done.query():
            meanwhile()
        return float(began.elapsed_time(done)) / 1e3


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of a token that one rank keeps.

    Attributes:
        layer_bytes: of one token in one layer.
    """

    name: str
    layers: int
    layer_bytes: int

    def layout(self, order: str, num_blocks: int) -> PageLayout:
        run = self.layer_bytes * TOKENS
        if order == "layers":
            place = Placement(self.layers, num_blocks * run, run, 0)
        else:
            place = Placement(self.layers, run, self.layers * run, 0)
        return page_layout([place], num_blocks)


SHAPES = [
    Shape("Llama-3.1-8B", 32, 2 * 8 * 128 * 2),
    Shape("Llama-3.1-70B TP4", 80, 2 * 2 * 128 * 2),
    Shape("Llama-3.1-70B TP8", 80, 2 * 1 * 128 * 2),
    Shape("DeepSeek-V3 MLA", 61, 576 * 2),
]
ORDERS = ["layers", "blocks"]
"""Orders of the engine's allocation: what lies outermost."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount that is copied.

    Attributes:
        batches: pages of a job.
        memory_bytes: of the storage, and of the pool. Batches that do not fit name their
            pages several times.
    """

    batches: tuple[int, ...]
    memory_bytes: int
    rounds: int


GPU = Scale((1, 4, 16, 64, 256, 1024, 4096), 4 << 30, 5)
CPU = Scale((1, 4, 16, 64, 256), 512 << 20, 9)


@dataclass(frozen=True, slots=True)
class Row:
    """One shape, layout, batch and way; medians of the rounds."""

    shape: str
    outermost: str
    page_kib: float
    pages: int
    way: str
    gbs: float
    one_copy_gbs: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Slowdown of matrix products by copies; median of the rounds."""

    shape: str
    outermost: str
    way: str
    slowdown: float


def jobs_of(way: Way, pages: int, there: int, rng: np.random.Generator) -> list[CopyJob]:
    """A job for each direction, of random blocks and slots out of ``there``. For both ways, saves
    and loads get half of the blocks and slots each: no job may read what another writes."""
    jobs = []
    share = there // len(way.directions)
    for i, direction in enumerate(way.directions):
        blocks, slots = (rng.permutation(share) + i * share for _ in range(2))
        jobs.append(
            CopyJob(
                i, direction, np.resize(blocks, pages).tolist(), np.resize(slots, pages).tolist()
            )
        )
    return jobs


def measure_row(
    side: Side, layout: PageLayout, way: Way, pages: int, rounds: int
) -> tuple[float, float, float]:
    """Our GB/s, those of contiguous copies, and ours over theirs."""
    there = layout.num_blocks
    jobs = jobs_of(way, pages, there, np.random.default_rng(0))
    nbytes = layout.page_bytes * pages * len(jobs)
    repeats = -(-SAMPLE_BYTES // nbytes)
    span = min(nbytes, layout.page_bytes * there)
    copies = nbytes * repeats // span
    side.seconds(jobs)
    side.one_copy_s(way, span, 1)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(nbytes * repeats / side.seconds(jobs * repeats) / 1e9)
        theirs.append(span * copies / side.one_copy_s(way, span, copies) / 1e9)
    fraction = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), fraction


def layouts(scale: Scale) -> Iterator[tuple[Shape, str, PageLayout]]:
    for shape in SHAPES:
        there = scale.memory_bytes // (shape.layers * shape.layer_bytes * TOKENS)
        for order in ORDERS:
            yield shape, order, shape.layout(order, there)


def measure(side: Side, scale: Scale, tick: Tick) -> tuple[list[Row], list[Slowdown]]:
    """All rows, and the slowdown by each shape and layout; none without a GPU."""
    rows, slowdowns = [], []
    for shape, order, layout in layouts(scale):
        side.use(layout, layout.num_blocks)
        for pages in scale.batches:
            for way in Way:
                figures = measure_row(side, layout, way, pages, scale.rounds)
                kib = layout.page_bytes / 1024
                rows.append(Row(shape.name, order, kib, pages, way.value, *figures))
            tick(f"{shape.name}, {order}")
        for way in Way:
            jobs = jobs_of(way, COUNTS_FROM, layout.num_blocks, np.random.default_rng(0))
            seen = [side.slowdown(jobs) for _ in range(scale.rounds)]
            known = [one for one in seen if one is not None]
            if known:
                slowdown = statistics.median(known)
                slowdowns.append(Slowdown(shape.name, order, way.value, slowdown))
    side.close()
    return rows, slowdowns


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The least fraction of each way."""
    least = {
        f"{way.value}_fraction": min(
            row.fraction for row in rows if row.way == way.value and row.pages >= COUNTS_FROM
        )
        for way in Way
    }
    return {**least, "fraction": min(least.values())}


def main(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use the CPU backend, even with a GPU.")
    ] = False,
    by: Annotated[
        Literal["faster", "staged", "runs"], typer.Option(help="Copies on a GPU.")
    ] = "faster",
    as_json: AsJson = False,
) -> None:
    """Measure copies of pages."""
    scale = GPU if not cpu and _has_cuda() else CPU
    steps = len(SHAPES) * len(ORDERS) * len(scale.batches)
    with benchmark("Pages between VRAM and CPU memory", steps, as_json=as_json) as run:
        size = scale.memory_bytes
        side = CudaSide(size, by) if scale is GPU else CpuSide(size)
        rows, slowdowns = measure(side, scale, run.tick)
        run.result = {
            **summary(rows),
            "compute_slowdown": max((one.slowdown for one in slowdowns), default=None),
            "on": side.name,
            "rounds": scale.rounds,
            "rows": list(map(asdict, rows)),
            "slowdowns": list(map(asdict, slowdowns)),
        }


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    run_benchmark(main, __doc__)
