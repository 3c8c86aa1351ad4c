"""A simulated machine with the costs of a real one, from two runs of a stock server there."""

from __future__ import annotations

from dataclasses import replace

from tiered_kv.bench.replay.results import Run
from tiered_kv.bench.replay.server_costs import ServerCosts
from tiered_kv.bench.sim.engine.machines import Machine
from tiered_kv.sizing.step_cost import StepCost

STEP_SHARE = 0.1
"""Share of a decoding step alone that is not reading weights: the two cannot be told apart."""
LEAST_OVERHEAD_S = 1e-3


def fit(alone: Run, beside: Run, begin: Machine) -> Machine:
    """``begin`` with the costs that the runs of a stock server tell.

    Args:
        alone: jobs one after the other. beside: several at a time.

    Raises:
        ValueError: a job did not finish, or there are too few turns.
    """
    for job in (*alone.jobs, *beside.jobs):
        if job.error is not None:
            raise ValueError(f"{job.name} did not finish: {job.error}")
    found = ServerCosts.of(alone, beside)
    step = STEP_SHARE * found.step
    cost = StepCost(step, found.step - step, found.token, found.pair, found.kv, found.seq)
    overhead_s = max(LEAST_OVERHEAD_S, found.first - step - found.seq)
    return replace(begin, cost=cost, overhead_s=overhead_s)
