"""``bench.scale``: what the step times include, and whether vLLM's own offloader works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tiered_kv.bench.scale import Kind, Scenario, Watched, engine

CONTEXT = 2_048
BUSY_S = 0.05


def scenario(play: Callable[[Watched], None] = lambda _: None) -> Scenario:
    return Scenario("short", play, blocks=400, longest=CONTEXT + 200, seqs=2, pages=400)


@pytest.mark.parametrize("kind", Kind)
def test_a_context_that_vram_lost_is_recomputed_only_without_a_connector(kind: Kind) -> None:
    with engine(kind, scenario()) as one:
        one.add_all([("job/1", CONTEXT, 1, 2)])
        one.run()
        one.lose_vram()
        one.add_all([("job/2", CONTEXT + 64, 1, 2)])
        computed = 0
        while one.rig.scheduler.has_unfinished_requests():
            computed += one.rig.step().total_num_scheduled_tokens
    assert (computed > CONTEXT) == (kind is Kind.STOCK)


def test_an_arrival_is_part_of_no_step() -> None:
    with engine(Kind.OURS, scenario()) as one:
        one.add_all([("first/1", CONTEXT, 1, 4)])
        one.step()
        make_slow(one.rig.connector)
        one.add_all([("second/1", CONTEXT, 2, 4)])
        one.run()
    first, second = one.now.arrivals
    assert first.hooks < BUSY_S <= second.hooks <= second.whole
    assert max(step.hooks for step in one.now.steps) < BUSY_S


def make_slow(connector: Any) -> None:
    """Make the connector's own arrival hook, which the timed hook calls, use ``BUSY_S`` seconds of
    CPU time."""
    half = connector.scheduler_half
    hook = half.on_arrived

    def slow(*args: Any) -> Any:
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        return hook(*args)

    half.on_arrived = slow
