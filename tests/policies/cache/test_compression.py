"""Pages are compressed before their slots are needed, but not too early, and not so many at a time
that hits are lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.pages.cpu_compression import (
    BUNDLE_BYTES,
    FREE_SHARE,
    LEAST_PAGES,
    MOST_PACKING,
    MOST_PAGES,
    MOST_STAGING,
    bundle_pages,
    bundles_of,
    bundles_to_pack,
    burst,
    staging_slots,
    worth_compressing,
)

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("num_slots", "staging"),
    [(0, 0), (31, 0), (32, 2), (63, 2), (64, 4), (511, 30), (512, 32), (1 << 20, MOST_STAGING)],
)
def test_slots_for_decoded_pages_come_in_two_halves(num_slots: int, staging: int) -> None:
    assert staging_slots(num_slots) == staging
    assert staging % 2 == 0


@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [
        (1, MOST_PAGES),
        (2 * MIB, MOST_PAGES),
        (2 * MIB + 1, 31),
        (4 * MIB, 16),
        (BUNDLE_BYTES // LEAST_PAGES, LEAST_PAGES),
        (1 << 40, LEAST_PAGES),
    ],
)
def test_the_number_of_pages_in_a_bundle_depends_on_their_size(page_bytes: int, pages: int) -> None:
    assert bundle_pages(page_bytes) == pages


@pytest.mark.parametrize(
    ("pages", "most", "sizes"),
    [
        (0, 32, []),
        (15, 32, []),
        (16, 32, [16]),
        (94, 32, [32, 32, 30]),
        (7, 4, [4]),
        (8, 4, [4, 4]),
    ],
)
def test_the_rest_of_a_stretch_is_a_bundle_if_it_is_half_full(
    pages: int, most: int, sizes: list[int]
) -> None:
    assert bundles_of(pages, most) == sizes


def wanted(num_slots: int = 1024, free: int = 0, burst: int = 0, under_way: int = 0) -> int:
    return bundles_to_pack(num_slots=num_slots, free=free, burst=burst, under_way=under_way)


def test_nothing_is_compressed_while_a_slot_is_free_and_few_are_taken_at_once() -> None:
    assert wanted(free=1, burst=0) == 0
    assert wanted(free=0, burst=0) == MOST_PACKING


def test_a_burst_requires_more_free_slots_up_to_a_bound() -> None:
    most = 1024 // FREE_SHARE
    assert wanted(free=100, burst=100) == 0
    assert wanted(free=99, burst=100)
    assert wanted(free=most, burst=1 << 20) == 0
    assert wanted(free=most - 1, burst=1 << 20)


def test_few_bundles_are_compressed_concurrently() -> None:
    assert wanted(under_way=MOST_PACKING) == 0
    assert wanted(under_way=MOST_PACKING + 1) == 0
    assert wanted(under_way=MOST_PACKING - 1) == 1


@pytest.mark.parametrize("num_slots", [0, 1, 7, 31])
def test_small_pools_want_a_free_slot_too(num_slots: int) -> None:
    assert wanted(num_slots=num_slots, free=1) == 0
    assert wanted(num_slots=num_slots) == MOST_PACKING


@given(
    st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 21), st.integers(0, 20)
)
def test_more_free_slots_never_require_more_compression(
    num_slots: int, free: int, burst: int, under_way: int
) -> None:
    found = wanted(num_slots, free, burst, under_way)
    assert 0 <= found <= max(0, MOST_PACKING - under_way)
    assert wanted(num_slots, free + 1, burst, under_way) <= found


def test_a_burst_is_remembered_for_a_while() -> None:
    now = burst(100, 0)
    assert now == 100
    seen = [now := burst(0, now) for _ in range(200)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 98
    assert 50 > seen[33] > 40
    assert seen[-1] == 0
    assert burst(70, 60) == 70


@pytest.mark.parametrize(
    ("stored", "worth"), [(0, True), (1000, True), (1001, False), (1300, False), (2000, False)]
)
def test_pages_that_shrink_little_are_left_alone(stored: int, worth: bool) -> None:
    assert worth_compressing(1300, stored) is worth
