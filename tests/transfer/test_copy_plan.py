"""A copy job becomes byte runs: each byte is copied once, and adjacent runs are merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.page_layouts import Move, moves
from tiered_kv.page_group import PageLayout, Placement, Region, page_layout
from tiered_kv.testing.conformance.transfer import addresses
from tiered_kv.transfer.base import CopyJob, Direction
from tiered_kv.transfer.copy_plan import (
    Copies,
    Pages,
    cut_copies,
    page_runs,
    plan_copies,
    sort_out,
)


def pages_of(blocks: list[int], slots: list[int]) -> Pages:
    return sort_out(CopyJob(1, Direction.SAVE, blocks, slots), 100, 100)


def byte_pairs(copies: Copies) -> list[tuple[int, int]]:
    """Return the offset in the storage and the offset in the slab of every byte that is copied."""
    return [
        (storage + i, slab + i)
        for storage, slab, nbytes in zip(
            copies.storage.tolist(), copies.slab.tolist(), copies.nbytes.tolist(), strict=True
        )
        for i in range(nbytes)
    ]


@given(moves())
def test_every_byte_of_every_page_is_copied_once_to_its_destination(move: Move) -> None:
    pages = sort_out(move.job, move.layout.num_blocks, move.num_slots)

    moved = byte_pairs(plan_copies(page_runs(move.layout, move.layout.page_bytes), pages))

    size = move.layout.page_bytes
    assert sorted(moved) == sorted(
        (int(where), slot * size + i)
        for block, slot in zip(move.job.blocks, move.job.slots, strict=True)
        for i, where in enumerate(addresses(move.layout, block))
    )


@given(moves(), st.integers(1, 500))
def test_split_copies_move_the_same_bytes_and_cross_no_boundary(move: Move, every: int) -> None:
    pages = sort_out(move.job, move.layout.num_blocks, move.num_slots)
    whole = plan_copies(page_runs(move.layout, move.layout.page_bytes), pages)

    cut = cut_copies(whole, every)

    assert byte_pairs(cut) == byte_pairs(whole)
    assert (cut.nbytes > 0).all()
    assert (cut.slab // every == (cut.slab + cut.nbytes - 1) // every).all()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 3, 4, -1, 5, 1 << 40, 1 << 70, -(1 << 70)]),
            st.sampled_from([0, 6, -1, 7, 1 << 40, 1 << 63]),
        )
    )
)
def test_pages_with_invalid_blocks_or_slots_are_rejected_and_the_rest_kept(
    job: list[tuple[int, int]],
) -> None:
    good = [0 <= block < 5 and 0 <= slot < 7 for block, slot in job]

    pages = sort_out(
        CopyJob(1, Direction.LOAD, [block for block, _ in job], [slot for _, slot in job]), 5, 7
    )

    assert pages.failed == {i for i, one in enumerate(good) if not one}
    assert list(zip(pages.blocks.tolist(), pages.slots.tolist(), strict=True)) == [
        page for page, one in zip(job, good, strict=True) if one
    ]


def test_neighbours_on_both_sides_become_one_copy_where_a_block_is_one_run() -> None:
    runs = page_runs(page_layout([Placement(3, 16, 48, 0)], 100), 48)

    copies = plan_copies(runs, pages_of([4, 5, 6, 8, 9, 3], [0, 1, 2, 3, 5, 6]))

    assert copies.nbytes.tolist() == [3 * 48, 48, 48, 48]
    assert copies.storage.tolist() == [4 * 48, 8 * 48, 9 * 48, 3 * 48]
    assert copies.slab.tolist() == [0, 3 * 48, 5 * 48, 6 * 48]


def test_separate_layers_stay_separate_copies_in_any_block_order() -> None:
    runs = page_runs(page_layout([Placement(3, 100 * 16, 16, 0)], 100), 48)
    assert plan_copies(runs, pages_of([4, 5], [0, 1])).nbytes.tolist() == [16] * 6


def test_adjacent_runs_within_a_block_are_one_copy() -> None:
    layout = PageLayout((Region(0, 4, 16, 80, 16), Region(64, 1, 0, 80, 16)), 3)
    assert page_runs(layout, layout.page_bytes).nbytes.tolist() == [80]
    apart = PageLayout((Region(0, 4, 16, 80, 16), Region(65, 1, 0, 80, 15)), 3)
    assert page_runs(apart, apart.page_bytes).nbytes.tolist() == [64, 15]


def test_a_job_without_pages_has_no_copies() -> None:
    runs = page_runs(page_layout([Placement(3, 16, 48, 0)], 100), 48)
    assert len(plan_copies(runs, pages_of([], []))) == 0


def test_pages_smaller_than_their_slots_copy_only_their_own_bytes() -> None:
    runs = page_runs(page_layout([Placement(3, 16, 48, 0)], 100), 64)
    copies = plan_copies(runs, pages_of([4, 5, 6], [0, 1, 2]))
    assert copies.nbytes.tolist() == [48, 48, 48]
    assert copies.slab.tolist() == [0, 64, 128]
    assert len(plan_copies(runs, pages_of([4, 5, 6], [0, 1, 2]))) == 3
