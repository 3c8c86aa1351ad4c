"""Validity of the simulator: closed forms, conservation, and a real server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiered_kv.bench.sim.engine.driver import Tiers, simulate
from tiered_kv.bench.sim.engine.machines import Machine
from tiered_kv.bench.sim.engine.metrics import Outcome
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.cells import Source
from tiered_kv.bench.sim.study.presets import AMPLE, TIGHT
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.sizing.step_cost import StepCost

EXACT = 1e-6
"""Error that rounding may add to a closed form."""
LINK_BYTES_PER_S = 1e9
SHORT_POOL = 16_000
"""Tokens: room for five of the jobs that are run to see whether anything is lost."""
SERVERS = ("fcfs", "job-fcfs", "autellix", "thunderagent", "lmcache", "continuum", "infercept")
TIERED = ("occupancy", "occupancy+cpu", "occupancy+cpu+ssd", "clairvoyant+cpu", "occupancy-knowing")


def job_alone_error() -> float:
    """Relative error of one job's completion time against the sum of its parts."""
    place = AMPLE.machine()
    (job,) = Source("original", 1).jobs_for(place, 0).jobs
    workload = Workload("alone", (job,), Hints.RIGHT)
    outcome = simulate(place, server("fcfs"), workload, Tiers())
    wanted = expected_alone_s(job, place, workload.block)
    return outcome.jobs[0].took_s / wanted - 1


def expected_alone_s(job: SimJob, place: Machine, block: int) -> float:
    """Prefills of what no full block of the turn before holds, a step for every further token,
    and the gaps."""
    total, known = 0.0, 0
    for turn in job.turns:
        cached = min(known, turn.shared, turn.prompt - 1) // block * block
        at = cached
        while at < turn.prompt:
            chunk = min(place.batched_tokens, turn.prompt - at)
            pairs = chunk * (at + chunk / 2) if chunk > 1 else 0.0
            total += place.cost.seconds(chunk, pairs, 0 if chunk > 1 else at + 1)
            at += chunk
        for said in range(1, turn.output):
            total += place.cost.seconds(1, 0.0, turn.prompt + said)
        total += turn.gap_s
        known = turn.prompt + turn.output - 1
    return total


def saturated_link_error() -> float:
    """Jobs that all come back at once, with everything in CPU memory and computing for nothing:
    relative error of the time until the last is answered against their bytes over the link's
    bandwidth."""
    free = StepCost(step=1e-6, weights=0.0, token=1e-9, pair=0.0, kv=0.0, seq=0.0)
    base = TIGHT.machine()
    place = replace(base, cost=free, link=LINK_BYTES_PER_S, max_seqs=4)
    tokens, away_s, count = 8_000, 400.0, 24
    turns = (SimTurn(0, tokens, 1, away_s), SimTurn(tokens + 1, 63, 1, 0.0))
    jobs = tuple(SimJob(f"job-{n}", 0.0, turns) for n in range(count))
    workload = Workload("link", jobs, Hints.RIGHT)
    outcome = simulate(place, server("lru+cpu"), workload, Tiers())
    back = [job.turns[1] for job in outcome.jobs]
    took = max(turn.ended_s for turn in back) - min(turn.asked_s for turn in back)
    restored = sum(turn.cpu for turn in back) * place.kv_bytes
    return took / (restored / LINK_BYTES_PER_S) - 1


def not_conserved() -> list[str]:
    """Losses, a sentence each: of tokens, answers or time. Blocks and orders are checked at
    the end of every run."""
    place = replace(TIGHT.machine(), pool_tokens=SHORT_POOL)
    workload = Source("original", 24).jobs_for(place, 1).at(4.0, 1)
    lost = []
    for name in (*SERVERS, *TIERED):
        outcome = simulate(place, server(name), workload, Tiers(2**30, 2**32))
        lost += [f"{name}: {what}" for what in check(outcome, workload, place)]
    return lost


def check(outcome: Outcome, workload: Workload, place: Machine) -> list[str]:
    """Find what an outcome's records leave out of a workload."""
    found = []
    sent = {job.name: job for one in workload.jobs for job in one.everyone()}
    if {job.name for job in outcome.jobs} != set(sent):
        found.append("jobs are missing")
    for record in outcome.jobs:
        job = sent[record.name]
        if [(t.prompt, t.output) for t in record.turns] != [
            (t.prompt, t.output) for t in job.turns
        ]:
            found.append(f"{job.name} said something else")
        if any(min(t.vram, t.cpu, t.ssd, t.recomputed) < 0 for t in record.turns):
            found.append(f"{job.name} found more than its prompt")
        decode_s = sum((t.output - 1) * place.cost.seconds(1, 0, t.prompt) for t in job.turns)
        least = decode_s + math.fsum(t.gap_s for t in job.turns)
        if record.took_s < least * (1 - EXACT):
            found.append(f"{job.name} took {record.took_s:.3f} s, less than {least:.3f} s")
    return found


def equal_orders(pairs: Sequence[tuple[float, float]], apart: float = 0.05) -> bool:
    """True if every two figures that are more than ``apart`` from each other in truth stand in the
    same order when simulated.

    Args:
        pairs: of real and simulated figures.
    """
    for real_a, sim_a in pairs:
        for real_b, sim_b in pairs:
            if real_a > real_b * (1 + apart) and sim_a <= sim_b:
                return False
    return True
