"""Continuum (arXiv 2511.02230): a time to live from the empirical distribution of a tool's gaps."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.json_fields import Fields, exactly, items, strings
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.forecast.saved_state import numbers
from tiered_kv.policies.tier_choice import unpriced, without_pin

Array = NDArray[np.float64]
Tool = tuple[str, ...]

ENOUGH = 100
"""K: minimum number of recorded gaps of a tool for its distribution to be used."""
MAX_GAPS = 4000
"""Maximum number of gaps kept per tool; the paper keeps all. With more gaps, a decision would take
longer than 100 µs."""
MAX_TOOLS = 128
"""Maximum number of tools. The least recently used tool is dropped first."""
VERSION = 1

ALL: Tool = ()


class _Gaps:
    """The latest gaps of one tool, in order of arrival and sorted by length."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.latest = deque(seconds)
        self.ascending: Array = np.sort(np.array(seconds, np.float64))

    def add(self, gap_s: float) -> None:
        if len(self.latest) >= MAX_GAPS:
            oldest = np.searchsorted(self.ascending, self.latest.popleft())
            self.ascending = np.delete(self.ascending, oldest)
        self.latest.append(gap_s)
        self.ascending = np.insert(self.ascending, np.searchsorted(self.ascending, gap_s), gap_s)


_NONE = _Gaps()


class ToolGaps:
    """The latest gaps of each tool (S[f] in the paper), and of all tools together under the key
    ``ALL``. Not thread-safe."""

    def __init__(self) -> None:
        self._tools: OrderedDict[Tool, _Gaps] = OrderedDict({ALL: _Gaps()})

    def count(self, tool: Tool) -> int:
        """Return the number of stored gaps of a tool."""
        return len(self._tools.get(tool, _NONE).latest)

    def ascending(self, tool: Tool) -> Array:
        """Return the stored gaps of a tool in ascending order, seconds."""
        return self._tools.get(tool, _NONE).ascending

    def latest(self, tool: Tool, count: int) -> Array:
        """Return at most ``count`` of a tool's latest gaps, latest first, seconds."""
        kept = self._tools.get(tool, _NONE).latest
        return np.fromiter(islice(reversed(kept), count), np.float64)

    def observe(self, tools: Iterable[Tool], gap_s: float) -> None:
        """Add a gap to each of these tools. A gap that is negative, infinite or NaN is ignored."""
        if not 0 <= gap_s < math.inf:
            return
        for tool in tools:
            self._tools.setdefault(tool, _Gaps()).add(gap_s)
            self._tools.move_to_end(tool)
        while len(self._tools) > MAX_TOOLS:
            self._tools.popitem(last=False)

    def dump(self) -> dict[str, object]:
        """Return all gaps as JSON."""
        tools = [{"tool": list(t), "gaps": list(g.latest)} for t, g in self._tools.items()]
        return {"version": VERSION, "tools": tools}

    def load(self, saved: Mapping[str, object]) -> None:
        """Restore a state that ``dump`` returned.

        Raises:
            ValueError: ``saved`` is malformed; nothing was changed.
        """
        fields = Fields(saved)
        fields.take("version", exactly, VERSION)
        found: OrderedDict[Tool, _Gaps] = OrderedDict()
        for one in map(Fields, fields.take("tools", items)):
            seconds = one.take("gaps", numbers, -1, least=0)[-MAX_GAPS:]
            found[one.take("tool", strings)] = _Gaps(seconds.tolist())
        if ALL not in found or len(found) > MAX_TOOLS:
            raise ValueError(
                "the saved gaps lack the entry for all tools together, or list too many tools"
            )
        self._tools = found


class _OfToolGaps:
    """Base of both variants of Continuum."""

    reads_tools: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gaps = ToolGaps()

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        if ended:  # neither variant considers gaps that never end
            self.gaps.observe({ALL, _tool(turn)}, gap_s)

    def dump(self) -> dict[str, object]:
        return self.gaps.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.gaps.load(learned)


class Continuum(_OfToolGaps):
    """The published rule: a turn is pinned for τ* = argmax of P(τ) (T η + R) - τ, over the recorded
    gaps and 0. P is the distribution of the tool's gaps; ``Costs`` describes T, η and R.

    With fewer than 100 gaps of the tool, P is the distribution over all tools. With fewer than 100
    gaps in total, P is the exponential distribution with mean 1 s, and η is 1, so that τ* is
    ln(T + R), or 0 if that is negative.
    """

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        ttl_s = time_to_live(self.gaps, _tool(turn), costs)
        return pinned(ttl_s, costs)


class ContinuumFixed(_OfToolGaps):
    """The rule of the released code.

    A turn is pinned for exactly 2.0 s if the mean gap of its tool is at most 2.0 s, or if the tool
    has no gap yet. A turn without a tool call is not pinned.
    """

    ttl_s: ClassVar[float] = 2.0

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        gaps = self.gaps.ascending(_tool(turn))
        fast = turn.tool != NO_TOOL and (not len(gaps) or gaps.mean() <= self.ttl_s)
        return pinned(self.ttl_s if fast else 0.0, costs)


def time_to_live(gaps: ToolGaps, tool: Tool, costs: Costs) -> float:
    """Return Continuum's τ*, the time for which to pin a turn's KV after a call of ``tool``,
    seconds; 0 if no pin pays off."""
    if gaps.count(ALL) < ENOUGH:
        return max(0.0, math.log(max(costs.queue_s + costs.restore_s, 1e-9)))
    seconds = gaps.ascending(tool if gaps.count(tool) >= ENOUGH else ALL)
    gains = np.arange(1, len(seconds) + 1) / len(seconds) * costs.benefit_s - seconds
    best = int(gains.argmax())
    return float(seconds[best]) if gains[best] > 0 else 0.0


def pinned(ttl_s: float, costs: Costs) -> Decision:
    """Return the decision to pin for ``ttl_s`` seconds. If ``ttl_s`` is 0, return the decision for
    the best tier outside VRAM for a short gap."""
    if ttl_s > 0:
        return Decision(Tier.PIN, ttl_s)
    return Decision(without_pin(costs, 0.0))


def _tool(turn: TurnEnd) -> Tool:
    return turn.tool.path[:2] if turn.tool else ALL
