"""Counters, gauges and histograms for vLLM's log line and for ``/metrics``."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiered_kv.metric_families import FAMILIES, PART_OF, PREFIX, SERIES, Family, MetricType
from tiered_kv.metrics import COUNTERS, GAUGES, HISTOGRAMS, WOULD_HAVE_SAVED


class TieredStats(KVConnectorStats):
    """Stats whose ``data`` maps ``COUNTERS`` to increments, ``GAUGES`` to values, and
    ``HISTOGRAMS`` to lists of values."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> TieredStats:
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            elif name in self.data:
                self.data[name] = self.data[name] + value  # not in place: the list is shared
            else:
                self.data[name] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        said: dict[str, int | float] = {}
        for name, value in self.data.items():
            mean = math.fsum(value) / len(value) if name in HISTOGRAMS else value
            said[name] = round(mean, 3)
        return said


class TieredPromMetrics(KVConnectorPromMetrics):
    """tiered-kv's Prometheus metrics: one per family, with the engine's labels before the family's
    own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: _make(family, metric_types, labelnames) for name, family in FAMILIES.items()
        }
        self._labels = per_engine_labelvalues
        # A bound series is exported, so a managed engine must not bind observe mode's series.
        self._bound = {
            (engine, event): self._bind(engine, event)
            for engine in per_engine_labelvalues
            for event in SERIES.keys() - WOULD_HAVE_SAVED.keys()
        }

    def _bind(self, engine: int, event: str) -> Any:
        family, labels = SERIES[event]
        return self._metrics[family].labels(*self._labels[engine], *labels.values())

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = dict(transfer_stats_data)
        for part, whole in PART_OF.items():  # series do not overlap
            if part in data:
                data[whole] = max(0, data.get(whole, 0) - data[part])
        for name, value in data.items():
            metric = self._bound.get((engine_idx, name))
            if metric is None:
                metric = self._bound[engine_idx, name] = self._bind(engine_idx, name)
            if name in COUNTERS or name in WOULD_HAVE_SAVED:
                metric.inc(value)
            elif name in GAUGES:
                metric.set(value)
            else:
                for one in value:
                    metric.observe(one)


def _make(family: Family, metric_types: dict[Any, Any], labelnames: list[str]) -> Any:
    given: dict[str, Any] = {
        "name": PREFIX + family.name,
        "documentation": family.text,
        "labelnames": [*labelnames, *family.labels],
    }
    match family.kind:
        case MetricType.COUNTER:
            return metric_types[Counter](**given)
        case MetricType.GAUGE:
            return metric_types[Gauge](**given, multiprocess_mode="mostrecent")
        case MetricType.HISTOGRAM:
            return metric_types[Histogram](**given, buckets=family.buckets)
