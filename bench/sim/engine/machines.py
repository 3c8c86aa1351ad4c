"""GPUs, and what a step of a model on one takes.

A step of a batch is taken to last

    step + max(weights, token x tokens) + pair x pairs + kv x read + seq x requests

where ``tokens`` are all tokens computed, ``pairs`` the (query, key) pairs of the attention of
prefills, and ``read`` the tokens of context whose KV decoding reads: the usual roofline, in which
weights are read once a step, matrix products are bound by arithmetic, and decoding by memory.
Pairs and KV are those of layers of full attention; layers of a sliding window have their own, of
no more than the window. A request's states are read and written once a step, whatever its context.

What the parts share of the data sheet's figures: half of the arithmetic, three quarters of the
memory bandwidth. The connector's figures do not rest on these: they are ratios between servers
on the same machine. Fitted to a real server they come from ``calibrate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiered_kv.kv_reach import KvKind
from tiered_kv.testing.vllm.groups import GroupSpec

from .models import MODELS

GB, GIB = 1e9, 1 << 30

COMPUTE_SHARE, MEMORY_SHARE = 0.5, 0.75
UTILISATION = 0.92
"""Share of a GPU's memory: vLLM's default."""
RESERVED_BYTES = 1.5 * GB
"""A rank's activations and CUDA graphs."""
STEP_S = 2e-3
"""Scheduling and launching, a step."""
SEQ_S = 10e-6
"""Scheduling and sampling, a request of a step."""
ALL_REDUCE_S = 15e-6
"""Seconds of one, over NVLink or PCIe; two a layer with tensor parallelism."""
HOST_BYTES_PER_S = 150 * GB
"""Rate of a host's memory, which the copies of all ranks share."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One of its kind.

    Attributes:
        memory: bytes. bandwidth: bytes/s of it. flops: dense bf16, per second.
        link: bytes/s to and from pinned host memory that copies reach, each way.
        source: of the first three.
    """

    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str


PCIE4, PCIE5 = 24 * GB, 52 * GB
"""Rates of large copies over 16 lanes: about three quarters and four fifths of the raw ones."""

