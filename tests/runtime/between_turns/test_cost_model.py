"""The cost of each tier is measured at startup, and then learned from requests."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.worker import speed_probe
from tiered_kv.connectors.runtime.worker.speed_probe import (
    LARGEST_MATRIX,
    fastest_product,
    measure_copies,
    measure_flops,
    prefill_work,
)
from tiered_kv.page_group import Placement, page_layout
from tiered_kv.pages.cpu_index import STAY_EVERY_S
from tiered_kv.policies.base import Costs, Decision, JobKey, TurnEnd
from tiered_kv.policies.baselines.unpinned import Lru
from tiered_kv.policies.pricing.estimators import PRICE
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

JOB = {"job_id": "j"}


class Asked(Lru):
    """A policy that records the costs that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[Costs] = []

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        self.costs.append(costs)
        return super().decide(turn, costs)


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(blocks=128, max_model_len=512)


def test_vram_is_free_on_an_idle_engine(rig: Rig) -> None:
    rig.ask("t1", text(320, seed=1), params=JOB)
    assert rig.costs(320).vram_price == 0.0


def test_an_agent_that_has_the_engine_to_itself_pays_nothing(make_rig: MakeRig) -> None:
    """The agent's context takes most of the pool, but nothing else needs VRAM, so its price is
    0."""
    for admission in ("auto", "off"):
        rig = make_rig(blocks=41, max_model_len=512, extra={"admission": admission})
        rig.policy = asked = Asked()
        rig.add("t1", text(400, seed=1), max_tokens=20, params=JOB)
        while not rig.finished:
            rig.step()
            rig.gaps.costs.measure_demand()
        assert [costs.vram_price for costs in asked.costs] == [0.0]


def test_vram_has_a_price_while_requests_wait_for_it(rig: Rig) -> None:
    for i in range(8):
        rig.add(f"r{i}", text(400, seed=i), max_tokens=60)
    for _ in range(10):
        rig.step()
    rig.gaps.costs.measure_demand()
    assert rig.costs(320).vram_price == PRICE
    rig.run()
    rig.now += 120.0
    rig.gaps.costs.measure_demand()
    assert rig.costs(320).vram_price == 0.0


def test_vram_is_reserved_for_the_oldest_jobs_first(make_rig: MakeRig) -> None:
    """A pin of the oldest job costs nothing, however many jobs started after it. Pins of younger
    jobs cost more."""
    extra = {"cpu_gib": 0.0, "admission": "auto"}
    rig = make_rig(blocks=64, max_model_len=512, extra=extra)
    names = ("first", "second", "third", "fourth")
    for name in names:
        rig.ask(name, text(300, seed=len(name)), params={"job_id": name})
        rig.now += 0.01
    prices = [rig.costs(304, JobKey("", name)).vram_price for name in names]
    assert prices[0] == 0.0
    assert prices[-1] > 0.0
    assert prices == sorted(prices)
    assert rig.costs(304).vram_price == prices[-1], "a job unknown pays for all"


def test_the_cheapest_restore_is_the_one_that_counts(rig: Rig) -> None:
    prices = rig.gaps.costs
    costs = prices.costs(320)
    assert costs.cpu_s == rig.pages.book.copy_seconds(20) > 0
    assert not costs.tiers_s
    rig.gaps.prefills.fit.observe(0, 320, 10.0)
    assert prices.costs(320).recompute_s == pytest.approx(10.0)
    assert prices.costs(320).restore_s == costs.cpu_s


def test_without_cpu_memory_prefilling_is_all_there_is(make_rig: MakeRig) -> None:
    rig = make_rig(extra={"cpu_gib": 0})
    rig.gaps.prefills.fit.observe(0, 320, 10.0)
    costs = rig.costs(320)
    assert (costs.cpu_s, costs.tiers_s) == (None, {})
    assert costs.restore_s == pytest.approx(10.0)


def test_only_turns_whose_kv_left_vram_measure_the_queue(rig: Rig) -> None:
    prompt = text(320, seed=1)
    rig.ask("t1", prompt, params=JOB)
    rig.now += 1.0
    rig.add("t2", prompt, params=JOB)
    rig.now += 5.0
    rig.run()
    assert rig.gaps.costs.queue.mean_s == 0.0, "it was in VRAM"
    rig.now += 10.0
    rig.fill(tag="first")
    rig.add("t3", prompt, params=JOB)
    rig.now += 7.0
    rig.run()
    assert rig.gaps.costs.queue.mean_s == pytest.approx(7.0)


