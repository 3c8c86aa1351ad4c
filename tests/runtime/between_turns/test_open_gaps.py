"""Comparison of a prompt with its job's context, and the value of a waiting job's pages."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.between_turns.open_gaps import (
    SKETCH_EVERY,
    OpenGaps,
    PrefixSketch,
)
from tiered_kv.connectors.runtime.between_turns.turn_ends import KvPlacement
from tiered_kv.keys import PageKey
from tiered_kv.policies.base import Costs, Decision, JobKey, Tier, ToolUse, TurnEnd, TurnPolicy
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.distribution import GRID, Forecast


def hashes(context: str) -> list[bytes]:
    """Return a hash per block that covers all blocks before it, as vLLM's hashes do."""
    return [context[: n + 1].encode() for n in range(len(context))]


@given(st.text("ab", max_size=60), st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_the_common_prefix_is_found_in_whole_steps(head: str, one: str, other: str) -> None:
    first, second = head + one, head + other
    pairs = zip(first, second, strict=False)
    agree = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    common = PrefixSketch.of(hashes(first)).common_blocks(PrefixSketch.of(hashes(second)))
    assert common == agree // SKETCH_EVERY * SKETCH_EVERY


def test_a_forgotten_context_matches_nothing() -> None:
    assert PrefixSketch().common_blocks(PrefixSketch.of(hashes("a" * 40))) == 0


# -- waiting in CPU memory ----------------------------------------------------------------


SOON, LATE = (Forecast(np.minimum(GRID / most_s, 1.0)) for most_s in (10.0, 1000.0))
PAGES = [PageKey(bytes([n]) * 48) for n in range(4)]
TOOL = ToolUse(("tool",))


class Forecasts(StatelessPolicy):
    """A policy with one forecast for turns whose tool call is unread and one for the others. All KV
    waits in CPU memory."""

    def __init__(self, unread: Forecast | None, read: Forecast | None) -> None:
        self._of = {None: unread, TOOL: read}

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.CPU, forecast=self._of[turn.tool])


class Waiting:
    """Jobs between their turns, and the order in which their pages are evicted."""

    def __init__(self, policy: TurnPolicy) -> None:
        self.order = ByWorth(lambda: 0.0, 100)
        prices: Any = SimpleNamespace(costs=lambda tokens, job: Costs(recompute_s=1.0))
        self.placement = KvPlacement(
            policy,
            OpenGaps(),
            prices,
            self.order,
            lambda pages, save: None,
            lambda job: 1.0,
            lambda: 0.0,
        )

    def ends(self, turn: int, *, tool: ToolUse | None = None, pages: Sequence[PageKey]) -> None:
        job = JobKey("", "j")
        end = TurnEnd(job, turn, is_last_step=False, aborted=False, context_tokens=64, tool=tool)
        unread = tool is None
        sketch = PrefixSketch()
        self.placement.decide(f"t{turn}", end, pages, sketch, None, unread=unread, away=True)

    def chance(self) -> float:
        """Return the probability that the job needs its first page in the next five seconds."""
        return self.order.return_chance(PAGES[0], 5.0)


@pytest.mark.parametrize("unread", [LATE, None])
def test_a_parsed_tool_call_updates_when_pages_are_needed(
    unread: Forecast | None,
) -> None:
    waiting = Waiting(Forecasts(unread, SOON))
    waiting.ends(1, pages=PAGES)
    assert waiting.chance() == (unread.within(5.0) if unread is not None else 0.0)
    assert waiting.placement.revise("t1", TOOL) is not None
    assert waiting.chance() == SOON.within(5.0) == 0.5


def test_pages_of_a_job_without_a_forecast_belong_to_no_job() -> None:
    waiting = Waiting(Forecasts(None, SOON))
    waiting.ends(1, tool=TOOL, pages=PAGES)
    assert waiting.chance() == 0.5
    waiting.placement.on_returned(JobKey("", "j"))
    assert waiting.chance() == 1.0, "its turn is here"
    waiting.ends(2, pages=PAGES)
    assert waiting.chance() == 0.0


def test_a_wait_for_no_page_changes_no_order() -> None:
    """None of the second turn's pages was saved, so the eviction order keeps the pages of the first
    turn."""
    waiting = Waiting(Forecasts(SOON, SOON))
    waiting.ends(1, pages=PAGES)
    waiting.placement.on_returned(JobKey("", "j"))
    waiting.ends(2, pages=())
    assert waiting.chance() == 1.0
