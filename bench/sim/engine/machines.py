"""GPUs, models, and what a step of one on the other takes.

A step of a batch is taken to last

    step + max(weights, token x tokens) + pair x pairs + kv x read + seq x requests

where ``tokens`` are all tokens computed, ``pairs`` the (query, key) pairs of the attention of
prefills, and ``read`` the tokens of context whose KV decoding reads: the usual roofline, in which
weights are read once a step, matrix products are bound by arithmetic, and decoding by memory.

What the parts share of the data sheet's figures: half of the arithmetic, three quarters of the
memory bandwidth. The connector's figures do not rest on these: they are ratios between servers
on the same machine. Fitted to a real server they come from ``calibrate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class Model:
    """A dense transformer in bf16.

    Attributes:
        parameters: in all. max_len: tokens of the longest request.
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head: int
    max_len: int
    source: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token: keys and values of all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


MODELS: Mapping[str, Model] = {
    "llama-3.1-8b": Model(8.03e9, 32, 32, 8, 128, 131_072, "config.json of Llama-3.1-8B"),
    "llama-3.1-70b": Model(70.6e9, 80, 64, 8, 128, 131_072, "config.json of Llama-3.1-70B"),
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of the parts of a step; see the module.

    Attributes:
        step: whatever it computes. weights: to read them. token: of one token computed.
        pair: of one (query, key) pair of a prefill. kv: to read one token's KV.
        seq: of one request, whatever it computes.
    """

    step: float
    weights: float
    token: float
    pair: float
    kv: float
    seq: float

    def seconds(self, tokens: int, pairs: float, read: float, requests: int = 1) -> float:
        """Time of a step, seconds."""
        work = max(self.weights, self.token * tokens)
        return self.step + work + self.pair * pairs + self.kv * read + self.seq * requests

    def prefill(self, behind: int, tokens: int) -> float:
        """Time of a prefill alone, in one step, behind a context."""
        return self.seconds(tokens, tokens * (behind + tokens / 2), behind)


@dataclass(frozen=True, slots=True)
class Machine:
    """A server: a model on so many GPUs.

    Attributes:
        pool_tokens: that the KV pool in VRAM holds.
        kv_bytes: of a token, over all ranks.
        link: bytes/s between VRAM and host memory, each way, over all ranks.
        ssd_read, ssd_write: bytes/s of pages, as the codec stores them.
        batched_tokens, max_seqs: vLLM's limits of a step.
        overhead_s: that a client sees of each request beside the engine's steps.
    """

    name: str
    pool_tokens: int
    kv_bytes: int
    max_len: int
    cost: StepCost
    link: float
    ssd_read: float = 5 * GB
    ssd_write: float = 4 * GB
    batched_tokens: int = 8192
    max_seqs: int = 256
    overhead_s: float = 0.0


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
        pool_tokens = int(left // net.kv_bytes)
    if left <= 0:
        raise ValueError(f"{model} does not fit into {ranks} {gpu}")
    flops, bandwidth = ranks * COMPUTE_SHARE * card.flops, ranks * MEMORY_SHARE * card.bandwidth
    cost = StepCost(
        step=STEP_S + (2 * net.layers * ALL_REDUCE_S if ranks > 1 else 0.0),
        weights=net.weight_bytes / bandwidth,
        token=2 * net.parameters / flops,
        pair=4 * net.layers * net.heads * net.head / flops,
        kv=net.kv_bytes / bandwidth,
        seq=SEQ_S,
    )
    suffix = f"x{ranks}" if ranks > 1 else ""
    return Machine(
        f"{gpu}{suffix}",
        pool_tokens,
        net.kv_bytes,
        net.max_len,
        cost,
        min(ranks * card.link, HOST_BYTES_PER_S),
    )