def test_if_cpu_memory_evicts_contexts_a_pin_saves_a_prefill(
    make_rig: MakeRig,
) -> None:
    """Two contexts alternate. CPU memory has space for only one of them, and other requests evict
    both from VRAM. Without a pin, a context is then usually recomputed."""
    rig = make_rig(blocks=128, extra={"cpu_gib": 24 * 16 * 8 / 2**30})
    prices = rig.gaps.costs
    assert prices.survival.share == 1.0
    for turn in range(6):
        for job in range(2):
            rig.ask(f"{job}.{turn}", text(320, seed=job), max_tokens=1, params={"job_id": str(job)})
            rig.now += 100.0
            rig.fill(tag=f"{job}.{turn}")
    assert prices.survival.share < 0.2
    rig.gaps.prefills.fit.observe(0, 320, 10.0)
    costs = prices.costs(320)
    assert costs.restore_s > 0.8 * costs.recompute_s


def test_if_cpu_memory_keeps_contexts_a_pin_saves_a_copy(rig: Rig) -> None:
    rig.gaps.costs.survival.share = 0.5
    for turn in range(7):
        rig.ask(f"t{turn}", text(320, seed=1), max_tokens=1, params=JOB)
        rig.now += 100.0
        rig.fill(tag=f"{turn}")
    assert rig.gaps.costs.survival.share > 0.8


def test_a_client_that_rewrites_its_history_lost_nothing(make_rig: MakeRig) -> None:
    """Each prompt shares only a part of the job's previous context. All tokens of that part are
    found, so nothing counts as lost."""
    rig = make_rig(blocks=128, extra={"admission": "auto"}, max_model_len=512)
    overcommit = rig.gate.overcommit
    head = text(256, seed=1)
    for turn in range(8):
        prompt = head + text(150, seed=100 + turn)
        rig.ask(f"t{turn}", prompt, max_tokens=4, params=JOB)
        rig.now += 5.0
    assert (rig.gaps.costs.survival.share, overcommit.share) == (1.0, 1.0)


@pytest.mark.parametrize("how", ["reset", "aborted"])
def test_pages_missing_for_other_reasons_do_not_count_as_lost(make_rig: MakeRig, how: str) -> None:
    rig = make_rig(blocks=128, extra={"admission": "auto"}, max_model_len=512)
    overcommit = rig.gate.overcommit
    prompt = text(400, seed=1)
    rig.add("t1", prompt, max_tokens=20, params=JOB)
    rig.step()
    if how == "aborted":
        rig.abort("t1")
    rig.run()
    rig.now += 1.0
    if how == "reset":
        assert rig.scheduler.reset_prefix_cache()
    rig.fill()
    rig.ask("t2", prompt, max_tokens=4, params=JOB)
    assert (rig.gaps.costs.survival.share, overcommit.share) == (1.0, 1.0)


def test_a_context_lost_from_cpu_memory_admits_fewer_jobs(make_rig: MakeRig) -> None:
    small = {"cpu_gib": 24 * 16 * 8 / 2**30, "admission": "auto"}
    rig = make_rig(blocks=128, extra=small, max_model_len=512)
    rig.policy = Lru()
    rig.ask("t1", text(320, seed=1), max_tokens=4, params=JOB)
    rig.now += 1.0
    rig.fill()
    rig.ask("t2", text(320, seed=1), max_tokens=4, params=JOB)
    assert rig.gate.overcommit.share < 1.0
    assert rig.gaps.costs.survival.share < 1.0


def test_recomputing_delays_every_request_and_a_copy_delays_none(rig: Rig) -> None:
    """Eight requests run. A recomputation delays all of them, and a copy only the request that
    needs it. The expected delay is weighted by the seconds that each takes."""
    prices = rig.gaps.costs
    rig.gaps.prefills.fit.observe(0, 320, 10.0)
    rig.turns.running = 8
    assert prices.costs(320).held_up == pytest.approx(1.0)
    prices.survival.share = 0.0
    assert prices.costs(320).held_up == pytest.approx(8.0)
    prices.survival.share = 0.5
    assert 7.9 < prices.costs(320).held_up < 8.0, "almost all seconds are computing"


