"""A plan's figures, compared with manual calculations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sizing.published import GEMMA3_12B, LLAMA_8B, NEMOTRON_9B, QWEN3_NEXT_80B, write
from tests.sizing.recorded import answer_recorded
from tiered_kv.bench.sim.engine.machines import machine
from tiered_kv.errors import ConfigError
from tiered_kv.sizing.model_shape import read_shape
from tiered_kv.sizing.step_cost import GB, GIB, GPUS, UTILISATION, StepCost, find_gpu
from tiered_kv.sizing.tier_plan import Plan, Setup, make_plan

SETUP = Setup("h100-80", 32_768, None, None, 0.0, 3.0, UTILISATION)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.sizing.model_shape.ask_vllm", answer_recorded)


def planned(
    folder: Path, config: Mapping[str, Any] = LLAMA_8B, *, ranks: int = 1, **changes: Any
) -> Plan:
    shape = read_shape(write(folder, config), gpu=changes.get("gpu", SETUP.gpu), ranks=ranks)
    return make_plan(shape, replace(SETUP, **changes), default_cpu_gib=4.0)


def test_a_gpu_is_found_by_the_beginning_of_its_name() -> None:
    assert find_gpu("H100") == "h100-80"
    assert find_gpu("a100-40") == "a100-40"
    with pytest.raises(ConfigError, match="several GPUs: use one of a100-40, a100-80"):
        find_gpu("a100")
    with pytest.raises(ConfigError, match="is not a known GPU: use one of l4-24"):
        find_gpu("tpu")


def test_every_gpu_has_a_source() -> None:
    assert all(gpu.source for gpu in GPUS.values())


@pytest.mark.parametrize(("gpu", "ranks"), [("h100-80", 1), ("rtx4090-24", 1), ("h100-80", 2)])
def test_a_plan_and_the_simulator_agree_on_llama(tmp_path: Path, gpu: str, ranks: int) -> None:
    """A plan for Llama 3.1 8B agrees with the simulator within 1% on the pool and within 7% on the
    time per token. The simulator's table rounds the parameters, and counts the embeddings as
    computation."""
    plan, simulated = (
        planned(tmp_path, gpu=gpu, ranks=ranks),
        machine(gpu, "llama-3.1-8b", ranks=ranks),
    )
    assert plan.tiers[0].tokens == pytest.approx(simulated.pool_tokens, rel=0.01)
    assert plan.link == simulated.link
    assert plan.cost.pair == pytest.approx(simulated.cost.pair)
    assert plan.cost.kv == pytest.approx(simulated.cost.kv)
    assert plan.cost.token == pytest.approx(simulated.cost.token, rel=0.07)
    assert plan.cost.step == simulated.cost.step


def test_windows_cost_a_plan_what_they_cost_the_simulator(tmp_path: Path) -> None:
    plan, simulated = planned(tmp_path, GEMMA3_12B), machine("h100-80", "gemma-3-12b")
    assert plan.cost.span == simulated.cost.span == 1024
    assert plan.cost.near_pair == pytest.approx(simulated.cost.near_pair)
    assert plan.compute_s == pytest.approx(simulated.cost.whole_prefill(32_768), rel=0.02)


def test_a_layer_with_a_window_never_reads_more_than_the_window() -> None:
    cost = StepCost(0, 0, 0, 0, 0, 0, span=4, near_pair=1.0, near_kv=10.0)
    assert cost.near(1, 3) == 30, "one decoded token reads the whole short context"
    assert cost.near(1, 900) == 40, "and only the window of a long one"
    assert cost.near(3, 3) == 4.5, "a prefill within the window is a triangle"
    assert cost.near(2, 900) == 8, "and later every new token attends to one window"


def test_restores_are_as_fast_as_the_links(tmp_path: Path) -> None:
    plan = planned(tmp_path, cpu_gib=64.0, ssd_gib=100.0, ssd_gbps=4.0)
    vram, cpu, ssd = plan.tiers
    nbytes = 32_768 * 131_072
    assert plan.context_bytes == nbytes == 4 * GIB
    assert vram.restore_s == 0
    assert cpu.restore_s == pytest.approx(nbytes / (52 * GB))
    assert ssd.restore_s == pytest.approx(nbytes / (4 * GB) + cpu.restore_s)
    assert (cpu.contexts, cpu.tokens) == (16, 16 * 32_768)
    assert ssd.contexts == 25


def test_the_break_even_gap_depends_on_the_cost_of_the_tiers_space(tmp_path: Path) -> None:
    plan = planned(tmp_path, cpu_gib=64.0)
    vram, cpu = plan.tiers
    share = 1 / cpu.contexts
    assert cpu.break_even_s * share == pytest.approx(plan.compute_s - cpu.restore_s)
    assert vram.break_even_s / vram.contexts == pytest.approx(plan.compute_s)
    assert plan.pin_s is not None
    assert plan.pin_s / vram.contexts == pytest.approx(cpu.restore_s)


def test_a_disk_slower_than_prefilling_has_no_break_even_gap(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, ssd_gib=100.0, ssd_gbps=0.1)
    assert plan.tiers[2].break_even_s == 0
    assert "Prefilling a context is faster than restoring it from SSD." in plan.notes


def test_cpu_memory_is_sized_to_the_jobs(tmp_path: Path) -> None:
    assert planned(tmp_path).cpu_gib == 4
    assert planned(tmp_path, jobs=20).cpu_gib == 80
    plan = planned(tmp_path, jobs=20, cpu_gib=40.0)
    assert plan.cpu_gib == 40
    assert "No tier holds the contexts of all 20 jobs." in plan.notes
    assert "SSD holds the contexts of all 20 jobs." in (
        planned(tmp_path, jobs=20, cpu_gib=40.0, ssd_gib=100.0).notes
    )
    assert "VRAM holds the contexts of all 10 jobs." in planned(tmp_path, jobs=10).notes
    needless = "Stock vLLM then performs equally well, unless there are more jobs."
    assert needless in planned(tmp_path, jobs=10).notes
    assert needless not in planned(tmp_path, jobs=20).notes


def test_a_tier_without_space_for_a_context_is_reported_with_the_space_needed(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, cpu_gib=1.5)
    assert plan.tiers[1].break_even_s == 0
    assert "CPU memory cannot hold a whole context, which needs 4 GiB." in plan.notes


def test_without_cpu_memory_there_is_no_such_tier(tmp_path: Path) -> None:
    plan = planned(tmp_path, cpu_gib=0.0)
    assert [tier.name for tier in plan.tiers] == ["VRAM"]
    assert plan.pin_s is None


def test_a_model_that_does_not_fit_is_refused_with_the_number_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the memory of 1 x h100-80: use 3 or more GPUs"):
        planned(tmp_path, QWEN3_NEXT_80B)
    assert planned(tmp_path, QWEN3_NEXT_80B, ranks=4).tiers[0].contexts > 1


def test_a_context_that_is_too_long_is_reported(tmp_path: Path) -> None:
    plan = planned(tmp_path, context=200_000, gpu="rtx4090-24")
    assert "The model supports contexts of up to 131,072 tokens." in plan.notes
    assert any("does not fit into VRAM" in note for note in plan.notes)


def test_longer_blocks_are_advised_where_a_context_may_have_thousands(tmp_path: Path) -> None:
    """A plan for contexts of 8,192 blocks advises longer blocks. There is no advice if states
    already make blocks long, or if contexts are shorter."""
    llama, nemotron = (
        read_shape(write(tmp_path, config), gpu=SETUP.gpu) for config in (LLAMA_8B, NEMOTRON_9B)
    )
    advice = [
        [note for note in make_plan(shape, SETUP, 4.0).notes if "--block-size" in note]
        for shape in (
            llama,
            replace(nemotron, max_len=llama.max_len),
            replace(llama, max_len=65_536),
        )
    ]
    assert [len(one) for one in advice] == [1, 0, 0]
    assert "has 8,192 blocks of 16: --block-size 64 " in advice[0][0]
