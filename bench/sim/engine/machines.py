"""Machines: a model on GPUs, with a KV pool and links to lower tiers.

The duration of a step comes from ``tiered_kv.sizing.step_cost``, or is fitted to a real server
(``validate``). Published figures are ratios between servers on the same machine, so they depend
less than times on the assumed fractions of data-sheet values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.page_group import KvKind
from tiered_kv.sizing.step_cost import (
    GB,
    GPUS,
    RESERVED_BYTES,
    UTILISATION,
    ModelWork,
    StepCost,
    link_bytes_per_s,
    roofline,
)
from tiered_kv.testing.vllm.groups import GroupSpec

from .models import MODELS

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Tiers:
    """Sizes of the tiers below VRAM in bytes, for servers that have them."""

    cpu: float = 64 * GIB
    ssd: float = 512 * GIB


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on one or more GPUs.

    Attributes:
        pool_tokens: capacity of the KV pool in VRAM, in tokens if only one page group used it.
        kv_bytes: KV bytes per token in one page group, over all ranks.
        max_len: maximum request length, tokens.
        cost: cost of an engine step.
        link: bytes/s between VRAM and host memory in each direction, over all ranks.
        ssd_read, ssd_write: bytes/s of encoded pages.
        encode, decode: speed of compressing and of decompressing pages in CPU memory, bytes/s: four
            cores with 2.0 and 4.5 GB/s each (``bench.codec``).
        shrinks: False if pages are not compressed in CPU memory.
        batched_tokens, max_seqs: vLLM's limits per step.
        long_prefill: maximum prompt tokens per request in a shared step (vLLM's
            ``--long-prefill-token-threshold``); 0 for no limit.
        prefix_caching: False if requests do not find the KV of earlier requests.
        overhead_s: seconds per request that a client waits in addition to the engine's steps.
        groups: KV types; empty for models with only full attention.
        block: tokens per block; 0 uses the workload's.
    """

    name: str
    pool_tokens: int
    kv_bytes: int
    max_len: int
    cost: StepCost
    link: float
    ssd_read: float = 5 * GB
    ssd_write: float = 4 * GB
    encode: float = 8 * GB
    decode: float = 18 * GB
    shrinks: bool = True
    batched_tokens: int = 8192
    max_seqs: int = 256
    long_prefill: int = 0
    prefix_caching: bool = True
    overhead_s: float = 0.0
    groups: tuple[GroupSpec, ...] = ()
    block: int = 0

    def beside(self, block: int) -> int:
        """Return the space in the pool, in tokens, that a context needs in addition to full
        attention: for its windows, or for its state and a state kept for the next turn.

        Args:
            block: tokens per block.
        """
        narrow = [one for one in self.groups if one.kind is not KvKind.FULL]
        return block * sum(max(2, 1 - (-one.span // block)) for one in narrow)


def machine(gpu: str, model: str, *, ranks: int = 1, pool_tokens: int | None = None) -> Machine:
    """Return a machine with ``ranks`` GPUs that serve a model.

    Args:
        pool_tokens: capacity of the KV pool; None uses the VRAM that the weights leave free.

    Raises:
        ValueError: the GPU or model is unknown, or the model does not fit.
    """
    for what, name, known in (("GPU", gpu, GPUS), ("model", model, MODELS)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: use one of {', '.join(known)}")
    card, net = GPUS[gpu], MODELS[model]
    left = ranks * (UTILISATION * card.memory - RESERVED_BYTES) - net.weight_bytes
    if pool_tokens is None:
        pool_tokens = int(left // net.group_kv_bytes)
    if left <= 0:
        raise ValueError(f"{model} does not fit into the VRAM of {ranks} x {gpu}")
    windows = net.windows
    near = windows.count / net.layers if windows is not None else 0.0
    pair_flops = 4 * net.layers * net.heads * net.head
    work = ModelWork(
        weight_bytes=net.weight_bytes,
        active=net.parameters,
        pair_flops=pair_flops,
        kv_bytes=net.kv_bytes,
        state_bytes=net.state_bytes,
        all_reduces=net.all_reduces,
        span=windows.span if windows is not None else 0,
        near_pair_flops=near * pair_flops,
        near_kv_bytes=near * net.kv_bytes,
    )
    suffix = f"x{ranks}" if ranks > 1 else ""
    return Machine(
        f"{gpu}{suffix}",
        pool_tokens,
        net.group_kv_bytes,
        net.max_len,
        roofline(card, ranks, work),
        link_bytes_per_s(card, ranks),
        groups=net.groups,
        block=net.block,
    )
