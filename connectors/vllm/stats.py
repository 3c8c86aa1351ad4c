"""Counters and gauges on vLLM's log line and on ``/metrics``."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiered_kv.metrics import COUNTERS, GAUGES, WOULD_HAVE_SAVED

PREFIX = "vllm:tiered_kv_"


class TieredStats(KVConnectorStats):
    """Stats whose ``data`` maps ``COUNTERS`` to increments, and ``GAUGES`` to values."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> TieredStats:
        for name, value in other.data.items():
            if name in COUNTERS or name in WOULD_HAVE_SAVED:
                self.data[name] = self.data.get(name, 0) + value
            else:
                self.data[name] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class TieredPromMetrics(KVConnectorPromMetrics):
    """One Prometheus metric for each name, with the engine's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: metric_types[Counter](
                name=PREFIX + name, documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        gauges = {
            name: metric_types[Gauge](
                name=PREFIX + name,
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }
        # Its labels are made with the first values: an engine that is managed has none.
        self._would_have_saved = metric_types[Counter](
            name=f"{PREFIX}would_have_saved_tokens",
            documentation="Prompt tokens that were computed, as TIERED_KV_MODE=observe moves "
            "nothing, and would have been found in a tier.",
            labelnames=[*labelnames, "tier"],
        )
        self._label_values = per_engine_labelvalues
        self._bound = {
            (engine, name): metric.labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for name, metric in {**counters, **gauges}.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if (tier := WOULD_HAVE_SAVED.get(name)) is not None:
                labels = self._label_values[engine_idx]
                self._would_have_saved.labels(*labels, tier).inc(value)
                continue
            metric = self._bound[engine_idx, name]
            if name in COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