def test_pages_stay_forever_while_slots_are_free(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=128, extra={"cpu_gib": 40 * 16 * 8 / 2**30})
    index = rig.pages.index
    assert index.stay_s() == math.inf
    for i in range(10):
        rig.ask(f"r{i}", text(320, seed=i), max_tokens=1)
        rig.now += STAY_EVERY_S
        index.stay_s()
    taken_per_s = 20 / STAY_EVERY_S
    assert index.stay_s() == pytest.approx(40 / taken_per_s, rel=0.1)


# -- at startup ---------------------------------------------------------------------------


def test_copies_are_timed_and_finished() -> None:
    layout = page_layout([Placement(1, 0, 1 << 16, 0)], 9)
    pool = CpuPool(AnonymousMemory(6 * layout.page_bytes), layout.page_bytes)
    backend = CpuTransfer([layout], np.zeros(9 << 16, np.uint8), pool)
    try:
        assert 1e7 < measure_copies(backend, pool, num_blocks=9) < 1e12
        assert measure_copies(backend, pool, num_blocks=1) == 0.0, "vLLM's null block alone"
        assert backend.poll() == []
    finally:
        backend.close()
        pool.close()


def test_a_slow_machine_is_measured_by_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices grow until the measurement has taken long enough. Where bf16 is emulated, one
    large product takes seconds, which would delay the startup."""
    monkeypatch.setattr(speed_probe, "MATMUL_S", 0.03)
    for flops in (3e8, 7e10, 1e13, 1e15):
        sizes: list[int] = []

        def product_s(size: int, flops: float = flops, sizes: list[int] = sizes) -> float:
            sizes.append(size)
            return 2 * size**3 / flops

        assert fastest_product(product_s) == pytest.approx(flops, rel=0.01)
        assert sum(2 * size**3 / flops for size in sizes) < 1.5 * speed_probe.MATMUL_S
        assert (LARGEST_MATRIX in sizes) == (flops > 1e12)


def test_matrix_products_are_timed() -> None:
    import torch

    assert 1e8 < measure_flops(torch.device("cpu"), torch.float32) < 1e16


SMOL: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}


def test_the_work_of_a_prefill_is_two_operations_for_each_weight_and_token() -> None:
    """SmolLM2-135M has 106.2 million weights without its embeddings."""
    work = prefill_work(SimpleNamespace(hf_text_config=SimpleNamespace(**SMOL)))
    assert work is not None
    assert work.per_token == pytest.approx(2 * 106.2e6, rel=0.001)
    assert work.per_token2 == 2 * 30 * 576
    linear, quadratic = work.estimate(1e12)
    assert linear == pytest.approx(1e3 * work.per_token / 0.5e12)
    assert quadratic == pytest.approx(1e6 * work.per_token2 / 0.5e12)


def test_only_active_experts_count() -> None:
    experts = {**SMOL, "num_experts_per_tok": 8, "moe_intermediate_size": 192}
    work = prefill_work(SimpleNamespace(hf_text_config=SimpleNamespace(**experts)))
    assert work == prefill_work(SimpleNamespace(hf_text_config=SimpleNamespace(**SMOL)))


def test_only_full_attention_layers_read_all_tokens() -> None:
    layers = SMOL["num_hidden_layers"]
    mixed = {**SMOL, "layer_types": ["full_attention"] + ["linear_attention"] * (layers - 1)}
    whole, some = (
        prefill_work(SimpleNamespace(hf_text_config=SimpleNamespace(**shape)))
        for shape in (SMOL, mixed)
    )
    assert whole is not None
    assert some is not None
    assert some.estimate(1e9)[1] == pytest.approx(whole.estimate(1e9)[1] / layers)


class PerLayer:
    """A model configuration whose heads differ between layers."""

    num_hidden_layers, hidden_size, num_attention_heads = 4, 128, 2

    @property
    def head_dim(self) -> int:
        raise RuntimeError("it varies across layers")


def test_a_model_whose_layers_differ_in_size_gives_no_estimate() -> None:
    assert prefill_work(SimpleNamespace(hf_text_config=PerLayer())) is None


def test_a_model_of_unusual_shape_gives_no_estimate() -> None:
    for shape in ({}, {**SMOL, "hidden_size": None}, {**SMOL, "num_attention_heads": 0}):
        assert prefill_work(SimpleNamespace(hf_text_config=SimpleNamespace(**shape))) is None
