"""The engine's hooks for a connector, in the order of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .requests import Request


@dataclass(frozen=True, slots=True)
class Loads:
    """Finished loads.

    Attributes:
        requests: ids of requests whose load finished, successfully or not.
        bad: ids of the blocks that could not be filled.
    """

    requests: frozenset[str] = frozenset()
    bad: frozenset[int] = frozenset()


class Offload:
    """Base class of the hooks. Its methods do nothing, as in an engine without a connector."""

    @property
    def busy(self) -> bool:
        """True if an engine without requests must keep stepping."""
        return False

    def arrived(self, request: Request) -> None:
        """Handle the submission of a request."""

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Look up the KV of a waiting request beyond its first ``computed`` tokens.

        Returns:
            Number of further tokens whose KV can be loaded, and True if this KV is loaded
            asynchronously. The number is None if the engine must call again in the next step.
        """
        return 0, False

    def allocated(self, request: Request, loaded: int) -> None:
        """Register blocks allocated to a request.

        Called again with ``loaded=0`` when the request continues after an async load.

        Args:
            loaded: number of tokens whose KV is loaded into the blocks.
        """

    def lacks_block(self, request: Request) -> bool:
        """Free blocks for a running request. Returns True if blocks are free or will soon be, so
        that no request needs to be preempted.
        """
        return False

    def before_forward(self, scheduled: Mapping[str, int]) -> frozenset[int]:
        """Load the KV that this pass needs, and start other loads. Returns the ids of the blocks
        that could not be filled.
        """
        return frozenset()

    def after_forward(self) -> Loads:
        """Save the KV that this pass computed, as ordered. Returns the finished loads."""
        return Loads()

    def step_over(self) -> None:
        """Handle the end of a step. Called after the step's requests have received their tokens."""

    def ended(self, request: Request) -> None:
        """Handle the end of a request, which still owns its blocks."""

    def before_reset(self) -> None:
        """Release every block, because the cached KV becomes invalid."""

    def close(self) -> None:
        """Stop the connector. Idempotent."""
