"""A plan: the number of contexts that each tier of a server holds, and the times to restore or
compute a context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.errors import ConfigError
from tiered_kv.page_group import KvKind

from .block_layout import advise_block_size
from .model_shape import KvLayers, ModelShape
from .step_cost import (
    GB,
    GIB,
    GPUS,
    RESERVED_BYTES,
    ModelWork,
    StepCost,
    link_bytes_per_s,
    roofline,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A server, as described by an operator.

    Attributes:
        gpu: name in ``GPUS``.
        context: length of a job's context, tokens.
        jobs: number of concurrent jobs, running or waiting; None if unknown.
        cpu_gib: CPU memory for KV, GiB; None uses the size that the jobs need.
        ssd_gib: SSD space for KV, GiB; 0 for none.
        ssd_gbps: achieved read rate of the SSD, GB/s.
        utilization: fraction of VRAM that vLLM uses.
    """

    gpu: str
    context: int
    jobs: int | None
    cpu_gib: float | None
    ssd_gib: float
    ssd_gbps: float
    utilization: float


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Capacity and restore time of one tier.

    Attributes:
        name: name of the tier.
        nbytes: space for KV, over all ranks, bytes.
        contexts: number of contexts of the given length that the tier holds.
        tokens: number of tokens in these contexts.
        restore_s: time to restore a context from the tier to VRAM, seconds.
        break_even_s: longest gap, in seconds, for which keeping a context in the full tier beats
            recomputing it. At this length, the space that the context occupies costs other jobs as
            many seconds as the context saves. 0 if a whole context does not fit.
    """

    name: str
    nbytes: float
    contexts: float
    tokens: int
    restore_s: float
    break_even_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A server for a model, and its capacity.

    Attributes:
        tiers: tiers, fastest first.
        context_bytes: size of a context, over all ranks, bytes.
        compute_s: time to compute a context, seconds.
        pin_s: longest gap for which a pin in a full pool beats CPU memory, seconds; None without
            CPU memory.
        cpu_gib: CPU memory for KV, given or chosen, GiB.
        link: rate between VRAM and CPU memory, bytes per second.
        cost: cost of steps.
        notes: sentences about assumptions, and about contexts that do not fit.
    """

    setup: Setup
    shape: ModelShape
    tiers: tuple[TierPlan, ...]
    context_bytes: int
    compute_s: float
    pin_s: float | None
    cpu_gib: float
    link: float
    cost: StepCost
    notes: tuple[str, ...]


def make_plan(shape: ModelShape, setup: Setup, default_cpu_gib: float) -> Plan:
    """Return the plan of a server for a model.

    Args:
        default_cpu_gib: CPU memory for KV, GiB, if neither a size nor a number of jobs is given.

    Raises:
        ConfigError: the model does not fit into the GPUs, or there is an SSD without CPU memory.
    """
    gpu, ranks, context = GPUS[setup.gpu], shape.ranks, setup.context
    layout = shape.layout
    pool = _pool_bytes(shape, setup)
    link = link_bytes_per_s(gpu, ranks)
    cost = roofline(gpu, ranks, _work(shape, context))
    compute_s = cost.whole_prefill(context)
    moved = layout.needed_bytes(context) * ranks
    held = layout.held(context)
    slots_bytes = held * layout.slot_bytes * ranks
    cpu_gib = setup.cpu_gib
    if cpu_gib is None:
        needed = math.ceil((setup.jobs or 0) * slots_bytes / GIB)
        cpu_gib = float(needed) if setup.jobs else default_cpu_gib
    if setup.ssd_gib > 0 and cpu_gib == 0:
        raise ConfigError(
            "Pages on SSD pass through CPU memory: set --cpu-gib above 0, or leave out --ssd-gib."
        )

    def tier(name: str, nbytes: float, each: float, restore_s: float) -> TierPlan:
        contexts = nbytes / each
        saved = max(0.0, compute_s - restore_s) if contexts >= 1 else 0.0
        return TierPlan(
            name, nbytes, contexts, int(contexts * context), restore_s, saved * contexts
        )

    up_s = moved / link
    tiers = [tier("VRAM", pool, held * layout.block_bytes * ranks, 0.0)]
    if cpu_gib > 0:
        tiers.append(tier("CPU memory", cpu_gib * GIB, slots_bytes, up_s))
    if setup.ssd_gib > 0:
        read_s = moved / (setup.ssd_gbps * GB)
        pages = layout.held_bytes(context) * ranks
        tiers.append(tier("SSD", setup.ssd_gib * GIB, pages, read_s + up_s))
    return Plan(
        setup=setup,
        shape=shape,
        tiers=tuple(tiers),
        context_bytes=layout.held_bytes(context) * ranks,
        compute_s=compute_s,
        pin_s=min(up_s, compute_s) * tiers[0].contexts if cpu_gib > 0 else None,
        cpu_gib=cpu_gib,
        link=link,
        cost=cost,
        notes=(*shape.notes, *_notes(shape, setup, tiers, compute_s)),
    )


