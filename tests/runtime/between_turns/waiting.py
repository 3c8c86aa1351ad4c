"""Engines for tests of the time between two turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import Costs, Decision, GapClass, Tier, ToolUse, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import TurnRecord

CONTEXT = text(320, seed=1)
JOB = {"job_id": "j"}
FAST, LONG = ToolUse(("fast",)), ToolUse(("long",))
FORECAST = Forecast(np.minimum(GRID / 100, 1.0))


class ByTool(StatelessPolicy):
    """A policy that pins KV for 30 s after FAST tools, keeps it on SSD after LONG tools, which
    return after a minute, and keeps it in CPU memory after others. Unread tool calls count as
    FAST."""

    reads_tools = True

    def __init__(self) -> None:
        self.asked: list[tuple[TurnEnd, Costs]] = []
        self.seen: list[tuple[int, float, bool]] = []

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        self.asked.append((turn, costs))
        if turn.is_last_step:
            return Decision(Tier.DROP)
        if turn.tool is None or turn.tool == FAST:
            return Decision(Tier.PIN, 30.0, GapClass.FAST, FORECAST)
        if turn.tool == LONG:
            return Decision(Tier.STORE, 0.0, GapClass.SLOW, FORECAST, back_s=60.0)
        return Decision(Tier.CPU, 0.0, GapClass.SLOW, FORECAST)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.seen.append((turn.turn, round(gap_s, 3), ended))


class Reader:
    """A tool reader that returns the tool calls that a test specifies, when the test specifies
    them."""

    def __init__(self) -> None:
        self.asked: dict[str, list[int]] = {}
        self.full = False
        self.dropped = self.errors = 0
        self.answers = (("", FAST),)  # the engine reads this attribute in every step
        self._read: list[tuple[str, ToolUse]] = []

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        if not self.full:
            self.asked[ticket] = list(token_ids)
        self.dropped += self.full
        return not self.full

    def says(self, ticket: str, tool: ToolUse) -> None:
        self._read.append((ticket, tool))

    def take(self) -> list[tuple[str, ToolUse]]:
        read, self._read = self._read, []
        return read

    def close(self) -> None:
        pass


def waiting_rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """Create an engine with all tiers, whose tool calls are read when the test calls ``says``."""
    extra: dict[str, Any] = {
        "cpu_gib": 200 * 16 * CELL / 2**30,
        "ssd_path": str(tmp_path / "ssd"),
        "ssd_gib": 1,
        "codec": "raw",
        "trace": str(tmp_path / "trace.jsonl"),
    }
    rig = make_rig(blocks=128, max_model_len=512, extra=extra, tools=Reader())
    rig.policy = ByTool()
    return rig


def policy(rig: Rig) -> ByTool:
    assert isinstance(rig.policy, ByTool)
    return rig.policy


def reader(rig: Rig) -> Reader:
    assert isinstance(rig.options.tools, Reader)
    return rig.options.tools


def pinned(rig: Rig) -> int:
    return int(rig.pins.held_blocks)


def traced(rig: Rig) -> dict[str, TurnRecord]:
    """Close the engine, and return the turn records of its trace, by request id."""
    rig.close()
    assert rig.options.extra is not None
    reader = TraceReader(Path(rig.options.extra["trace"]))
    found = list(reader)
    assert not reader.bad
    records = {one.request: one for one in found}
    assert len(records) == len(found), "one record a turn"
    return records
