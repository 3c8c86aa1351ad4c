"""``bench.transfer``: page layouts of real models, batches of copies, and the minimum over all
rows."""

from __future__ import annotations

import pytest

from tiered_kv.bench.transfer import (
    ORDERS,
    SHAPES,
    WAYS,
    CpuSide,
    Scale,
    jobs_of,
    layout_of,
    measure,
    worst,
)
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import page_runs

KIB = {
    "Llama-3.1-8B": 2048,
    "Llama-3.1-70B TP4": 1280,
    "Llama-3.1-70B TP8": 640,
    "DeepSeek-V3 MLA": 1098,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_are_those_of_a_model_and_an_order_decides_how_many_runs_they_have(
    shape: str,
) -> None:
    layouts = [layout_of(shape, order, 16 << 20) for order in ORDERS]
    layers, blocks = (page_runs(layout, layout.page_bytes) for layout in layouts)
    assert layouts[0].num_blocks == (16 << 10) // KIB[shape]
    assert [len(layers), len(blocks)] == [SHAPES[shape][0], 1]
    assert layers.page_bytes == blocks.page_bytes == KIB[shape] << 10


def test_a_batch_names_every_page_once_as_long_as_there_are_enough() -> None:
    (job,) = jobs_of("d2h", 20, 20)
    assert job.direction is Direction.SAVE
    assert sorted(job.blocks) == sorted(job.slots) == list(range(20))
    (more,) = jobs_of("h2d", 30, 20)
    assert len(more.blocks) == 30


def test_concurrent_saves_and_loads_share_neither_block_nor_slot() -> None:
    save, load = jobs_of("both", 30, 20)
    assert not set(save.blocks) & set(load.blocks)
    assert not set(save.slots) & set(load.slots)


def test_the_worst_row_of_256_pages_or_more_counts() -> None:
    rows = [("d2h", 256, 0.9), ("d2h", 1024, 0.8), ("h2d", 256, 0.7), ("both", 4096, 0.95)]
    rows += [(way, 64, 0.1) for way in WAYS]
    names = ("way", "pages", "fraction")
    assert worst([dict(zip(names, row, strict=True)) for row in rows]) == {
        "d2h_fraction": 0.8,
        "h2d_fraction": 0.7,
        "both_fraction": 0.95,
        "fraction": 0.7,
    }


def test_a_small_run_on_the_cpu_measures_every_row() -> None:
    scale = Scale((2, 256), 8 << 20, 1)

    found = measure(CpuSide(scale.memory_bytes), scale, lambda what: None)

    assert len(found["rows"]) == len(SHAPES) * len(ORDERS) * len(scale.batches) * len(WAYS)
    assert all(row["gbs"] > 0 and row["one_copy_gbs"] > 0 for row in found["rows"])
    assert found["slowdowns"] == [], "there is no GPU whose products could be slowed down"
