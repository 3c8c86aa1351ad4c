"""Two ranks of one engine. The model runs on the first rank. The second rank has the same KV with
some bits flipped, so that its pages are encoded to different sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies
from tiered_kv.connectors.runtime.worker.worker import WorkerHalf
from tiered_kv.messages import Handshake, Reports
from tiered_kv.orders import FailLoad, LoadOrder, OrderId, RestoreMode
from tiered_kv.testing.checked_kv import WrongKV
from tiered_kv.testing.engine.engine import Engine, EngineSize
from tiered_kv.testing.engine.halves import Halves
from tiered_kv.testing.engine.offload import Loads
from tiered_kv.testing.engine.port import base_fingerprint, read_facts
from tiered_kv.testing.engine.rig import SecondRig

TURN = 0x5A
"""Bits that are flipped in the second rank's bytes."""


def facts_of_two(size: EngineSize) -> EngineFacts:
    """Return the engine's configuration with two ranks."""
    return replace(read_facts(size), ranks=2)


class TwoRanks(Halves):
    """The scheduler half and the worker halves of two ranks. Restores of the second rank are
    compared with those of the first.

    Attributes:
        second: the second rank's worker half.
        filled: for each order that compresses a bundle, the number of slots that the bundle fills
            on each rank.
    """

    def __init__(
        self,
        engine: Engine,
        config: TierConfig,
        clock: Clock,
        change: Callable[[Dependencies], Dependencies],
    ) -> None:
        super().__init__(engine, config, clock, change)
        facts = facts_of_two(engine.size)
        self.engine = engine
        self.mirror = engine.model.cache ^ TURN
        self.second = WorkerHalf(facts, config, 1, lambda: (base_fingerprint(facts),), clock)
        self.second.register([self.mirror])
        self.filled: dict[OrderId, list[int]] = {}
        self._coming: dict[str, set[int]] = {}  # blocks of async restores, by request
        self._bad: set[int] = set()
        self._arrived: list[set[str]] = [set(), set()]
        self.introduce(lambda said: said)

    def introduce(self, change: Callable[[Handshake], Handshake], **speeds: float) -> None:
        """Send the handshakes of both ranks to the scheduler half, with ``change`` applied to the
        second one, and with ``speeds`` in both."""
        said = {0: self.worker.handshake(), 1: change(self.second.handshake())}
        for rank, one in said.items():
            said[rank] = replace(one, speeds=replace(one.speeds, flops=0.0, **speeds))
        self.scheduler.on_handshake(said)

    def before_forward(self, scheduled: Mapping[str, int]) -> frozenset[int]:
        bad = super().before_forward(scheduled)
        loads: list[LoadOrder | FailLoad] = [*self._orders.loads, *self._orders.failed_loads]
        for order in loads:
            if order.mode is RestoreMode.ASYNC:
                self._coming.setdefault(order.request_id, set()).update(order.blocks)
        self.second.start(self._orders)
        return bad | frozenset(self.second.bad_blocks)

    def after_forward(self) -> Loads:
        loading = [request.block_ids for request in self.engine.loading.values()]
        blocks = set(range(self.engine.size.blocks)).difference(*loading)
        self.mirror[:, list(blocks)] = self.engine.model.cache[:, list(blocks)] ^ TURN
        first = super().after_forward()
        self.second.save(self._orders)
        self._arrived[0].update(first.requests)
        self._arrived[1].update(self.second.finish().requests)
        both = self._arrived[0] & self._arrived[1]
        for one in self._arrived:
            one -= both
        self._bad |= first.bad | self.second.take_bad_blocks()
        for request_id in both:
            self._compare(self._coming[request_id] - self._bad)
            del self._coming[request_id]
        # Failed blocks of restores that are still in flight on one rank are reported once these
        # have finished.
        bad = frozenset(self._bad.difference(*self._coming.values()))
        self._bad -= bad
        return Loads(frozenset(both), bad)

    def _compare(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (self.mirror[:, block] != self.engine.model.cache[:, block] ^ TURN).any():
                raise WrongKV(f"block {block} differs on the second rank")

    def step_over(self) -> None:
        said = [self.worker.take_reports(), self.second.take_reports()]
        for rank, reports in enumerate(said):
            for order_id, report in reports.orders.items() if reports is not None else ():
                if report.slots:
                    self.filled.setdefault(order_id, [0, 0])[rank] = report.slots
        reports = Reports()
        for one in said:
            reports = reports.merge(one) if one is not None else reports
        if any(one is not None for one in said):
            self.scheduler.on_reports(reports)

    def close(self) -> None:
        super().close()
        self.second.close()


class TwoRankRig(SecondRig):
    """A rig with two ranks."""

    @property
    def ranks(self) -> Any:
        """The halves of both ranks."""
        return self.halves

    @property
    def worker_halves(self) -> Sequence[Any]:
        return [self.worker_half, self.ranks.second]
