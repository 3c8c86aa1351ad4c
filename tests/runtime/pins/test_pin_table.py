"""Pins are references on VRAM blocks. They are counted, limited in number, and always released."""

from __future__ import annotations

import math
import secrets

import pytest

from tiered_kv.connectors.runtime.pins import pin_table
from tiered_kv.connectors.runtime.pins.pin_table import Lease, PinTable
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import PinState, PinValue
from tiered_kv.testing.engine.blocks import Block, Blocks
from tiered_kv.testing.engine.port import PortPool

A, B, C, D = (JobKey("", name) for name in "abcd")


def held(saves_s: float, earns: float) -> PinValue:
    """Return the value of a pin. Infinite earnings stand for a policy without forecasts."""
    if earns == math.inf:
        return PinValue(PinState.UNPRICED, saves_s)
    return PinValue(PinState.HELD, saves_s, earns)


def fill(pool: Blocks, count: int) -> list[Block]:
    """Allocate blocks, and give each a unique hash."""
    blocks = pool.take(count)
    for block in blocks:
        pool.publish(block, secrets.token_bytes(8))
    return blocks


class Engine:
    """A pool of 20 usable blocks, which requests allocate and free."""

    def __init__(self, budget: int = 12) -> None:
        self.pool = Blocks(20)
        self.pins = PinTable(PortPool(self.pool), budget)

    def ran(self, count: int) -> list[Block]:
        """Allocate the blocks of a turn that is about to end."""
        return fill(self.pool, count)

    def finish_pinned(self, job: JobKey, blocks: list[Block], deadline: float = 2.0,
                      born: float = 0.0, saves_s: float = 0.0,
                      earns: float = math.inf) -> int:  # fmt: skip
        """End a turn as vLLM does: call the connector's hook first, then release vLLM's
        references."""
        pinned = self.pins.pin(job, blocks, deadline, born, held(saves_s, earns))
        self.pool.release(reversed(blocks))
        return pinned

    def turn(self, job: JobKey, count: int, *, deadline: float = 2.0, born: float = 0.0,
             saves_s: float = 0.0, earns: float = math.inf) -> int:  # fmt: skip
        return self.finish_pinned(job, self.ran(count), deadline, born, saves_s, earns)

    @property
    def free(self) -> int:
        return self.pool.num_free()


def test_released_blocks_are_reused_last_and_the_first_ones_last_of_all() -> None:
    """The blocks of a released pin become free in reverse order, behind all other free blocks. In
    this order, they stay in the prefix cache for as long as possible."""
    engine = Engine()
    blocks = engine.ran(3)
    engine.finish_pinned(A, blocks)
    engine.pins.release(A)
    assert engine.pool.free_order[-3:] == [block.block_id for block in reversed(blocks)]


def test_a_turn_without_full_blocks_has_nothing_to_pin() -> None:
    engine = Engine()
    engine.turn(A, 3)
    assert engine.pins.pin(A, [], 2.0, 0.0, held(0.0, 1.0)) == 0
    assert A not in engine.pins, "what it held before is over all the same"
    assert engine.free == 20


# -- time -------------------------------------------------------------------------------


def lease(until: float) -> Lease:
    return Lease(until, held(1.0, 0.0))


def test_a_leased_pin_outlives_its_decision_and_not_its_lease() -> None:
    engine = Engine()
    blocks = engine.ran(3)
    engine.finish_pinned(A, blocks, deadline=2.0)
    assert engine.pins.lease(A, blocks, lease(10.0), 0.0) == 3
    assert engine.pins.lease(A, blocks, lease(5.0), 0.0) == 3, "never shortened"
    engine.pins.revoke(A, 1.0)
    engine.pins.expire(9.0)
    assert engine.pins.look(A) == (3, 10.0)
    engine.pins.expire(10.0)
    assert A not in engine.pins
    engine.turn(A, 2)
    engine.pins.revoke(A, 1.0)
    assert engine.free == 20, "a pin without a lease ends with its decision"


def test_a_lease_adds_the_blocks_that_a_pin_lacks_within_the_budget() -> None:
    engine = Engine(budget=4)
    blocks = engine.ran(6)
    assert engine.pins.lease(A, blocks[:2], lease(10.0), 0.0) == 2
    assert engine.pins.lease(A, blocks, lease(10.0), 0.0) == 4
    assert engine.pins.leased_blocks("", besides=B) == 4
    assert engine.pins.leased_blocks("", besides=A) == 0
    engine.pool.release(reversed(blocks))
    assert engine.free == 16
    assert engine.pins.make_room(lambda: engine.free == 20) == 1
    assert not engine.pins.held_blocks


