"""Ghost pins reserve no real blocks, and never change the engine's blocks."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.pins.ghost_blocks import Ghost, GhostPool
from tiered_kv.testing.engine.blocks import Blocks
from tiered_kv.testing.engine.port import PortPool

NAMES = [bytes([n]) for n in range(8)]


class Clock:
    """A clock that advances only when a test changes it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def real() -> Blocks:
    """A pool of ten blocks, eight of which are hashed and free."""
    pool = Blocks(10)
    for block, name in zip(taken := pool.take(8), NAMES, strict=True):
        pool.publish(block, name)
    pool.release(taken)
    return pool


@pytest.fixture
def pool(real: Blocks) -> GhostPool:
    return GhostPool(PortPool(real), Clock())


def ghosts(pool: GhostPool, count: int) -> list[Ghost]:
    return [pool.ghost(0, name) for name in NAMES[:count]]


def test_the_engines_blocks_are_not_changed(real: Blocks, pool: GhostPool) -> None:
    before = real.free_order
    pool.hold(real.blocks[:3])
    assert real.free_order == before
    pool.release(real.blocks[:3])
    pool.forget([0, 1, 2])
    assert real.free_order == before
    assert real.cached(NAMES[0]) is not None
    assert pool.num_free() == 10


def test_ghosts_take_space_until_the_last_reference_is_released(pool: GhostPool) -> None:
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


def test_a_ghost_is_found_although_its_block_was_reused(real: Blocks, pool: GhostPool) -> None:
    pool.hold(ghosts(pool, 2))
    real.take(10)
    assert real.cached(NAMES[0]) is None
    assert pool.cached(NAMES[0], 0) is not None
    assert pool.cached(NAMES[0], 1) is None, "of another group"
    assert pool.num_free() == 0
    assert pool.short, "two blocks are taken that a pin would hold"


def test_blocks_in_use_are_not_counted_twice(real: Blocks) -> None:
    clock = Clock()
    pool = GhostPool(PortPool(real), clock)
    pool.hold(ghosts(pool, 4))
    assert pool.num_free() == 6
    block = real.cached(NAMES[0])
    assert block is not None
    real.hold([block])
    clock.now += 1.0  # ghosts whose blocks are in use are counted again after an interval
    assert pool.num_free() == 9 - 3
