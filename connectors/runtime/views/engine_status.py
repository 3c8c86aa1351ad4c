"""Status of an engine: its tiers, pins, jobs and queues, its counters and gauges."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.observe.observing_half import ObservingHalf
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf


def status(half: SchedulerHalf) -> dict[str, Any]:
    """All of it. Takes time that does not grow with pages, blocks, jobs or requests."""
    config, turns, admission, gaps = half.given.config, half.turns, half.admission, half.gaps
    held = len(admission.gate.held)
    return {
        "engine": half.facts.replica,
        "now": round(half.given.wall(), 3),
        "steps": half.step,
        "mode": _mode(half),
        "policy": config.policy,
        "eviction": config.eviction,
        "admission": config.admission,
        "tiers": [_vram(half), _cpu(half), *_below(half)],
        "pins": {
            "jobs": len(admission.pins),
            "blocks": admission.pins.held_blocks,
            "most_blocks": admission.pins.budget,
        },
        "jobs": {
            "known": len(gaps.manager.jobs),
            "begun": admission.gate.num_active,
            "waiting": len(gaps.manager.open),
            "held": held,
        },
        "queues": {
            "running": turns.running,
            "queued": len(turns) - turns.running - held,
            "held": held,
            "orders_in_flight": half.pages.book.in_flight,
            "prefetches": len(gaps.manager.prefetch),
        },
        "counters": half.stats.totals(),
        "gauges": half.stats.gauges(),
        **_would_have_saved(half),
    }


def _mode(half: SchedulerHalf) -> str:
    if half.given.config.observes:
        return "observe"
    return "offload" if half.pages.index.num_slots else "vram"


def _would_have_saved(half: SchedulerHalf) -> dict[str, Any]:
    """Prompt tokens that an engine which is only observed would have been spared, by tier."""
    if not isinstance(half, ObservingHalf):
        return {}
    return {"would_have_saved": dict(half.would_have_saved)}


def _vram(half: SchedulerHalf) -> dict[str, Any]:
    facts = half.facts
    return {
        "tier": "vram",
        "blocks": facts.usable_blocks,
        "free_blocks": half.pool.num_free(),
        "pinned_blocks": half.admission.pins.held_blocks,
        "block_tokens": facts.block_size,
        "bytes": facts.usable_blocks * facts.slot_bytes * facts.ranks,
    }


def _cpu(half: SchedulerHalf) -> dict[str, Any]:
    index, slot_bytes = half.pages.index, half.facts.slot_bytes * half.facts.ranks
    pages = len(index)
    return {
        "tier": "cpu",
        "pages": pages,
        "slots": index.num_slots,
        "free_slots": index.free_slots,
        "bytes": index.num_slots * slot_bytes,
        "used_bytes": (index.num_slots - index.free_slots) * slot_bytes,
        "compressed_pages": len(index.cold),
        "compressed_slots": index.cold.num_slots,
        "compressed_share": round(len(index.cold) / pages, 4) if pages else 0.0,
    }


def _below(half: SchedulerHalf) -> list[dict[str, Any]]:
    return [
        {
            "tier": tier,
            "pages": found.pages,
            "bytes": found.capacity_bytes,
            "used_bytes": found.stored_bytes,
            "promoting_pages": found.promoting,
            "demoting_pages": found.demoting,
        }
        for tier, found in half.pages.tiers.totals().items()
    ]
