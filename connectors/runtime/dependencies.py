"""Everything that the scheduler half is given: the engine, settings, policies, time."""

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
"""Seconds since some moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything that the scheduler half is given. Tests and simulations replace some of it.

    Attributes:
        facts: the engine.
        config: the operator's settings.
        fingerprints: the first parts of page keys; owned.
        prefill_work: work of the model's prefills; None if that is not known.
        policy: chooses where a finished turn's KV waits.
        policy_state: saves what ``policy`` learns; owned.
        notebook: keeps jobs and the ends of turns for the next engine; owned.
        eviction: makes the order in which pages leave CPU memory.
        restore_policy: chooses how a restore is made.
        job_forecast: forecasts how jobs go on.
        tools: reads tool calls; owned.
        make_request: makes requests that never run, to name contexts.
        step_timer: measures steps.
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
        """Save what was learned, and stop every thread. Idempotent."""
        self.tools.close()
        self.policy_state.close()
        self.notebook.close()
        self.fingerprints.close()
