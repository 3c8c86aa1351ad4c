"""Reports of ``tiered-kv plan``: as JSON, and as tables."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.page_group import KvKind
from tiered_kv.sizing.gpus import COMPUTE_SHARE, GB, MEMORY_SHARE, RESERVED_BYTES
from tiered_kv.sizing.step_cost import BATCHED_TOKENS
from tiered_kv.sizing.tier_plan import Plan, TierPlan

from .terminal import age, size

GROUP_COLUMNS = {
    "KV": False,
    "layers": True,
    "a token": True,
    "a state": True,
    "tokens of a block": True,
    "groups": True,
}
"""Columns of kinds of KV: True if they hold numbers."""

TIER_COLUMNS = {
    "tier": False,
    "for KV": True,
    "contexts": True,
    "tokens": True,
    "back in VRAM": True,
    "beats computing up to": True,
}
"""Columns of tiers: True if they hold numbers."""


def describe_plan(plan: Plan, variables: dict[str, str], words: Sequence[str]) -> dict[str, object]:
    """Describe a plan for ``--json``. Bytes and rates are over all ranks; times are seconds."""
    shape, setup, layout, ranks = plan.shape, plan.setup, plan.layout, plan.shape.ranks
    return {
        "architecture": shape.architecture,
        "gpu": setup.gpu,
        "gpus": ranks,
        "dtype": shape.dtype,
        "kv_dtype": shape.kv_dtype,
        "max_len": shape.max_len,
        "weights_bytes": shape.weights.nbytes,
        "weights_source": shape.weights.source,
        "parameters": shape.parameters.total,
        "active_parameters": shape.parameters.active,
        "kv_bytes_per_token": token_bytes(plan),
        "state_bytes_per_context": state_bytes(plan),
        "kv": [
            {
                "words": one.words,
                "kind": one.kind.value,
                "span": one.reach.span,
                "layers": one.layers,
                "token_bytes": one.token_bytes * one.layers * ranks,
                "state_bytes": one.state_bytes * one.layers * ranks,
            }
            for one in shape.kv
        ],
        "groups": [
            {
                "words": group.words,
                "layers": group.layers,
                "block_tokens": group.block,
                "page_bytes": group.page_bytes * ranks,
            }
            for group in layout.groups
        ],
        "block_bytes": layout.block_bytes * ranks,
        "context": setup.context,
        "context_bytes": plan.context_bytes,
        "compute_s": plan.compute_s,
        "pin_beats_cpu_up_to_s": plan.pin_s,
        "tiers": [
            {
                "name": tier.name,
                "bytes": tier.nbytes,
                "contexts": tier.contexts,
                "tokens": tier.tokens,
                "restore_s": tier.restore_s,
                "beats_computing_up_to_s": tier.break_even_s,
            }
            for tier in plan.tiers
        ],
        "assumptions": assumptions(plan),
        "notes": list(plan.notes),
        "environment": variables,
        "command": list(words),
    }


def token_bytes(plan: Plan) -> float:
    """Bytes of a token in all layers of attention, over all ranks."""
    return plan.shape.ranks * sum(one.layers * one.token_bytes for one in plan.shape.kv)


def state_bytes(plan: Plan) -> int:
    """Bytes of a state in all layers that have one, over all ranks."""
    return plan.shape.ranks * sum(one.layers * one.state_bytes for one in plan.shape.kv)


def heading(plan: Plan) -> list[str]:
    """Lines above the tables."""
    shape, setup = plan.shape, plan.setup
    cards = setup.gpu if shape.ranks == 1 else f"{shape.ranks} {setup.gpu}"
    weights = shape.weights
    parts = [f"{size(token_bytes(plan))} a token"] if token_bytes(plan) else []
    parts += [f"{size(state_bytes(plan))} a state"] if state_bytes(plan) else []
    return [
        f"{shape.architecture} on {cards}: {size(weights.nbytes)} of weights ({weights.source}), "
        f"KV in {shape.kv_dtype}, {' and '.join(parts)}",
        f"a context of {setup.context:,} tokens: {size(plan.context_bytes)} of KV, "
        f"computed in {duration(plan.compute_s)}",
    ]


def group_rows(plan: Plan) -> list[list[str]]:
    """Rows of kinds of KV, under ``GROUP_COLUMNS``."""
    rows = []
    for one in plan.shape.kv:
        groups = [group for group in plan.layout.groups if one.words in group.words.split(" and ")]
        blocks = {group.block for group in groups}
        is_state = one.kind is KvKind.STATE
        total = one.layers * plan.shape.ranks
        rows.append(
            [
                one.words,
                str(one.layers),
                "-" if is_state else size(one.token_bytes * total),
                size(one.state_bytes * total) if is_state else "-",
                ", ".join(f"{block:,}" for block in sorted(blocks)) or "as above",
                str(len(groups)) if groups else "-",
            ]
        )
    return rows


def tier_row(tier: TierPlan) -> list[str]:
    """Row of a tier under ``TIER_COLUMNS``."""
    return [
        tier.name,
        size(tier.nbytes),
        f"{tier.contexts:,.1f}",
        f"{tier.tokens:,}",
        duration(tier.restore_s) if tier.restore_s else "is there",
        age(tier.break_even_s) if tier.break_even_s >= 10 else duration(tier.break_even_s),
    ]


def assumptions(plan: Plan) -> list[str]:
    """Sentences on what the figures are computed from."""
    gpu, setup = plan.gpu, plan.setup
    found = [
        f"Computing: {plan.setup.gpu} has {gpu.flops / 1e12:,.0f} TFLOP/s and "
        f"{gpu.bandwidth / GB:,.0f} GB/s ({gpu.source}), of which {COMPUTE_SHARE:.0%} and "
        f"{MEMORY_SHARE:.0%} are taken to be reached, in steps of {BATCHED_TOKENS:,} tokens.",
        f"Restores from CPU memory: {plan.link / GB:,.0f} GB/s over PCIe.",
        f"VRAM: {setup.utilization:g} of {size(gpu.memory)}, less weights and "
        f"{RESERVED_BYTES / GB:g} GB for activations, on each GPU.",
        "Gaps: the tier is full, and a second of all of it is worth a second of the GPU's time, "
        "as the connector prices VRAM in a shortage.",
    ]
    if setup.ssd_gib > 0:
        found[2:2] = [
            f"Restores from SSD: reads at {setup.ssd_gbps:g} GB/s, then the copy from CPU memory. "
            "Pages are counted as they are; on SSD they are compressed."
        ]
    return found


def duration(seconds: float) -> str:
    """Format a duration, as "35 ms"."""
    if seconds < 0.0095:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
