"""The engine's hooks for whoever keeps KV elsewhere, in the order of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .requests import Request


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads that are over.

    Attributes:
        requests: ids of those whose blocks were being filled, well or not.
        bad: blocks that hold nothing, though they should.
    """

    requests: frozenset[str] = frozenset()
    bad: frozenset[int] = frozenset()


class Offload:
    """Keeps nothing: the engine by itself."""

    @property
    def busy(self) -> bool:
        """True if an engine without requests is to go on stepping."""
        return False

    def arrived(self, request: Request) -> None:
        """Hear of a request that was submitted."""

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Find KV of a waiting request beyond its first ``computed`` tokens.

        Returns:
            Further tokens, and True if they are loaded beside the steps. None: ask in the next one.
        """
        return 0, False

    def allocated(self, request: Request, loaded: int) -> None:
        """Hear of blocks that a request was given, ``loaded`` tokens of which are to be filled;
        again, with none, when it goes on after such a load."""

    def lacks_block(self, request: Request) -> bool:
        """Free blocks for a running request; True if some are free now or soon, so that nobody
        is preempted."""
        return False

    def before_forward(self, scheduled: Mapping[str, int]) -> frozenset[int]:
        """Load what this pass needs, and begin other loads; returns the blocks not filled."""
        return frozenset()

    def after_forward(self) -> Loads:
        """Save what this pass computed, as it is wanted."""
        return Loads()

    def step_over(self) -> None:
        """Hear that the step's requests have their tokens."""

    def ended(self, request: Request) -> None:
        """Hear of a request that is over and still has its blocks."""

    def before_reset(self) -> None:
        """Let go of every block, since what they hold is to be found no more."""

    def close(self) -> None:
        """Stop. Idempotent."""
