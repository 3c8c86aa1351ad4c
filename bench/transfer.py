"""Speed of pages between VRAM and CPU memory, over one large copy of as many bytes.

    python -m bench.transfer --json

Pages of real models, in blocks and slots drawn at random, so that nothing is contiguous but
what the layout makes so. ``d2h_fraction``, ``h2d_fraction`` and ``both_fraction`` (saves,
loads, and both at once) are the least over all shapes and layouts from 256 pages on; each row
is the median of its rounds, in which the backend and one contiguous copy between the same
memories take turns. Seconds are those of the caller: from the first call until the last byte
is there. Small batches are submitted back to back.

``compute_slowdown``: seconds of bf16 matrix products of 8192³ beside copies of 256 pages
that follow each other, by their seconds alone; the worst median over shapes, layouts and ways.

Without CUDA the CPU backend runs beside memcpy, with fewer pages. ``fraction`` is the least
of the three fractions.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from tiered_kv.bench.micro.copies import CpuSide, CudaSide, Side, Way
from tiered_kv.bench.output import AsJson, progress, run_benchmark, show
from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.transfer.base import CopyJob

TOKENS = 16
TABLE_WIDTH = 110
COUNTS_FROM = 256
"""Pages of a batch, from which on fractions count."""
SAMPLE_BYTES = 64 << 20
"""Smaller batches are repeated until a sample has so many."""

Tick = Callable[[str], None]


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
class Beside:
    """Slowdown of matrix products by copies; median of the rounds."""

    shape: str
    outermost: str
    way: str
    slowdown: float


def jobs_of(way: Way, pages: int, there: int, rng: np.random.Generator) -> list[CopyJob]:
    """A job for each direction, of random blocks and slots out of ``there``.

    Both ways at once, saves and loads get a half of the blocks and slots each: no job may
    read what another writes.
    """
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
    """Our GB/s, those of one copy, and ours over theirs."""
    there = layout.num_blocks
    jobs = jobs_of(way, pages, there, np.random.default_rng(0))
    nbytes = layout.page_bytes * pages * len(jobs)
    repeats = -(-SAMPLE_BYTES // nbytes)
    large = min(layout.page_bytes * there, 4 * SAMPLE_BYTES)
    side.seconds(jobs)
    side.one_copy_s(way, large)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(nbytes * repeats / side.seconds(jobs * repeats) / 1e9)
        theirs.append(large / side.one_copy_s(way, large) / 1e9)
    fraction = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), fraction


def layouts(scale: Scale) -> Iterator[tuple[Shape, str, PageLayout]]:
    for shape in SHAPES:
        there = scale.memory_bytes // (shape.layers * shape.layer_bytes * TOKENS)
        for order in ORDERS:
            yield shape, order, shape.layout(order, there)


def measure(side: Side, scale: Scale, tick: Tick) -> tuple[list[Row], list[Beside]]:
    """All rows, and the matrix products beside each shape and layout; none without a GPU."""
    rows, beside = [], []
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
                beside.append(Beside(shape.name, order, way.value, slowdown))
    side.close()
    return rows, beside


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The least fraction of each way."""
    least = {
        f"{way.value}_fraction": min(
            row.fraction for row in rows if row.way == way.value and row.pages >= COUNTS_FROM
        )
        for way in Way
    }
    return {**least, "fraction": min(least.values())}


def show_rows(title: str, rows: Sequence[Row] | Sequence[Beside]) -> None:
    table = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name)
    for row in rows:
        values = asdict(row).values()
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values))
    Console(width=TABLE_WIDTH).print(table)


def main(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Take the CPU backend, also beside a GPU.")
    ] = False,
    by: Annotated[
        Literal["faster", "staged", "runs"], typer.Option(help="Copies on a GPU.")
    ] = "faster",
    as_json: AsJson = False,
) -> None:
    """Measure copies of pages."""
    on_gpu = not cpu and _has_cuda()
    scale = GPU if on_gpu else CPU
    side: Side
    side = CudaSide(scale.memory_bytes, by) if on_gpu else CpuSide(scale.memory_bytes)
    with progress() as bar:
        bar.disable = not sys.stderr.isatty()
        task = bar.add_task("copying", total=len(SHAPES) * len(ORDERS) * len(scale.batches))
        rows, beside = measure(
            side, scale, lambda what: bar.update(task, advance=1, description=what)
        )
    result: dict[str, Any] = {
        **summary(rows),
        "compute_slowdown": max((one.slowdown for one in beside), default=None),
        "on": side.name,
        "rounds": scale.rounds,
    }
    if as_json:
        result["rows"] = [asdict(row) for row in rows]
        result["slowdowns"] = [asdict(one) for one in beside]
    else:
        show_rows("Batches of pages", rows)
        if beside:
            show_rows("Matrix products beside copies", beside)
    show("Pages between VRAM and CPU memory, over one large copy", result, as_json)


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    run_benchmark(main, __doc__)
