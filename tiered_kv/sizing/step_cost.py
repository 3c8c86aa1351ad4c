"""Cost of an engine's step: the roofline of a model on GPUs.

A step of a batch is taken to last

    step + max(weights, token x tokens) + pair x pairs + kv x read + seq x requests

where ``tokens`` are all tokens computed, ``pairs`` the (query, key) pairs of the attention of
prefills, and ``read`` the tokens of context whose KV decoding reads: the usual roofline, in which
weights are read once a step, matrix products are bound by arithmetic, and decoding by memory.
Pairs and KV are those of layers of full attention; layers of a sliding window have their own, of
no more than the window. A request's states are read and written once a step, whatever its context.

What the parts share of the data sheet's figures: half of the arithmetic, three quarters of the
memory bandwidth.

GPUs: what their makers publish, and what servers get of it.

Sizes are bytes, rates bytes or operations a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.errors import ConfigError

GB, GIB = 1e9, 1 << 30

COMPUTE_SHARE, MEMORY_SHARE = 0.5, 0.75
"""Shares of a data sheet's arithmetic and memory bandwidth that a step is taken to get."""
UTILISATION = 0.92
"""Share of a GPU's memory: vLLM's default (``CacheConfig.gpu_memory_utilization``)."""
RESERVED_BYTES = 1.5 * GB
"""A rank's activations and CUDA graphs."""
HOST_BYTES_PER_S = 150 * GB
"""Rate of a host's memory, which the copies of all ranks share."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One of its kind.

    Attributes:
        memory: bytes. bandwidth: bytes/s of it. flops: dense bf16, per second.
        link: bytes/s to and from pinned host memory that copies reach, each way.
        source: of the first three.
        capability: CUDA's compute capability, by which vLLM chooses kernels.
    """

    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str
    capability: tuple[int, int]


PCIE4, PCIE5 = 24 * GB, 52 * GB
"""Rates of large copies over 16 lanes: about three quarters and four fifths of the raw ones."""

GPUS: Mapping[str, Gpu] = {
    "l4-24": Gpu(24 * GB, 300 * GB, 121e12, PCIE4, "NVIDIA L4 data sheet, 2023", (8, 9)),
    "a10-24": Gpu(24 * GB, 600 * GB, 125e12, PCIE4, "NVIDIA A10 data sheet, 2021", (8, 6)),
    "rtx4090-24": Gpu(24 * GIB, 1008 * GB, 165e12, PCIE4, "NVIDIA Ada architecture, v2.1", (8, 9)),
    "rtx5090-32": Gpu(32 * GIB, 1792 * GB, 209e12, PCIE5, "NVIDIA RTX Blackwell, v1.1", (12, 0)),
    "a100-40": Gpu(40 * GIB, 1555 * GB, 312e12, PCIE4, "NVIDIA A100 data sheet, 2021", (8, 0)),
    "a100-80": Gpu(
        80 * GIB, 2039 * GB, 312e12, PCIE4, "NVIDIA A100 data sheet, 2021 (SXM)", (8, 0)
    ),
    "l40s-48": Gpu(48 * GIB, 864 * GB, 362e12, PCIE4, "NVIDIA L40S data sheet, 2023", (8, 9)),
    "h100-80": Gpu(
        80 * GIB, 3350 * GB, 989e12, PCIE5, "NVIDIA H100 data sheet, 2023 (SXM)", (9, 0)
    ),
    "h200-141": Gpu(
        141 * GB, 4800 * GB, 989e12, PCIE5, "NVIDIA H200 data sheet, 2024 (SXM)", (9, 0)
    ),
}


def find_gpu(name: str) -> str:
    """Find a GPU by its name, or by a beginning that only one has.

    Raises:
        ConfigError: none, or more than one; the message names them.
    """
    wanted = name.lower()
    found = [known for known in GPUS if known == wanted] or [
        known for known in GPUS if known.startswith(wanted)
    ]
    if not wanted or len(found) != 1:
        choices = ", ".join(found if wanted and found else GPUS)
        said = "names several GPUs" if wanted and found else "names no GPU that is known"
        raise ConfigError(f"{name!r} {said}: write one of {choices}.")
    return found[0]


STEP_S = 2e-3
"""Scheduling and launching, a step."""
SEQ_S = 10e-6
"""Scheduling and sampling, a request of a step."""
ALL_REDUCE_S = 15e-6
"""Seconds of one, over NVLink or PCIe; two a layer with tensor parallelism."""
BATCHED_TOKENS = 8192
"""Tokens of a step: the default of vLLM's server on GPUs of 70 GiB and more
(``EngineArgs.get_batch_defaults``)."""


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

    def whole_prefill(self, tokens: int, batched: int = BATCHED_TOKENS) -> float:
        """Time to compute a prompt alone from its first token on, in steps of up to ``batched``
        tokens, seconds; windows count."""
        total = 0.0
        for behind in range(0, tokens, batched):
            new = min(batched, tokens - behind)
            total += self.prefill(behind, new) + self.near(new, behind + new)
        return total


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of a model, over all ranks.

    Attributes:
        weight_bytes: size of the weights.
        active: parameters that a token is multiplied with.
        pair_flops: operations of one (query, key) pair, layers of full attention.
        kv_bytes: of a token, layers of full attention.
        state_bytes: of a request's states.
        all_reduces: in a step, if there are several ranks.
        span, near_pair_flops, near_kv_bytes: the same of layers that see the last ``span`` tokens.
    """

    weight_bytes: float
    active: float
    pair_flops: float
    kv_bytes: float
    state_bytes: float
    all_reduces: int
    span: int = 0
    near_pair_flops: float = 0.0
    near_kv_bytes: float = 0.0


def roofline(gpu: Gpu, ranks: int, work: ModelWork) -> StepCost:
    """Cost of a step of that work on ``ranks`` GPUs of a kind."""
    flops, bandwidth = ranks * COMPUTE_SHARE * gpu.flops, ranks * MEMORY_SHARE * gpu.bandwidth
    return StepCost(
        step=STEP_S + (work.all_reduces * ALL_REDUCE_S if ranks > 1 else 0.0),
        weights=work.weight_bytes / bandwidth,
        token=2 * work.active / flops,
        pair=work.pair_flops / flops,
        kv=work.kv_bytes / bandwidth,
        seq=SEQ_S + 2 * work.state_bytes / bandwidth,
        span=work.span,
        near_pair=work.near_pair_flops / flops,
        near_kv=work.near_kv_bytes / bandwidth,
    )


def link_bytes_per_s(gpu: Gpu, ranks: int) -> float:
    """Rate between VRAM and host memory, each way, over all ranks, bytes/s."""
    return min(ranks * gpu.link, HOST_BYTES_PER_S)
