"""The default policy: a forecast of the gap, and VRAM charged for the time it is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from .base import Costs, Decision, TurnEnd
from .tier_choice import choose, unpriced

if TYPE_CHECKING:
    from tiered_kv.policies.forecast.gap_model import GapModel


class Occupancy:
    """The default policy. See ``forecast.gap_model`` for the forecast, ``pricing.pin_value`` for
    the price, and ``tier_choice`` for the rest."""

    reads_tools: ClassVar[bool] = True

    def __init__(self) -> None:
        # Imports numba, whose library vLLM 0.32 stumbles over if it is there when a CPU worker
        # starts. A policy is made after that, but this module is imported before.
        from tiered_kv.policies.forecast.gap_model import GapModel

        self.model: GapModel = GapModel()

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return unpriced(turn) or choose(turn, self.model.forecast(turn), costs)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.model.observe(turn, gap_s, ended=ended)

    def refit(self) -> None:
        self.model.refit()

    def dump(self) -> dict[str, object]:
        return self.model.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.model.load(learned)
