"""``bench.transfer``: real pages, honest jobs, and the worst row counts."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_kv.bench.transfer import (
    ORDERS,
    SHAPES,
    CpuSide,
    Row,
    Scale,
    Shape,
    Way,
    jobs_of,
    measure,
    summary,
)
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import page_runs


def test_pages_are_those_of_the_models() -> None:
    assert {shape.name: shape.layout(ORDERS[0], 4).page_bytes >> 10 for shape in SHAPES} == {
        "Llama-3.1-8B": 2048,
        "Llama-3.1-70B TP4": 1280,
        "Llama-3.1-70B TP8": 640,
        "DeepSeek-V3 MLA": 1098,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_an_order_decides_how_many_runs_a_page_has(shape: Shape) -> None:
    layouts = [shape.layout(order, 8) for order in ORDERS]
    layers, blocks = (page_runs(layout, layout.page_bytes) for layout in layouts)
    assert [len(layers), len(blocks)] == [shape.layers, 1]
    assert layers.page_bytes == blocks.page_bytes


def test_a_batch_names_every_page_once_as_long_as_there_are_enough() -> None:
    (job,) = jobs_of(Way.D2H, 20, 20, np.random.default_rng(0))
    assert job.direction is Direction.SAVE
    assert sorted(job.blocks) == sorted(job.slots) == list(range(20))
    (more,) = jobs_of(Way.H2D, 30, 20, np.random.default_rng(0))
    assert len(more.blocks) == 30


def test_saves_and_loads_at_once_share_neither_block_nor_slot() -> None:
    save, load = jobs_of(Way.BOTH, 30, 20, np.random.default_rng(0))
    assert not set(save.blocks) & set(load.blocks)
    assert not set(save.slots) & set(load.slots)


def test_the_worst_row_of_256_pages_or_more_counts() -> None:
    def row(way: str, pages: int, fraction: float) -> Row:
        return Row("", "", 1.0, pages, way, 1.0, 1.0, fraction)

    rows = [row(way, 64, 0.1) for way in ("d2h", "h2d", "both")]
    rows += [row("d2h", 256, 0.9), row("d2h", 1024, 0.8), row("h2d", 256, 0.7)]
    rows += [row("both", 4096, 0.95)]
    assert summary(rows) == {
        "d2h_fraction": 0.8,
        "h2d_fraction": 0.7,
        "both_fraction": 0.95,
        "fraction": 0.7,
    }


def test_a_small_run_on_the_cpu_measures_every_row() -> None:
    scale = Scale((2, 256), 8 << 20, 1)

    rows, slowdowns = measure(CpuSide(scale.memory_bytes), scale, lambda what: None)

    assert len(rows) == len(SHAPES) * len(ORDERS) * len(scale.batches) * len(Way)
    assert all(row.gbs > 0 and row.one_copy_gbs > 0 for row in rows)
    assert slowdowns == [], "there is no GPU whose products could be slowed down"
