"""The connector's scheduler half and worker half, called by the engine's hooks. The engine uses the
runtime only through this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies
from tiered_kv.connectors.runtime.kv_events import KvEvent
from tiered_kv.connectors.runtime.observe.observation import make_worker_half
from tiered_kv.connectors.runtime.policy_state import PolicyState
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.tool_reader import NoTools
from tiered_kv.messages import Orders
from tiered_kv.policies import registry
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.cache.restore_mode import FasterRestore
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.storage.notebook import folder_for_notes, open_notebook

from .engine import Engine
from .offload import Loads, Offload
from .port import (
    OneModel,
    PortPool,
    PortRequest,
    base_fingerprint,
    named_request,
    read_facts,
)
from .requests import Request


class Halves(Offload):
    """Both halves of the connector, for one rank. Errors are raised, so that tests see them.

    Args:
        engine: the engine, before its first request.
        config: the settings.
        clock: returns monotonic seconds.
        change: returns the connector's dependencies with some of them replaced.
    """

    def __init__(
        self,
        engine: Engine,
        config: TierConfig,
        clock: Clock,
        change: Callable[[Dependencies], Dependencies] = lambda found: found,
    ) -> None:
        facts = read_facts(engine.size)
        fingerprint = base_fingerprint(facts)
        self.worker = make_worker_half(facts, config, 0, lambda: (fingerprint,), clock)
        self.worker.register([engine.model.cache])
        policy = registry.policy(config.policy)
        notes = folder_for_notes(config.notes_path)
        state = PolicyState(policy, notes, config.policy)
        state.load()
        deps = Dependencies(
            facts=facts,
            config=config,
            fingerprints=OneModel(fingerprint),
            prefill_work=None,
            policy=policy,
            policy_state=state,
            notebook=open_notebook(notes, facts.replica, keep=config.keeps_notes),
            eviction=registry.eviction(config.eviction),
            restore_policy=FasterRestore(),
            job_forecast=JobForecast(),
            tools=NoTools(),
            make_request=named_request,
            step_timer=StepTimer(),
            clock=clock,
            wall=clock,
        )
        self.scheduler = SchedulerHalf(change(deps), PortPool(engine.pool))
        said = self.worker.handshake()
        # The model performs no matrix products, so an estimate of prefill time would be wrong.
        said = replace(said, speeds=replace(said.speeds, flops=0.0))
        self.scheduler.on_handshake({0: said})
        self._orders = Orders()

    @property
    def busy(self) -> bool:
        return self.scheduler.has_pending_push_work()

    def arrived(self, request: Request) -> None:
        self.scheduler.on_arrived(PortRequest(request), read_hints(request.params, None, None))

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request.request_id, computed)

    def allocated(self, request: Request, loaded: int) -> None:
        self.scheduler.on_allocated(request.request_id, loaded)

    def lacks_block(self, request: Request) -> bool:
        return self.scheduler.release_for_running()

    def before_forward(self, scheduled: Mapping[str, int]) -> frozenset[int]:
        self._orders = self.scheduler.build_orders(scheduled)
        self.worker.start(self._orders)
        return frozenset(self.worker.bad_blocks)

    def after_forward(self) -> Loads:
        self.worker.save(self._orders)
        arrived = frozenset(self.worker.finish().requests)
        return Loads(arrived, frozenset(self.worker.take_bad_blocks()))

    def step_over(self) -> None:
        if (reports := self.worker.take_reports()) is not None:
            self.scheduler.on_reports(reports)

    def take_events(self) -> Sequence[KvEvent]:
        """Return the KV events of the last step."""
        events = self.scheduler.events
        return events.take() if events is not None else ()

    def ended(self, request: Request) -> None:
        self.scheduler.on_finished(request.request_id)

    def before_reset(self) -> None:
        self.scheduler.before_reset()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