def _pool_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the VRAM that is left for KV, over all ranks, bytes. Raises ConfigError if none is
    left.
    """
    memory = GPUS[setup.gpu].memory
    of_rank = setup.utilization * memory - RESERVED_BYTES
    left = shape.ranks * of_rank - shape.weights.nbytes
    if left <= 0:
        needed = math.ceil(shape.weights.nbytes / of_rank) if of_rank > 0 else 0
        more = f": use {needed} or more GPUs" if needed else ""
        raise ConfigError(
            f"{shape.architecture} with {shape.weights.nbytes / GIB:.1f} GiB of weights does "
            f"not fit into the memory of {shape.ranks} x {setup.gpu}{more}."
        )
    return left


def _work(shape: ModelShape, context: int) -> ModelWork:
    """Return the work of the model. All layers with windows are assumed to have the longest
    window.
    """

    def near(one: KvLayers) -> int:
        span = one.sees or one.reach.span
        return span // 2 if one.kind is KvKind.CHUNK else span

    far = [one for one in shape.kv if one.kind is not KvKind.STATE and not near(one)]
    close = [one for one in shape.kv if one.kind is not KvKind.STATE and near(one)]
    return ModelWork(
        weight_bytes=shape.weights.nbytes,
        active=shape.active_parameters,
        pair_flops=sum(one.layers * one.pair_flops for one in far),
        kv_bytes=shape.ranks * sum(one.layers * one.token_bytes for one in far),
        state_bytes=shape.ranks * sum(one.layers * one.state_bytes for one in shape.kv),
        all_reduces=shape.all_reduces,
        span=max((near(one) for one in close), default=0),
        near_pair_flops=sum(one.layers * one.pair_flops for one in close),
        near_kv_bytes=shape.ranks * sum(one.layers * one.token_bytes for one in close),
    )


def _notes(
    shape: ModelShape, setup: Setup, tiers: Sequence[TierPlan], compute_s: float
) -> list[str]:
    notes = []
    if setup.context > shape.max_len:
        notes.append(f"The model supports contexts of up to {shape.max_len:,} tokens.")
    if tiers[0].contexts < 1:
        notes.append("A context of this length does not fit into VRAM: vLLM would refuse it.")
    for one in tiers[1:]:
        if one.contexts < 1:
            needed = math.ceil(one.nbytes / one.contexts / GIB)
            notes.append(f"{one.name} cannot hold a whole context, which needs {needed:,} GiB.")
        elif one.restore_s >= compute_s:
            notes.append(f"Prefilling a context is faster than restoring it from {one.name}.")
    if setup.jobs is not None:
        fit = [one.name for one in tiers if one.contexts >= setup.jobs]
        whole = f"{fit[0]} holds" if fit else "No tier holds"
        notes.append(f"{whole} the contexts of all {setup.jobs:,} jobs.")
        if fit and fit[0] == tiers[0].name:
            notes.append("Stock vLLM then performs equally well, unless there are more jobs.")
    full = next((one for one in shape.layout.groups if one.reach.kind is KvKind.FULL), None)
    advice = full and advise_block_size(full.block, shape.max_len)
    return [*notes, advice] if advice else notes
