"""Prompt tokens as a server counts them on ``/metrics``: the same way for every server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tiered_kv.metric_families import event_of

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
COMPUTED, RESTORED = "local_compute", "external_kv_transfer"
PREEMPTIONS = "vllm:num_preemptions_total"
STUCK = "watchdog_barks"

_GROUPS = re.compile(r"kv cache group sizes \(([0-9, ]+)\)")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of a server, from its start.

    Attributes:
        prompt: tokens of all prompts. computed: those of them that the model computed.
        restored: those that a connector brought.
        preempted: requests that had to give way; what they compute again is in no other figure.
        stuck: times that nothing was computed for half a minute though requests waited.
    """

    prompt: int = 0
    computed: int = 0
    restored: int = 0
    preempted: int = 0
    stuck: int = 0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.prompt - before.prompt,
            self.computed - before.computed,
            self.restored - before.restored,
            self.preempted - before.preempted,
            self.stuck - before.stuck,
        )


def read_counts(metrics: str) -> Counts:
    """Counters in Prometheus' text.

    Raises:
        ValueError: vLLM does not tell where prompts' tokens come from.
    """
    sources, preempted, stuck = dict[str, float](), 0.0, 0.0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == BY_SOURCE:
                source = sample.labels["source"]
                sources[source] = sources.get(source, 0.0) + sample.value
            elif sample.name == PREEMPTIONS:
                preempted += sample.value
            elif event_of(sample.name, sample.labels) == STUCK:
                stuck += sample.value
    if COMPUTED not in sources:
        raise ValueError(f"the server's metrics lack {BY_SOURCE}")
    return Counts(
        prompt=int(sum(sources.values())),
        computed=int(sources[COMPUTED]),
        restored=int(sources.get(RESTORED, 0)),
        preempted=int(preempted),
        stuck=int(stuck),
    )


def group_blocks(log: str) -> list[int]:
    """Tokens of a block of each KV group, as vLLM logs them; empty if it does not."""
    found = _GROUPS.search(log)
    return [int(size) for size in found[1].split(",") if size.strip()] if found else []
