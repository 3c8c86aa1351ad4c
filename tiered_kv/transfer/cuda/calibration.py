"""Costs of copies on a GPU, measured once when the first backend is made.

The measurement uses a few MiB of its own and frees them; it touches no block or slot of the engine.
It times what the engine's thread would wait for, from the call until the bytes have arrived, so the
time to enqueue counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch

from tiered_kv.layout import PageLayout, Region
from tiered_kv.transfer.base import CopyJob, Direction
from tiered_kv.transfer.copy_plan import PageRuns, Pages, page_runs, sort_out
from tiered_kv.transfer.cpu_pool import CpuPool
from tiered_kv.transfer.host_memory import AnonymousMemory

from .copy_cost import CopyCost, measure_cost
from .copy_engines import CopyEngines
from .page_kernel import PageKernel
from .pinned_memory import pinned
from .runtime import CudaRuntime, cuda_major

logger = logging.getLogger(__name__)

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Costs of one direction.

    Attributes:
        kernel: cost of the kernel; None where kernels cannot be launched.
    """

    kernel: CopyCost | None
    engines: CopyCost


@cache
def copy_costs(device: torch.device) -> Mapping[Direction, CopyCosts]:
    """Measure costs on ``device``. Takes some milliseconds and the time to compile the kernel."""
    runtime = CudaRuntime(cuda_major())
    engines = {way: measure_cost(partial(_engines_s, runtime, device, way)) for way in Direction}
    kernels: Mapping[Direction, CopyCost] = {}
    try:
        kernels = {way: measure_cost(partial(_kernel_s, runtime, device, way)) for way in Direction}
    except Exception as error:  # cupy is optional, and as particular about drivers as it likes
        logger.warning("copies are left to the copy engines, no kernel runs here: %r", error)
    costs = {way: CopyCosts(kernels.get(way), engines[way]) for way in Direction}
    logger.info("what copies cost: %s", costs)
    return costs


def _engines_s(
    runtime: CudaRuntime, device: torch.device, direction: Direction, runs: int, nbytes: int
) -> float:
    with _scratch(device, runs, nbytes) as (page, storage, pool, pages):
        slab = pool.slots.ctypes.data
        engines = CopyEngines(runtime, page, storage.data_ptr(), slab, pinned=pool.pinned)
        return _best_s(device, lambda stream: engines.enqueue(direction, pages, stream))


def _kernel_s(
    runtime: CudaRuntime, device: torch.device, direction: Direction, runs: int, nbytes: int
) -> float:
    with _scratch(device, runs, nbytes) as (page, storage, pool, pages):
        kernel = PageKernel(runtime, page, storage, pool.slots.ctypes.data)
        held: list[torch.Tensor] = []

        def copy(stream: int) -> None:
            kernel.reuse(held)  # the round before is over
            held.clear()
            kernel.enqueue(direction, pages, stream, held)

        return _best_s(device, copy)


@contextmanager
def _scratch(
    device: torch.device, runs: int, nbytes: int
) -> Iterator[tuple[PageRuns, torch.Tensor, CpuPool, Pages]]:
    """Pages of one run each, with gaps between their blocks."""
    layout = PageLayout((Region(0, 1, 0, 2 * nbytes, nbytes),), runs)
    storage = torch.zeros(layout.storage_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    pool = CpuPool(pinned(AnonymousMemory(runs * nbytes)), nbytes)
    try:
        job = CopyJob(0, Direction.SAVE, range(runs), range(runs))
        yield page_runs(layout, nbytes), storage, pool, sort_out(job, runs, runs)
    finally:
        torch.cuda.synchronize(device)
        pool.close()


def _best_s(device: torch.device, copy: Callable[[int], None]) -> float:
    stream = torch.cuda.Stream(device)
    best = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        copy(stream.cuda_stream)
        stream.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
