"""The metrics page matches what an engine registers, and promtool accepts all names."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.tools import complaints
from tiered_kv.connectors.vllm.stats import TieredPromMetrics, TieredStats
from tiered_kv.doctor.running_server import events
from tiered_kv.metric_families import PREFIX
from tiered_kv.metrics import COUNTERS, GAUGES, WOULD_HAVE_SAVED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(
    r"^\| `(?P<name>[a-z_]+)`(?: \((?P<kind>histogram)\))? \| (?P<labels>.*?) \| .+\.? \|$", re.M
)
LABEL = re.compile(r"`(\w+)`: ((?:`\w+`(?:, )?)+)")
ENGINE = ("model_name", "engine")


class Metric(NamedTuple):
    """A metric's type, and the possible values of its labels."""

    kind: str
    labels: dict[str, set[str]]


def documented() -> dict[str, Metric]:
    found = {}
    for row in ROW.finditer(PAGE.read_text()):
        labels = {
            name: set(re.findall(r"\w+", some)) for name, some in LABEL.findall(row["labels"])
        }
        assert row["name"] not in found, f"{row['name']} is told twice"
        by_name = "counter" if row["name"].endswith("_total") else "gauge"
        found[PREFIX + row["name"]] = Metric(row["kind"] or by_name, labels)
    return found


class Exported:
    """The connector's metrics as created by vLLM, for two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        self.metrics = TieredPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            made,
            list(ENGINE),
            {0: ["m", "0"], 1: ["m", "1"]},
        )

    def page(self) -> str:
        return generate_latest(self.registry).decode()


@pytest.fixture
def exported() -> Exported:
    return Exported()


def registered(page: str) -> dict[str, Metric]:
    found = {}
    for family in text_string_to_metric_families(page):
        labels: dict[str, set[str]] = {}
        samples = [one for one in family.samples if not one.name.endswith("_created")]
        for sample in samples:
            assert sample.labels.keys() >= set(ENGINE)
            for name, value in sample.labels.items():
                if name not in (*ENGINE, "le"):
                    labels.setdefault(name, set()).add(value)
        if samples:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Metric(family.type, labels)
    return found


def test_every_metric_is_documented_and_exists(exported: Exported) -> None:
    exported.metrics.observe(dict.fromkeys(WOULD_HAVE_SAVED, 1))  # registered in observe mode only
    assert documented() == registered(exported.page())


def test_promtool_accepts_names_and_types(exported: Exported) -> None:
    exported.metrics.observe(everything(), 0)
    assert complaints(exported.page()) == []


def everything() -> dict[str, Any]:
    """Return the value 1 for each event and gauge, and some observations."""
    once = dict.fromkeys((*COUNTERS, *GAUGES), 1)
    return {
        **once,
        "gap_over_median": [0.5, 3.0],
        "gap_over_p90": [0.2, 1.0],
        "hold_seconds": [7.0],
    }


def test_each_engine_has_its_own_series(exported: Exported) -> None:
    exported.metrics.observe({"turns": 2, "prompt_tokens_cpu": 9, "prompt_tokens_ssd": 4}, 0)
    exported.metrics.observe({"turns": 3, "hook_errors": 1}, 1)
    exported.metrics.observe({"turns": 1}, 1)
    page = exported.page()
    for line in (
        'turns_total{engine="0",model_name="m"} 2.0',
        'turns_total{engine="1",model_name="m"} 4.0',
        'prompt_tokens_total{engine="0",model_name="m",source="cpu"} 5.0',
        'prompt_tokens_total{engine="0",model_name="m",source="ssd"} 4.0',
        'faults_total{engine="1",kind="hook",model_name="m"} 1.0',
    ):
        assert f"{PREFIX}{line}\n" in page
    assert events(page)["turns"] == 6


def test_a_gap_at_its_forecast_is_within_it(exported: Exported) -> None:
    exported.metrics.observe({"gap_over_p90": [0.2, 1.0, 1.01]}, 0)
    labels = {"engine": "0", "forecast": "p90", "le": "1.0", "model_name": "m"}
    name = f"{PREFIX}forecast_error_ratio_bucket"
    assert exported.registry.get_sample_value(name, labels) == 2


def test_what_is_logged_is_added_up_and_averaged() -> None:
    first = {"turns": 1, "cpu_pages": 5, "hold_seconds": [1.0]}
    seen = TieredStats(dict(first)).aggregate(
        TieredStats({"turns": 2, "cpu_pages": 4, "hold_seconds": [3.0], "save_seconds": 0.12345})
    )
    assert seen.reduce() == {"turns": 3, "cpu_pages": 4, "hold_seconds": 2.0, "save_seconds": 0.123}
    assert first["hold_seconds"] == [1.0]
