"""Turns and pins in any order: every reference on a block has an owner."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.runtime.pins.test_pin_table import A, B, C, D, fill, held
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.policies.base import JobKey
from tiered_kv.testing.engine.blocks import Block, Blocks
from tiered_kv.testing.engine.port import PortPool


class PinsMachine(RuleBasedStateMachine):
    """Turns of a few jobs, some with a common prefix, start, end and are pinned in any order.

    The model knows which blocks each pin must hold. Every reference in the pool must then belong to
    a pin or to a running turn.
    """

    JOBS = (A, B, C, D)

    @initialize(budget=st.integers(0, 14))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.pool = Blocks(30)
        self.pins = PinTable(PortPool(self.pool), budget)
        self.now = 0.0
        self.running: list[list[Block]] = []
        self.model: dict[JobKey, tuple[list[Block], float, tuple[float, float]]] = {}
        self.earns: dict[JobKey, float] = {}

    @rule(data=st.data(), length=st.integers(1, 8))
    def begin(self, data: st.DataObject, length: int) -> None:
        """Start a turn. It may share the first blocks of another context, and allocates further
        ones."""
        contexts = [*self.running, *(blocks for blocks, _, _ in self.model.values())]
        head: list[Block] = []
        if contexts:
            whose = contexts[data.draw(st.integers(0, len(contexts) - 1))]
            head = whose[: data.draw(st.integers(0, len(whose)))]
        if length > self.pool.num_free():
            return
        self.pool.hold(head)
        self.running.append(head + fill(self.pool, length))

    @rule(
        data=st.data(),
        job=st.sampled_from(JOBS),
        ttl=st.sampled_from([2.0, 0.0, 1.0, 5.0]),
        born=st.integers(0, 3),
        saves_s=st.sampled_from([0.0, 0.0, 1.0, 4.0]),
        earns=st.sampled_from([0.7, 0.3, 1.5, math.inf]),
    )
    @precondition(lambda self: self.running)
    def end(
        self,
        data: st.DataObject,
        job: JobKey,
        ttl: float,
        born: int,
        saves_s: float,
        earns: float,
    ) -> None:
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.model.pop(job, None)
        fits = [n for n in range(len(blocks) + 1) if self.affordable(blocks[:n])]

        pinned = self.pins.pin(job, blocks, self.now + ttl, float(born), held(saves_s, earns))
        self.earns[job] = earns
        self.pool.release(reversed(blocks))

        assert pinned == max(fits), "as much of its start as the budget allows"
        if pinned:
            self.model[job] = (blocks[:pinned], self.now + ttl, (saves_s / pinned, -born))

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def end_unpinned(self, data: st.DataObject) -> None:
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(reversed(blocks))

    @rule(job=st.sampled_from(JOBS))
    def release(self, job: JobKey) -> None:
        assert self.pins.release(job) is (self.model.pop(job, None) is not None)

    @rule(seconds=st.sampled_from([1.0, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = [job for job, (_, deadline, _) in self.model.items() if deadline <= self.now]
        assert self.pins.expire(self.now) == len(late)
        for job in late:
            del self.model[job]

    @rule(
        wanted=st.integers(1, 30),
        spare=st.none() | st.sampled_from(JOBS),
        waiter_born=st.none() | st.integers(0, 4).map(float),
    )
    def make_room(self, wanted: int, spare: JobKey | None, waiter_born: float | None) -> None:
        before = dict(self.model)
        released = self.pins.make_room(lambda: self.pool.num_free() >= wanted, spare, waiter_born)

        for job in [job for job in self.model if job not in self.pins]:
            del self.model[job]
        assert released == len(before) - len(self.model)

        def goes(job: JobKey, born: float) -> bool:
            if waiter_born is None or self.earns[job] == 0.3:
                return True
            return born > waiter_born and self.earns[job] != 1.5

        may_go = {job: worth for job, (_, _, worth) in before.items() if goes(job, -worth[1])}
        assert set(before) - set(self.model) <= set(may_go)
        if self.model.keys() & may_go.keys():
            assert self.pool.num_free() >= wanted
        gone = [before[job][2] for job in before if job not in self.model and job != spare]
        stayed = [may_go[job] for job in self.model if job in may_go and job != spare]
        most, least = max(gone, default=(-1.0, 0.0)), min(stayed, default=(9.0, 0.0))
        assert most <= least, "what saves least gives way first, of that the youngest"
        if spare in before and spare not in self.model:
            assert not stayed, "the spared one goes last"

    @invariant()
    def every_reference_belongs_to_somebody(self) -> None:
        self.pool.check_integrity()
        owners = [*self.running, *(blocks for blocks, _, _ in self.model.values())]
        held = [block.block_id for blocks in owners for block in blocks]
        for block in self.pool.blocks:
            assert block.ref_cnt == held.count(block.block_id)

    @invariant()
    def pins_stay_within_budget(self) -> None:
        assert len(self.pins) == len(self.model)
        assert all(job in self.pins for job in self.model)
        held = {block for blocks, _, _ in self.model.values() for block in blocks}
        assert self.pins.held_blocks == len(held) <= self.budget

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.pins.release_all()
            for blocks in self.running:
                self.pool.release(blocks)
            assert self.pool.num_free() == 30

    def affordable(self, blocks: list[Block]) -> bool:
        held = {block for pinned, _, _ in self.model.values() for block in pinned}
        return len(held | set(blocks)) <= max(self.budget, len(held))


TestPins = PinsMachine.TestCase
