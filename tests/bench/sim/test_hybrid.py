"""Simulated models that keep recurrent states or windows in addition to full attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tiered_kv.bench.sim import validate
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Machine, Tiers, machine
from tiered_kv.bench.sim.engine.metrics import Outcome
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.bench.sim.engine.worker import SimWorker
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.connectors.vllm.kv_groups import planning
from tiered_kv.messages import Orders
from tiered_kv.orders import LoadOrder, OrderId, RestoreMode
from tiered_kv.page_group import KvKind
from tiered_kv.testing.vllm.groups import group_pages

NEMOTRON = machine("rtx4090-24", "nemotron-nano-9b-v2", pool_tokens=120 * 1312)
GEMMA = machine("h100-80", "gemma-3-12b", pool_tokens=60_000)
PLACES = {"states": NEMOTRON, "windows": GEMMA}
TURNS = (
    SimTurn(0, 9_000, 700, 5.0, "ls"),
    SimTurn(9_700, 600, 500, 5.0, "ls"),
    SimTurn(10_800, 300, 40, 0.0),
)
NEWS = 9_000 + 600 + 300
"""Tokens of a job that no server has cached when they arrive."""
TIERS = Tiers(cpu=2**33, ssd=2**35)
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def jobs(count: int, apart_s: float = 1.0) -> Workload:
    made = tuple(SimJob(f"job-{n}", apart_s * n, TURNS) for n in range(count))
    return Workload("agents", made, Hints.RIGHT, block=128)


def run(place: Machine, name: str, workload: Workload, tiers: Tiers = TIERS) -> Outcome:
    return simulate(place, server(name), workload, tiers)


def recomputed(outcome: Outcome) -> int:
    return sum(turn.recomputed for job in outcome.jobs for turn in job.turns)


@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "gemma-3-12b"])
def test_groups_are_those_that_vllm_makes(name: str) -> None:
    model = MODELS[name]
    block = model.block or 128
    specs = [replace(group, block_size=block) for group in model.groups]
    pages = {one.spec.kind: one for one in group_pages(specs, model.group_kv_bytes)}
    layers = {KvKind.FULL: model.layers}
    layers |= {KvKind.WINDOW: model.windows.count} if model.windows else {}
    layers |= {KvKind.STATE: model.states.count} if model.states else {}
    every = {
        f"{kind.value}.{n}": pages[kind].vllm_spec()
        for kind, count in layers.items()
        for n in range(count)
    }
    group_layers = planning()._get_kv_cache_groups_uniform_page_size  # noqa: SLF001
    groups = group_layers(every)
    made = [group.layer_names for group in groups]
    ours = sorted(spec.kind.value for spec in specs)
    assert sorted(names[0].partition(".")[0] for names in made) == ours
    assert max(len(names) for names in made) == model.group_layers
    if model.states is not None:
        smallest = min(len(names) for names in made)
        least = min(spec.state_bytes for spec in specs if spec.kind is KvKind.STATE)
        assert least == smallest * model.states.nbytes


def test_a_page_of_attention_is_as_large_as_a_state() -> None:
    model = MODELS["nemotron-nano-9b-v2"]
    assert model.states is not None
    assert (model.states.nbytes, model.block) == (5_316_608, 1312)
    assert model.block * model.layer_bytes >= model.states.nbytes
    assert (model.block - 16) * model.layer_bytes < model.states.nbytes
    assert model.kv_bytes == 16_384, "of four layers"
    assert model.block == machine("h100-80", "nemotron-nano-9b-v2", ranks=2).block


def test_windows_read_and_compare_no_more_than_their_span() -> None:
    cost = GEMMA.cost
    near, span = cost.near, cost.span
    assert near(1, 10 * span) == near(1, span) > near(1, span // 2) > 0
    assert near(span, 100 * span) == pytest.approx(cost.near_pair * span * span)
    assert near(span, span) == pytest.approx(cost.near_pair * span * span / 2)
    assert NEMOTRON.cost.near(1, 1_000) == 0.0


@places
@pytest.mark.parametrize("name", ["fcfs", "thunderagent", "occupancy+cpu+ssd"])
def test_every_job_ends_and_nothing_is_lost(place: Machine, name: str) -> None:
    workload = jobs(8)
    outcome = run(place, name, workload)
    assert list(validate.check(outcome, workload, place)) == []
    assert run(place, name, workload) == outcome, "bit for bit"


@places
def test_a_returning_turn_finds_its_answer_which_stock_vllm_computes_again(place: Machine) -> None:
    alone = jobs(1)
    stock = recomputed(run(place, "infinite", alone))
    ours = run(place, "occupancy+cpu", alone)
    assert recomputed(ours) == NEWS + 2, "and the last token of each answer"
    assert stock >= NEWS + 700 + 500, "though its VRAM has room for everything"
    assert sum(turn.cpu for turn in ours.jobs[0].turns) > 0


def test_states_come_back_from_ssd_when_cpu_memory_is_short() -> None:
    busy, small = jobs(16, apart_s=0.2), replace(TIERS, cpu=2**30)
    with_ssd, without, stock = (
        run(NEMOTRON, name, busy, small) for name in ("lru+cpu+ssd", "lru+cpu", "fcfs")
    )
    assert sum(turn.ssd for job in with_ssd.jobs for turn in job.turns) > 0
    assert recomputed(with_ssd) < min(recomputed(without), recomputed(stock))


def test_a_state_costs_the_same_to_restore_whatever_the_context() -> None:
    """Contexts of 4 and of 40 blocks are restored. In addition to the bytes of attention, which are
    proportional to the tokens, each restore moves one state."""
    moved = []
    for tokens in (1_312 * 4, 1_312 * 40):
        turns = (SimTurn(0, tokens, 1, 400.0), SimTurn(tokens, 100, 1, 0.0))
        filler = SimTurn(0, 1_312 * 55, 1, 0.0)
        others = tuple(SimJob(f"other-{n}", 60.0 + 30 * n, (filler,)) for n in range(4))
        workload = Workload("one", (SimJob("job", 0.0, turns), *others), Hints.RIGHT)
        outcome = run(NEMOTRON, "lru+cpu", workload, Tiers(cpu=2**36))
        (job,) = (one for one in outcome.jobs if one.name == "job")
        attention = job.turns[1].cpu * NEMOTRON.kv_bytes
        assert job.turns[1].cpu == tokens
        moved.append(outcome.moved["up"] - attention)
    assert moved[0] == moved[1] == MODELS["nemotron-nano-9b-v2"].state_bytes


def test_a_restore_has_arrived_when_the_pages_of_every_group_have() -> None:
    worker = SimWorker(replace(NEMOTRON, link=1e9), [1_000_000_000, 2_000_000_000], 0)
    loads = tuple(
        LoadOrder(OrderId(group), group, "r", (1,), (2,), RestoreMode.ASYNC) for group in (0, 1)
    )
    worker.restore(Orders(loads=loads), now=0.0)
    assert worker.report(1.5).finished_recving == set()
    assert worker.report(3.5).finished_recving == {"r"}
    assert worker.next_event == math.inf


def test_a_server_that_restores_full_attention_only_is_refused() -> None:
    with pytest.raises(ValueError, match="choose another model"):
        run(NEMOTRON, "lmcache", jobs(1))
