"""Dependencies of the scheduler half: the engine, settings, policies, clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.worker.speed_probe import PrefillWork
from tiered_kv.pages.base import EvictionRule
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.base import TurnPolicy
from tiered_kv.policies.cache.restore_mode import FasterRestore
from tiered_kv.storage.notebook import NoNotebook

from .base import EngineFacts, Fingerprints, MakeRequest
from .policy_state import PolicyState
from .step_timer import StepTimer
from .tool_reader import ToolCalls

Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything that the scheduler half depends on. Tests and simulations replace parts of it.

    Attributes:
        facts: the engine's configuration.
        config: the operator's settings.
        fingerprints: computes the first parts of page keys; closed by ``close``.
        prefill_work: the model's cost of prefills; None if unknown.
        policy: chooses the tier that keeps a finished turn's KV.
        policy_state: saves the learned state of ``policy``; closed by ``close``.
        notebook: records jobs and the ends of turns for the next engine; closed by ``close``.
        eviction: creates the eviction order of CPU memory.
        restore_policy: chooses the restore mode.
        job_forecast: forecasts the remaining course of jobs.
        tools: reads tool calls; closed by ``close``.
        make_request: creates requests that never run, to compute keys of contexts.
        step_timer: measures step times.
        clock: monotonic seconds.
        wall: seconds since the epoch, for the trace.
    """

    facts: EngineFacts
    config: TierConfig
    fingerprints: Fingerprints
    prefill_work: PrefillWork | None
    policy: TurnPolicy
    policy_state: PolicyState
    notebook: NoNotebook
    eviction: EvictionRule
    restore_policy: FasterRestore
    job_forecast: JobForecast
    tools: ToolCalls
    make_request: MakeRequest
    step_timer: StepTimer
    clock: Clock
    wall: Clock

    def close(self) -> None:
        """Save learned state, and stop every thread. Idempotent."""
        self.tools.close()
        self.policy_state.close()
        self.notebook.close()
        self.fingerprints.close()
