"""Every event has a metric family on ``/metrics`` that reports its value."""

from __future__ import annotations

import re

import pytest

from tests.doctor.web import metrics
from tiered_kv.doctor.running_server import events, totals
from tiered_kv.metric_families import FAMILIES, PART_OF, SERIES, MetricType, event_of
from tiered_kv.metrics import COUNTERS, GAUGES, HISTOGRAMS, WOULD_HAVE_SAVED

KINDS = {
    MetricType.COUNTER: COUNTERS.keys() | WOULD_HAVE_SAVED.keys(),
    MetricType.GAUGE: GAUGES,
    MetricType.HISTOGRAM: HISTOGRAMS,
}


def test_every_event_has_a_series_of_its_own_and_of_its_kind() -> None:
    assert SERIES.keys() == (
        COUNTERS.keys() | GAUGES.keys() | HISTOGRAMS.keys() | WOULD_HAVE_SAVED.keys()
    )
    whole = {(one.family, *sorted(one.labels.items())) for one in SERIES.values()}
    assert len(whole) == len(SERIES)
    for event, series in SERIES.items():
        assert event in KINDS[FAMILIES[series.family].kind]
        assert series.labels.keys() == FAMILIES[series.family].labels.keys()
    assert {one.family for one in SERIES.values()} == FAMILIES.keys()


def test_families_are_named_and_explained() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert family.text.endswith(".")
        assert bool(family.buckets) == (family.kind is MetricType.HISTOGRAM)
        assert all(re.fullmatch(r"[a-z0-9_]+", v) for vs in family.labels.values() for v in vs)


def test_a_part_has_the_metric_family_of_its_total() -> None:
    for part, whole in PART_OF.items():
        assert SERIES[part].family == SERIES[whole].family


@pytest.mark.parametrize("event", [*COUNTERS, *GAUGES])
def test_an_event_is_read_by_its_name(event: str) -> None:
    wholes = {PART_OF[event]: 3.0} if event in PART_OF else {}
    found = events(metrics(10, **wholes, **{event: 3.0}))
    assert found.keys() == COUNTERS.keys() | GAUGES.keys()
    assert {name: value for name, value in found.items() if value} == {**wholes, event: 3.0}


def test_series_of_prompts_add_up() -> None:
    page = metrics(prompt_tokens_vram=5, prompt_tokens_cpu=4, prompt_tokens_ssd=3)
    assert totals(page)["vllm:tiered_kv_prompt_tokens_total"] == 9
    assert 'source="cpu"} 1.0' in page


def test_engines_are_added_up_and_other_series_ignored() -> None:
    line = 'vllm:tiered_kv_faults_total{{engine="{}",kind="{}"}} 2.0\n'
    page = line.format(0, "hook") + line.format(1, "hook") + line.format(0, "new") + "up 1.0\n"
    assert events(page) == {"hook_errors": 4.0}
    assert event_of("vllm:tiered_kv_turns_created", {}) is None