GPUS: Mapping[str, Gpu] = {
    "rtx4090-24": Gpu(24 * GIB, 1008 * GB, 165e12, PCIE4, "NVIDIA Ada architecture, v2.1"),
    "rtx5090-32": Gpu(32 * GIB, 1792 * GB, 209e12, PCIE5, "NVIDIA RTX Blackwell, v1.1"),
    "a100-40": Gpu(40 * GIB, 1555 * GB, 312e12, PCIE4, "NVIDIA A100 data sheet, 2021"),
    "l40s-48": Gpu(48 * GIB, 864 * GB, 362e12, PCIE4, "NVIDIA L40S data sheet, 2023"),
    "h100-80": Gpu(80 * GIB, 3350 * GB, 989e12, PCIE5, "NVIDIA H100 data sheet, 2023 (SXM)"),
    "h200-141": Gpu(141 * GB, 4800 * GB, 989e12, PCIE5, "NVIDIA H200 data sheet, 2024 (SXM)"),
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of the parts of a step; see the module.

    Attributes:
        step: whatever it computes. weights: to read them. token: of one token computed.
        pair: of one (query, key) pair of a prefill. kv: to read one token's KV.
        seq: of one request, whatever it computes.
        near_pair, near_kv: as ``pair`` and ``kv``, of layers that see the last ``span`` tokens.
    """

    step: float
    weights: float
    token: float
    pair: float
    kv: float
    seq: float
    span: int = 0
    near_pair: float = 0.0
    near_kv: float = 0.0

    def seconds(self, tokens: int, pairs: float, read: float, requests: int = 1) -> float:
        """Time of a step, seconds, without what windows take."""
        work = max(self.weights, self.token * tokens)
        return self.step + work + self.pair * pairs + self.kv * read + self.seq * requests

    def near(self, new: int, end: int) -> float:
        """Time that windows take in a step, seconds.

        Args:
            new: tokens that a request computes; if it is one, it is decoded.
            end: length of its context then.
        """
        if not self.span:
            return 0.0
        if new == 1:
            return self.near_kv * min(end, self.span)
        begin = end - new
        growing = max(0, min(end, self.span) - begin)  # queries that see less than a window
        pairs = growing * (begin + growing / 2) + (new - growing) * self.span
        return self.near_pair * pairs

    def prefill(self, behind: int, tokens: int) -> float:
        """Time of a prefill alone, in one step, behind a context."""
        return self.seconds(tokens, tokens * (behind + tokens / 2), behind)


@dataclass(frozen=True, slots=True)
class Machine:
    """A server: a model on so many GPUs.

    Attributes:
        pool_tokens: that the KV pool in VRAM holds, in blocks of one page group.
        kv_bytes: of a token in such a block, over all ranks.
        link: bytes/s between VRAM and host memory, each way, over all ranks.
        ssd_read, ssd_write: bytes/s of pages, as the codec stores them.
        encode, decode: bytes/s of pages that are compressed in CPU memory: four cores, 2.0 and 4.5
            GB/s each (``bench.codec``).
        shrinks: False if pages are not compressed there.
        batched_tokens, max_seqs: vLLM's limits of a step.
        overhead_s: that a client sees of each request beside the engine's steps.
        groups: kinds of KV; empty: full attention alone.
        block: tokens of a block; 0: as many as suit a workload.
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
    overhead_s: float = 0.0
    groups: tuple[GroupSpec, ...] = ()
    block: int = 0

    def beside(self, block: int) -> int:
        """Tokens of the pool that a context takes beside its own: its windows, or its state and one
        that is kept for the next turn."""
        narrow = [one for one in self.groups if one.kind is not KvKind.FULL]
        return block * sum(max(2, 1 - (-one.span // block)) for one in narrow)


def machine(gpu: str, model: str, *, ranks: int = 1, pool_tokens: int | None = None) -> Machine:
    """``ranks`` GPUs of a kind with a model.

    Args:
        pool_tokens: of the KV pool; None: what the weights leave.

    Raises:
        ValueError: no such GPU or model, or the model does not fit.
    """
    for what, name, known in (("GPU", gpu, GPUS), ("model", model, MODELS)):
        if name not in known:
            raise ValueError(f"no {what} {name!r}: write one of {', '.join(known)}")
    card, net = GPUS[gpu], MODELS[model]
    left = ranks * (UTILISATION * card.memory - RESERVED_BYTES) - net.weight_bytes
    if pool_tokens is None:
        pool_tokens = int(left // net.group_kv_bytes)
    if left <= 0:
        raise ValueError(f"{model} does not fit into {ranks} {gpu}")
    flops, bandwidth = ranks * COMPUTE_SHARE * card.flops, ranks * MEMORY_SHARE * card.bandwidth
    cost = StepCost(
        step=STEP_S + (net.all_reduces * ALL_REDUCE_S if ranks > 1 else 0.0),
        weights=net.weight_bytes / bandwidth,
        token=2 * net.parameters / flops,
        pair=4 * net.layers * net.heads * net.head / flops,
        kv=net.kv_bytes / bandwidth,
        seq=SEQ_S + 2 * net.state_bytes / bandwidth,
    )
    if net.windows is not None:
        near = net.windows.count / net.layers
        cost = replace(
            cost, span=net.windows.span, near_pair=near * cost.pair, near_kv=near * cost.kv
        )
    suffix = f"x{ranks}" if ranks > 1 else ""
    return Machine(
        f"{gpu}{suffix}",
        pool_tokens,
        net.group_kv_bytes,
        net.max_len,
        cost,
        min(ranks * card.link, HOST_BYTES_PER_S),
        groups=net.groups,
        block=net.block,
    )
