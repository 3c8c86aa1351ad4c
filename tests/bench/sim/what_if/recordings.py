"""Traces of simulated servers, for tests of what-if analyses."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Machine, Tiers
from tiered_kv.bench.sim.engine.metrics import Outcome
from tiered_kv.bench.sim.servers.servers import Server
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.bench.sim.workloads.workload import Workload
from tiered_kv.sizing.step_cost import StepCost

TRUE = StepCost(step=2e-3, weights=15e-3, token=3e-4, pair=2e-7, kv=1.5e-6, seq=8e-4)
PLACE = Machine("here", 9_600, 23_040, 8_192, TRUE, 4e9, batched_tokens=2_048, max_seqs=64)
CPU_BYTES = 2**33


def jobs(count: int = 24) -> Workload:
    """Return jobs that overload stock vLLM on the machine ``PLACE``."""
    return generate("original", count, 0).at(0.25, 0)


def served(
    policy: str | None,
    work: Workload,
    trace: Path | None = None,
    *,
    cpu_bytes: float = CPU_BYTES,
    job_order: bool = False,
) -> Outcome:
    """Simulate the jobs on a server with this policy, or on stock vLLM if it is None."""
    server = Server(
        policy or "stock", policy, cpu=policy is not None and cpu_bytes > 0, in_job_order=job_order
    )
    return simulate(PLACE, server, work, Tiers(cpu=cpu_bytes), trace)
