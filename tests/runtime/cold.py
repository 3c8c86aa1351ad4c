"""Engines whose CPU memory keeps pages compressed, and stories' shorthands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs import autotune
from tiered_kv.connectors.runtime.worker import worker
from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.cache import compression
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing import shrinking
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.rig import EngineRig

PAGE = 16 * CELL
SLOTS = 96
TURN = 160
"""Tokens of a turn's prompt: ten pages."""


class Waits(StatelessPolicy):
    """Leaves every turn's KV to CPU memory, and says when its job will come back."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        steps = np.linspace(0.0, 0.9, len(GRID))
        return Decision(Tier.CPU, forecast=Forecast(steps))


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are compressed by fours, since contexts are short here; and nothing is measured for
    longer than it takes."""
    monkeypatch.setattr(compression, "BUNDLE_BYTES", 4 * PAGE)
    monkeypatch.setattr(autotune, "MEASURE_S", 0.0)
    monkeypatch.setattr(worker, "measure_flops", lambda *_: 0.0)


def cold_settings(slots: int = SLOTS, page: int = PAGE, **more: Any) -> dict[str, Any]:
    """Settings with that many slots in CPU memory, of pages that can be compressed."""
    return {"cpu_gib": (slots * page + 1) / (1 << 30), "codec": shrinking.NAME, **more}


def prompt(job: int) -> list[int]:
    """The first prompt of a job."""
    return text(TURN, seed=1000 + job)


def settle(rig: EngineRig) -> None:
    """Wait until nothing is under way: no copy, and no page that is being compressed."""
    for _ in range(100):
        rig.wait_for_worker()
        rig.step()
        rig.run()
        if not rig.pages.book.in_flight:
            return
    raise AssertionError("orders never end")


def one_turn(rig: EngineRig, job: int) -> None:
    """A job's first turn, whose KV waits for the next."""
    rig.ask(f"job{job}-first", prompt(job), params={"job_id": f"job{job}"})
    settle(rig)


def fill_cpu(rig: EngineRig, jobs: int) -> None:
    """Turns of that many jobs, one after the other."""
    rig.policy = Waits()
    for job in range(jobs):
        rig.now += 1.0
        one_turn(rig, job)


def come_back(rig: EngineRig, job: int) -> int:
    """A job's second turn; gives the tokens of its prompt that were restored."""
    name = f"job{job}-again-{rig.steps}"
    before = rig.count("prompt_tokens_cpu")
    longer = [*prompt(job), *expected(prompt(job), 4), *text(20, seed=2000 + job)]
    assert rig.ask(name, longer, params={"job_id": f"job{job}"}) == expected(longer, 4)
    return rig.count("prompt_tokens_cpu") - before
