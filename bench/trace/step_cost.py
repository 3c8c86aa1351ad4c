"""Cost of the trace: of a scheduler's step with it, and of a hook without it."""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.bench.overhead import CYCLE, ratios, scheduler_step

CALLS = 10_000
REPEATS = 50


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step with a trace over its time without one.

    Attributes:
        ratio: both with the connector.
        control: two engines without a trace, the slower over the faster, in the same run.
    """

    ratio: float
    control: float


def step_cost(engines: int, tell: Callable[[str], None], *, steps: bool) -> StepCost:
    """Measure steps of 64 requests that answer, as ``bench.overhead`` does.

    Args:
        engines: engines of each kind.
        steps: True if the trace has steps as well.
    """
    rounds = []
    for first in range(engines):
        with tempfile.TemporaryDirectory() as folder:
            off: dict[str, Any] = {"cpu_gib": 0.05}
            traced = {"trace": str(Path(folder) / "trace.jsonl"), "trace_steps": steps}
            extras = {"stock": off, "control": off, "connector": off | traced}
            rounds.append(scheduler_step(first, tell, extras))
    return StepCost(*ratios(rounds, CYCLE))


def off_us() -> float:
    """Time of the dearest hook without a trace, beyond that of an empty call; microseconds."""
    from tiered_kv.connectors.runtime.between_turns.turn_log import TurnTrace
    from tiered_kv.connectors.vllm.connector import TieredContinuumConnector
    from tiered_kv.policies.base import JobKey
    from tiered_kv.trace.turn_record import PinEnd, StoryEnd

    trace = TurnTrace(None, 0, time.monotonic, time.time, lambda _: None)
    job = JobKey("", "job")
    # The hook of every step asks this one question of it.
    connector = TieredContinuumConnector.__new__(TieredContinuumConnector)
    connector._step_trace = None  # noqa: SLF001 - what is measured
    hooks: dict[str, Callable[[], object]] = {
        "step": lambda: None if connector._step_trace is None else 1,  # noqa: SLF001
        "pin": lambda: trace.pin_ended(job, PinEnd.EXPIRED),
        "up": lambda: trace.brought_up(job, 3),
        "over": lambda: trace.over(job, 1.0, StoryEnd.RETURNED),
    }
    nothing = _call_us(lambda: None)
    return max(0.0, max(map(_call_us, hooks.values())) - nothing)


def _call_us(call: Callable[[], object]) -> float:
    """Processor time of a call, the least of some measurements: what is more is the machine's."""
    times = timeit.repeat(call, timer=time.thread_time, number=CALLS, repeat=REPEATS)
    return 1e6 * min(times) / CALLS
