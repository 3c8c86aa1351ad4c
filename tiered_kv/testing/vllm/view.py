"""The connector of a rig, as tests look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.connectors.runtime.admission.gate import Admission
from tiered_kv.connectors.runtime.build import AdmissionGroup, GapGroup, Pages
from tiered_kv.connectors.runtime.live_turns import LiveTurns
from tiered_kv.connectors.runtime.pages.lower_tiers import LowerTiers
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.base import Costs, JobKey


class View:
    """Names for the parts of a rig's connector.

    Attributes:
        scheduler: vLLM's scheduler.
        worker: the connector of the worker side; None without ours.
    """

    scheduler: Any
    worker: Any

    @property
    def connector(self) -> Any:
        """The connector of the scheduler side."""
        return self.scheduler.connector

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return _ours(self.connector).scheduler_half

    @property
    def worker_half(self) -> Any:
        """The worker half."""
        return _ours(self.worker).worker_half

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def tables(self) -> Mapping[str, Sequence[Any]]:
        """vLLM's blocks of each request."""
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        tables: Mapping[str, Sequence[Any]] = manager.req_to_blocks
        return tables

    @property
    def turns(self) -> LiveTurns:
        """The live requests, as the connector sees them."""
        turns: LiveTurns = self.half.turns
        return turns

    def turn(self, request_id: str) -> Turn:
        """A live request, as the connector sees it."""
        return self.turns.by_id[request_id]

    @property
    def pages(self) -> Pages:
        """The components that keep pages."""
        pages: Pages = self.half.pages
        return pages

    @property
    def index(self) -> PageIndex:
        """The pages in CPU memory."""
        return self.pages.index

    @property
    def tiers(self) -> LowerTiers:
        """The tiers below CPU memory."""
        return self.pages.tiers

    @property
    def admission(self) -> AdmissionGroup:
        """The components that share VRAM out."""
        admission: AdmissionGroup = self.half.admission
        return admission

    @property
    def pins(self) -> PinTable:
        """The pins."""
        return self.admission.pins

    @property
    def gate(self) -> Admission:
        """Who is held back; with ``admission`` on."""
        gate = self.admission.gate
        assert isinstance(gate, Admission)
        return gate

    def held(self) -> list[str]:
        """Requests that are held back: parked, or in vLLM's own queue."""
        parked = [request.request_id for request in getattr(self.scheduler, "parked", ())]
        return parked or sorted(self.admission.queue.held)

    @property
    def gaps(self) -> GapGroup:
        """The components that decide between turns."""
        gaps: GapGroup = self.half.gaps
        return gaps

    def costs(self, context_tokens: int, job: JobKey | None = None) -> Costs:
        """Costs of each tier now."""
        return self.gaps.costs.costs(context_tokens, job)

    def count(self, name: str) -> int:
        """A counter of the connector."""
        return int(self.half.counters.totals[name])


def _ours(connector: Any) -> Any:
    """Our connector, which may be one of several."""
    parts = getattr(connector, "sub_connectors", (connector,))
    return next(one for one in parts if hasattr(one, "scheduler_half"))
