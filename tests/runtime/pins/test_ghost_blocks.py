"""Ghosts take room on paper, and the engine's blocks are never touched."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.pins.ghost_blocks import Ghost, GhostPool
from tiered_kv.testing.block_pool import FakeBlockPool

NAMES = [bytes([n]) for n in range(8)]


class Clock:
    """Stands still until somebody moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def real() -> FakeBlockPool:
    """Ten blocks, eight of which are hashed and free."""
    pool = FakeBlockPool(11)
    pool.release(pool.allocate(NAMES))
    return pool


@pytest.fixture
def pool(real: FakeBlockPool) -> GhostPool:
    return GhostPool(real, Clock())


def ghosts(pool: GhostPool, count: int) -> list[Ghost]:
    return [pool.ghost(0, name) for name in NAMES[:count]]


def test_the_engine_s_blocks_are_left_alone(real: FakeBlockPool, pool: GhostPool) -> None:
    before = real.free_order
    pool.hold(real.blocks[1:4])
    assert real.free_order == before
    pool.release(real.blocks[1:4])
    pool.forget([1, 2, 3])
    assert real.free_order == before
    assert real.cached(NAMES[0], 0) is not None
    assert pool.num_free() == 10


def test_ghosts_take_room_until_the_last_reference_goes(pool: GhostPool) -> None:
    held = ghosts(pool, 3)
    pool.hold(held)
    again = ghosts(pool, 2)
    assert again == held[:2], "of one name there is one"
    pool.hold(again)
    assert pool.num_free() == 7
    pool.release(held)
    assert pool.num_free() == 8
    pool.release(again)
    assert pool.num_free() == 10


def test_a_ghost_is_found_although_its_block_went_to_another(
    real: FakeBlockPool, pool: GhostPool
) -> None:
    pool.hold(ghosts(pool, 2))
    real.allocate([None] * 10)
    assert real.cached(NAMES[0], 0) is None
    assert pool.cached(NAMES[0], 0) is not None
    assert pool.cached(NAMES[0], 1) is None, "of another group"
    assert pool.num_free() == 0
    assert pool.short, "two blocks are taken that a pin would hold"


def test_what_is_in_use_takes_no_room_twice(real: FakeBlockPool) -> None:
    clock = Clock()
    pool = GhostPool(real, clock)
    pool.hold(ghosts(pool, 4))
    assert pool.num_free() == 6
    block = real.cached(NAMES[0], 0)
    real.hold([block])
    clock.now += 1.0  # they are counted now and then
    assert pool.num_free() == 9 - 3
