"""Simulated runs: their agreement with closed-form results, and their exact reproducibility."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiered_kv.bench.sim import validate
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Tiers
from tiered_kv.bench.sim.engine.metrics import TIERS, Outcome
from tiered_kv.bench.sim.engine.virtual_clock_engine import LONGEST_WAIT_S, connector_settings
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.catalogue import TIGHT
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload

SMALL = replace(TIGHT.machine(), pool_tokens=16_000)
RATE = 4.0
"""Jobs per second: more than the small pool can sustain."""


def run(name: str, workload: Workload | None = None, tiers: Tiers | None = None) -> Outcome:
    jobs = workload or generate("original", 20, 0).at(RATE, 0)
    return simulate(SMALL, server(name), jobs, tiers or Tiers(cpu=2**33, ssd=2**34))


def test_a_job_alone_takes_the_sum_of_its_parts() -> None:
    assert abs(validate.job_alone_error()) < validate.EXACT


def test_a_saturated_link_is_what_jobs_wait_for() -> None:
    assert abs(validate.saturated_link_error()) < 0.02


def test_nothing_is_lost_whatever_the_server() -> None:
    assert validate.not_conserved() == []


def test_a_run_repeats_bit_for_bit() -> None:
    for name in ("fcfs", "occupancy+cpu+ssd"):
        assert run(name) == run(name)


def test_another_eviction_rule_evicts_other_pages() -> None:
    tight = Tiers(cpu=3 * 2**30)
    by_worth = run("occupancy+cpu", tiers=tight)
    assert run("occupancy+cpu@worth", tiers=tight).jobs == by_worth.jobs
    assert run("occupancy+cpu@lru", tiers=tight).jobs != by_worth.jobs


def test_leaps_of_the_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(name: str) -> list[float]:
        return [turn.ended_s for job in run(name).jobs for turn in job.turns]

    leapt = times("fcfs")
    monkeypatch.setattr("tiered_kv.bench.sim.engine.virtual_clock_engine.LONGEST_LEAP", 1)
    assert times("fcfs") == pytest.approx(leapt, rel=0.02)


@pytest.mark.parametrize("name", ["fcfs", "continuum", "occupancy+cpu"])
def test_lookups_that_are_remembered_change_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    remembered = run(name)
    lookups = "tiered_kv.bench.sim.engine.virtual_clock_engine.RememberedLookups"
    monkeypatch.setattr(lookups, lambda manager: None)
    assert run(name) == remembered


def test_more_space_and_tiers_below_vram_make_jobs_faster() -> None:
    stock, tiered, infinite = (run(name).summary() for name in ("fcfs", "lru+cpu", "infinite"))
    assert infinite["mean_s"] < stock["mean_s"]
    assert tiered["mean_s"] < 0.8 * stock["mean_s"]
    assert sum(tiered[tier] for tier in TIERS) == pytest.approx(1.0)
    assert tiered["cpu"] > 0.1
    assert stock["cpu"] == 0.0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("occupancy", {}),
        ("occupancy-patient", {"admission_max_wait_s": LONGEST_WAIT_S}),
        ("occupancy-open", {"admission": "off"}),
    ],
)
def test_servers_of_ours_differ_in_how_long_they_hold_a_job(
    tmp_path: Path, name: str, settings: dict[str, object]
) -> None:
    given = connector_settings(server(name), tmp_path, Tiers()) or {}
    assert {key: given[key] for key in given if key.startswith("admission")} == settings


def test_a_server_that_knows_how_long_contexts_get_loses_less() -> None:
    """Eight jobs grow from 1,000 to 6,000 tokens, in a pool of 16,000 tokens that can hold only two
    of them at the end. A server that knows the final lengths recomputes less and finishes jobs
    sooner."""
    turns = tuple(
        SimTurn(shared=1000 * done, added=950, output=50, gap_s=0.05 if done < 5 else 0.0)
        for done in range(6)
    )
    jobs = tuple(SimJob(f"job{number}", 0.1 * number, turns) for number in range(8))
    workload = Workload("growing", jobs, Hints.RIGHT)
    ours, knows = (run(name, workload).summary() for name in ("occupancy", "occupancy-knowing"))
    news = 950 * 6 / sum(turn.prompt for turn in turns)
    assert knows["recomputed"] - news < 0.7 * (ours["recomputed"] - news)
    assert knows["mean_s"] < 0.95 * ours["mean_s"], "and does not do so by letting one in at a time"


def test_pages_come_back_from_ssd_when_cpu_memory_is_short() -> None:
    tiers = Tiers(cpu=2**30, ssd=2**36)
    offloading = run("lru+cpu+ssd", tiers=tiers)
    assert offloading.summary()["ssd"] > 0.3
    assert offloading.promoted_used > 0
    assert 0 <= offloading.summary()["promoted_wasted"] < 0.5
    assert run("lru+cpu").promoted_used == run("fcfs").promoted_used == 0
    assert run("occupancy+cpu+ssd", tiers=tiers).summary()["ssd"] > 0, "most of it stays in VRAM"


def test_a_parent_continues_when_its_sub_agents_are_done() -> None:
    agent = SimJob("parent/agent", 1.0, (SimTurn(0, 500, 400, 0.0),))
    first = SimTurn(0, 1_000, 10, 2.0, "task", (agent,))
    parent = SimJob("parent", 0.0, (first, SimTurn(1_010, 100, 10, 0.0)))
    outcome = run("fcfs", Workload("nested", (parent,), Hints.RIGHT))
    by_name = {job.name: job for job in outcome.jobs}
    child = by_name["parent/agent"]
    assert child.began_s == pytest.approx(by_name["parent"].turns[0].ended_s + 1.0)
    assert by_name["parent"].turns[1].asked_s == pytest.approx(child.ended_s + 2.0)
    assert outcome.summary()["mean_s"] == by_name["parent"].took_s, "agents are no jobs of a user"


def test_jobs_of_one_prefix_share_it() -> None:
    workload = generate("swe-agent", 6, 0).at(0.01, 0)
    alone = tuple(replace(job, prefix=job.name) for job in workload.jobs)
    place, tiers = TIGHT.machine(), Tiers()
    shared = simulate(place, server("fcfs"), workload, tiers).summary()
    apart = simulate(place, server("fcfs"), replace(workload, jobs=alone), tiers).summary()
    assert shared["recomputed"] < apart["recomputed"]


def test_a_job_that_the_pool_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="that_fit"):
        run("fcfs", generate("swe-agent", 6, 0).at(0.01, 0))


@pytest.mark.parametrize("name", ["wrong-hints", "no-hints", "burst", "chat"])
def test_every_workload_ends_under_every_kind_of_hint(name: str) -> None:
    workload = generate(name, 12, 0).at(RATE, 0)
    for one in ("occupancy", "occupancy+cpu"):
        outcome = run(one, workload)
        assert list(validate.check(outcome, workload, SMALL)) == []
