"""An engine under test with its connector: the interface that all engines provide to tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tiered_kv.connectors.runtime.admission.gate import Admission
from tiered_kv.connectors.runtime.build import GapGroup
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.parts import AdmissionGroup, Pages
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.base import Costs, JobKey, TurnPolicy

from .checked_kv import text
from .policies import FixedPin, SwitchedPolicy


class RigSize(Protocol):
    """Size of an engine.

    The properties are the number of blocks, the tokens per block, the maximum tokens per request,
    and the connector's settings, which are None without a connector.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def extra(self) -> dict[str, Any] | None: ...


class EngineRig(ABC):
    """An engine that tests drive step by step, with access to the components of its connector.

    Attributes:
        now: time on the clock of the engine and its connector, seconds. Tests set the time.
        prompts, outputs: tokens of each request.
        finished: the engine's finish status of each finished request.
        steps: number of steps so far.
        free_at_start: number of free blocks at the start.
        switch: the policy, which tests can replace.
    """

    options: RigSize
    free_at_start: int

    def __init__(self) -> None:
        self.now = 1000.0
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.steps = 0
        self.switch = SwitchedPolicy(FixedPin())

    @property
    @abstractmethod
    def half(self) -> Any:
        """The scheduler half; None for an engine without connector."""

    @property
    @abstractmethod
    def worker_half(self) -> Any:
        """The worker half; None for an engine without connector."""

    @abstractmethod
    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        params: object = None,
        salt: str | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Any:
        """Send a request. Returns the engine's request. ``params`` are the client's hints."""

    @abstractmethod
    def abort(self, request_id: str, *, late: bool = False) -> None:
        """Abort a request. With ``late``, the request is aborted while the next step runs, before
        the step's results are handled, if the engine supports that.
        """

    @abstractmethod
    def aborted(self, request_id: str) -> bool:
        """Return True if a finished request was aborted."""

    @abstractmethod
    def step(self) -> Any:
        """Run one engine step."""

    @abstractmethod
    def run(self, limit: int = 2000) -> None:
        """Step until no work is left.

        Raises:
            AssertionError: work is left after ``limit`` steps.
        """

    @abstractmethod
    def reset_cache(self, *, running: bool = True) -> bool:
        """Forget all cached KV. With ``running``, running requests are preempted and recomputed
        too. Returns False if the engine refuses."""

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Number of free blocks of VRAM."""

    @abstractmethod
    def running(self) -> list[str]:
        """Return the ids of running requests, in the engine's order."""

    @abstractmethod
    def preemptions(self, request_id: str) -> int:
        """Return the number of preemptions of a request."""

    @abstractmethod
    def held(self) -> list[str]:
        """Return the ids of requests that are held back."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and its connector."""

    # -- common to all engines ----------------------------------------------------------

    @property
    def orders_under_way(self) -> bool:
        """True if orders are in flight, including orders for which an idle engine does not step."""
        return self.half is not None and self.half.orders_under_way

    def unfinished(self) -> str:
        """Describe the requests, orders and hints in progress, for the message of a test that does
        not end."""
        requests = sorted(self.prompts.keys() - self.finished.keys())
        if self.half is None:
            return f"requests {requests}"
        orders = [
            (flight.order, flight.report, flight.abandoned) for flight in self.pages.book.flights()
        ]
        restores = {name: (one.restore, one.tiers) for name, one in self.turns.by_id.items()}
        hints = [work.hint for work in self.half.kv_hints.works]
        return f"requests {requests}, running {self.running()}, {orders=}, {restores=}, {hints=}"

    def ask(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> list[int]:
        """Send one request, run until idle, and return its output."""
        self.add(request_id, prompt, **kwargs)
        self.run()
        return self.outputs[request_id]

    def fill(self, rounds: int = 2, *, tag: str = "rival") -> None:
        """Run competing prompts until the whole VRAM pool has been reused."""
        tokens = self.options.max_model_len - 8
        for i in range(rounds * self.options.blocks // self.kept_blocks(tokens) + 1):
            self.ask(f"{tag}-{self.steps}-{i}", text(tokens, seed=self.steps * 1000 + i))

    def kept_blocks(self, tokens: int) -> int:
        """Return the minimum number of blocks that must stay cached for a context of that many
        tokens to be found."""
        return tokens // self.options.block_size

    def inject(self, wrap: Callable[[Any], Any]) -> Any:
        """Replace the worker's transfer backend with the result of ``wrap``, and return the new
        backend."""
        half = self.worker_half
        half.backend = wrap(half.backend)
        return half.backend

    @property
    def worker_halves(self) -> Sequence[Any]:
        """Worker halves of all ranks."""
        return [self.worker_half]

    def wait_for_worker(self) -> None:
        """Wait until every rank has carried out all orders that are due. The next step delivers the
        reports."""
        for half in self.worker_halves:
            for part in (half.backend, half.compressor, half.snapshots):
                if part is not None:
                    part.drain()
            for tier in half.stores.values():
                tier.io.wake()  # the rig's clock has advanced, so some orders may be due
                assert tier.io.wait_idle(300.0), "the I/O thread is stuck"

    def settle(self) -> None:
        """Run until no order is in flight, including compression.

        Raises:
            AssertionError: orders are still in flight after 100 rounds.
        """
        for _ in range(100):
            self.wait_for_worker()
            self.step()
            self.run()
            if not self.pages.book.in_flight:
                return
        raise AssertionError("orders to the workers are still in flight")

    def check_clean(self) -> None:
        """Check that nothing is left over: all blocks are free, the index is consistent, and no
        order, snapshot operation, page reference or turn remains. Also check that no hook raised an
        error.
        """
        lost = self.free_at_start - self.free_blocks
        assert not lost, f"{lost} blocks leaked"
        if self.half is not None:
            self.index.check_integrity()
            assert self.pages.book.in_flight == 0, "orders never settled"
            assert self.pages.dispatch.snapshots.in_flight == 0, "orders of snapshots never settled"
            assert not self.half.snapshots.under_way, "operations never ended"
            assert not self.index.in_use, f"{self.index.in_use} references on pages are left"
            assert not len(self.turns), "turns never finished"
            assert self.count("hook_errors") == 0, "a hook raised"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the connector ------------------------------------------------------------------

    def _change(self, found: Dependencies) -> Dependencies:
        """Replace the connector's policy with a policy that tests can switch. A policy that the
        settings name becomes its first policy."""
        if "policy" in (self.options.extra or {}):
            self.switch.now = found.policy
        return replace(found, policy=self.switch)

    @property
    def policy(self) -> TurnPolicy:
        """The policy that decides where the KV of finished turns is kept."""
        return self.switch.now

    @policy.setter
    def policy(self, policy: TurnPolicy) -> None:
        self.switch.now = policy

    @property
    def turns(self) -> LiveTurns:
        """The turns of all live requests."""
        turns: LiveTurns = self.half.turns
        return turns

    def turn(self, request_id: str) -> Turn:
        """Return the turn of a live request."""
        return self.turns.by_id[request_id]

    @property
    def pages(self) -> Pages:
        """The components that manage pages."""
        pages: Pages = self.half.pages
        return pages

    @property
    def index(self) -> PageIndex:
        """The pages in CPU memory."""
        return self.pages.index

    @property
    def tiers(self) -> Tiers:
        """The tiers below CPU memory."""
        return self.pages.tiers

    @property
    def admission(self) -> AdmissionGroup:
        """The components that divide VRAM among running requests, waiting requests and pins."""
        admission: AdmissionGroup = self.half.admission
        return admission

    @property
    def pins(self) -> PinTable:
        """The table of pins."""
        return self.admission.pins

    @property
    def gate(self) -> Admission:
        """The gate that holds back jobs, if ``admission`` is on."""
        return self.admission.gate

    @property
    def gaps(self) -> GapGroup:
        """The components that work between turns: forecasts, costs and decisions."""
        gaps: GapGroup = self.half.gaps
        return gaps

    def costs(self, context_tokens: int, job: JobKey | None = None) -> Costs:
        """Return the current costs of recomputing a context of that many tokens, or of restoring it
        from each tier."""
        return self.gaps.costs.costs(context_tokens, job)

    def count(self, name: str) -> int:
        """Return the value of a counter of the connector."""
        return int(self.half.counters.totals[name])