def test_a_large_expired_pin_is_released_in_parts_and_before_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pin_table, "RELEASED_AT_ONCE", 2)
    engine = Engine()
    engine.turn(A, 8, deadline=2.0, saves_s=8.0, earns=2.0)
    engine.turn(B, 4, deadline=9.0, saves_s=1.0, earns=2.0)
    engine.pins.expire(2.0)
    assert engine.pins.look(A) == (6, 2.0)
    free = engine.free
    engine.pins.make_room(lambda: engine.free >= free + 1)
    assert [job in engine.pins for job in (A, B)] == [False, True]
    engine.turn(A, 5, deadline=3.0)
    for now in (3.0, 3.0, 3.0):
        engine.pins.expire(now)
    assert A not in engine.pins
    assert engine.free == 16


def test_a_turn_that_returns_keeps_the_rest_of_its_expired_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pin_table, "RELEASED_AT_ONCE", 2)
    engine = Engine()
    engine.turn(A, 6)
    engine.pins.expire(2.0)
    engine.pins.on_arrived(A)
    engine.pins.expire(3.0)
    assert engine.pins.look(A) == (4, math.inf)


# -- giving way -------------------------------------------------------------------------


def crowded() -> Engine:
    """Return an engine with three pins of four blocks. B's job is the oldest, A's the youngest."""
    engine = Engine()
    for job, born in ((A, 30.0), (B, 10.0), (C, 20.0)):
        engine.turn(job, 4, born=born)
    assert engine.free == 8
    return engine


def test_the_youngest_jobs_pin_is_released_first_and_no_more_than_needed() -> None:
    engine = crowded()
    assert engine.pins.make_room(lambda: engine.free >= 12) == 1
    assert [job in engine.pins for job in (A, B, C)] == [False, True, True]
    assert engine.pins.make_room(lambda: engine.free >= 12) == 0
    assert engine.pins.make_room(lambda: engine.free >= 13) == 1
    assert [job in engine.pins for job in (A, B, C)] == [False, True, False]


def test_the_pin_that_saves_least_per_block_is_released_before_a_younger_jobs() -> None:
    engine = Engine()
    engine.turn(A, 2, born=30.0, saves_s=4.0)
    engine.turn(B, 6, born=10.0, saves_s=6.1)
    engine.turn(C, 4, born=20.0, saves_s=6.0)
    assert engine.pins.make_room(lambda: engine.free >= 9) == 1
    assert B not in engine.pins, "it saves the most, and takes the most room for it"
    engine.pins.revise(A, 5.0, held(1.0, 1.0))
    assert engine.pins.make_room(lambda: engine.free >= 15) == 1
    assert A not in engine.pins, "less was to be saved when its tool call was read"


def test_the_pin_of_an_arrived_turn_outlasts_pins_of_waiting_jobs() -> None:
    engine = Engine()
    engine.turn(A, 4, born=30.0, saves_s=1.0)
    engine.turn(B, 4, born=10.0, saves_s=100.0)
    engine.pins.on_arrived(A)
    assert engine.pins.make_room(lambda: engine.free >= 16) == 1
    assert A in engine.pins


def test_the_pin_of_the_job_that_needs_the_space_is_released_last() -> None:
    engine = crowded()
    assert engine.pins.make_room(lambda: engine.free >= 16, spare=A) == 2
    assert A in engine.pins
    assert engine.pins.make_room(lambda: engine.free >= 20, spare=A) == 1
    assert A not in engine.pins


def test_a_pin_of_a_younger_job_is_released_unless_it_earns_more_than_the_wait() -> None:
    engine = Engine()
    engine.turn(A, 4, born=30.0, saves_s=9.0, earns=0.9)
    engine.turn(B, 4, born=30.0, saves_s=1.0, earns=1.1)
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=20.0) == 1
    assert [job in engine.pins for job in (A, B)] == [False, True]
    engine.pins.on_arrived(B)
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=20.0) == 0, (
        "it queues"
    )
    engine.turn(A, 4, born=30.0)
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=20.0) == 1, (
        "who can say?"
    )


def test_a_pin_of_an_older_job_is_released_if_it_is_not_worth_a_wait() -> None:
    engine = Engine()
    engine.turn(A, 4, born=10.0, saves_s=9.0, earns=0.4)
    engine.turn(B, 4, born=10.0, saves_s=1.0, earns=0.6)
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=30.0) == 1
    assert [job in engine.pins for job in (A, B)] == [False, True]
    engine.pins.revise(B, 5.0, held(1.0, 0.1))
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=30.0) == 1


def test_all_pins_are_released_for_a_turn_that_cannot_wait() -> None:
    engine = Engine()
    engine.turn(A, 4, born=10.0, saves_s=9.0, earns=100.0)
    assert engine.pins.make_room(lambda: engine.free >= 20, waiter_started_at=30.0) == 0
    assert engine.pins.make_room(lambda: engine.free >= 20) == 1
