"""One metric family on ``/metrics`` reports by tier what an observed engine would have saved. In
manage mode it has no samples."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tiered_kv.connectors.vllm.stats import TieredPromMetrics, TieredStats

FAMILY = "vllm:tiered_kv_would_have_saved_tokens"


def made(registry: CollectorRegistry) -> TieredPromMetrics:
    """Return the metrics of two engines."""
    kinds: dict[Any, Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    labels = ["model_name", "engine"]
    return TieredPromMetrics(config, kinds, labels, {0: ["m", "0"], 1: ["m", "1"]})


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the values of the family by engine and tier."""
    return {
        (sample.labels["engine"], sample.labels["tier"]): sample.value
        for family in registry.collect()
        if family.name == FAMILY
        for sample in family.samples
        if sample.name == f"{FAMILY}_total"
    }


def test_tokens_are_counted_by_tier_and_engine() -> None:
    registry = CollectorRegistry()
    metrics = made(registry)
    metrics.observe({"turns": 2, "would_have_saved_vram": 16, "would_have_saved_cpu": 0})
    metrics.observe({"would_have_saved_vram": 4, "would_have_saved_ssd": 8}, 1)
    metrics.observe({"would_have_saved_vram": 16})
    assert samples(registry) == {
        ("0", "vram"): 32,
        ("0", "cpu"): 0,
        ("1", "vram"): 4,
        ("1", "ssd"): 8,
    }


def test_a_managed_engine_has_no_samples() -> None:
    registry = CollectorRegistry()
    made(registry).observe({"turns": 2, "cpu_pages": 7})
    assert samples(registry) == {}


def test_increments_of_several_steps_add_up() -> None:
    first = TieredStats(data={"would_have_saved_cpu": 5, "cpu_pages": 3})
    second = TieredStats(data={"would_have_saved_cpu": 2, "cpu_pages": 4})
    assert first.aggregate(second).data == {"would_have_saved_cpu": 7, "cpu_pages": 4}
