"""Cost of an engine's step: the roofline of a model on GPUs.

A step of a batch is estimated to take

    step + max(weights, token x tokens) + pair x pairs + kv x read + seq x requests

where ``tokens`` are all tokens computed, ``pairs`` the (query, key) pairs of the attention of
prefills, and ``read`` the context tokens whose KV is read to decode. This is the usual roofline, in
which weights are read once per step, matrix products are bound by arithmetic, and decoding by
memory. Pairs and KV refer to layers of full attention. Layers with a sliding window have their own
terms, limited to the window. A request's states are read and written once per step, whatever its
context length.

The estimate assumes half of a data sheet's arithmetic rate, and three quarters of its memory
bandwidth.

``GPUS`` lists published specifications.

Sizes are in bytes, rates in bytes or operations per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.errors import ConfigError

GB, GIB = 1e9, 1 << 30

COMPUTE_SHARE, MEMORY_SHARE = 0.5, 0.75
"""Fractions of a data sheet's arithmetic rate and memory bandwidth that a step is assumed to
achieve."""
UTILISATION = 0.92
"""Fraction of a GPU's memory that vLLM uses by default (``CacheConfig.gpu_memory_utilization``)."""
RESERVED_BYTES = 1.5 * GB
"""Memory for a rank's activations and CUDA graphs, bytes."""
HOST_BYTES_PER_S = 150 * GB
"""Bandwidth of host memory, which the copies of all ranks share, bytes per second."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model.

    Attributes:
        memory: size of the GPU's memory, bytes.
        bandwidth: bandwidth of the GPU's memory, bytes per second.
        flops: dense bf16 operations per second.
        link: achieved copy rate to and from pinned host memory, each way, bytes per second.
        source: source of the first three values.
        capability: CUDA compute capability, by which vLLM chooses kernels.
    """

    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str
    capability: tuple[int, int]


PCIE4, PCIE5 = 24 * GB, 52 * GB
"""Rates of large copies over 16 lanes, bytes per second: about three quarters and four fifths of
the raw rates."""

GPUS: Mapping[str, Gpu] = {
    "l4-24": Gpu(24 * GB, 300 * GB, 121e12, PCIE4, "NVIDIA L4 data sheet, 2023", (8, 9)),
    "a10-24": Gpu(24 * GB, 600 * GB, 125e12, PCIE4, "NVIDIA A10 data sheet, 2021", (8, 6)),
    "rtx3090-24": Gpu(
        24 * GIB, 936 * GB, 71e12, PCIE4, "NVIDIA Ampere GA102 architecture, v2.0", (8, 6)
    ),
    "rtx4090-24": Gpu(24 * GIB, 1008 * GB, 165e12, PCIE4, "NVIDIA Ada architecture, v2.1", (8, 9)),
    "rtx5090-32": Gpu(32 * GIB, 1792 * GB, 209e12, PCIE5, "NVIDIA RTX Blackwell, v1.1", (12, 0)),
    "rtxpro6000-96": Gpu(
        96 * GIB,
        1792 * GB,
        504e12,
        PCIE5,
        "NVIDIA RTX Blackwell PRO architecture, v1.1 (Workstation Edition)",
        (12, 0),
    ),
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
    # Sold as 180 GB; the driver reports 183,359 MiB. Hosts of this PCIe 6 device have PCIe 5.
    "b200-180": Gpu(
        179 * GIB, 7700 * GB, 2250e12, PCIE5, "NVIDIA HGX B200 data sheet, 2025", (10, 0)
    ),
}


def find_gpu(name: str) -> str:
    """Return the full name of a GPU, given its name or a unique prefix.

    Raises:
        ConfigError: no GPU or more than one matches. The message lists the choices.
    """
    wanted = name.lower()
    found = [known for known in GPUS if known == wanted] or [
        known for known in GPUS if known.startswith(wanted)
    ]
    if not wanted or len(found) != 1:
        choices = ", ".join(found if wanted and found else GPUS)
        said = "matches several GPUs" if wanted and found else "is not a known GPU"
        raise ConfigError(f"{name!r} {said}: use one of {choices}.")
    return found[0]


STEP_S = 2e-3
"""Time for scheduling and launching a step, seconds."""
SEQ_S = 10e-6
"""Time for scheduling and sampling a request in a step, seconds."""
ALL_REDUCE_S = 15e-6
"""Time of one all-reduce over NVLink or PCIe, seconds; two per layer with tensor parallelism."""
BATCHED_TOKENS = 8192
"""Maximum tokens per step: the default of vLLM's server on GPUs with at least 70 GiB
(``EngineArgs.get_batch_defaults``)."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time components of an engine step, in seconds. See the module docstring.

    Attributes:
        step: fixed time of a step.
        weights: time to read the weights.
        token: time for one computed token.
        pair: time for one (query, key) pair of a prefill.
        kv: time to read one token's KV.
        seq: time for one request, for any number of tokens.
        span: window length of layers with a sliding window, tokens; 0 for none.
        near_pair, near_kv: like ``pair`` and ``kv``, for layers that attend to the last ``span``
            tokens.
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
        """Return the time of a step without the layers with windows, seconds.

        Args:
            tokens: computed tokens.
            pairs: (query, key) pairs of prefills.
            read: context tokens whose KV is read to decode.
            requests: number of requests in the step.
        """
        work = max(self.weights, self.token * tokens)
        return self.step + work + self.pair * pairs + self.kv * read + self.seq * requests

    def near(self, new: int, end: int) -> float:
        """Return the time of the layers with windows for one request in a step, seconds.

        Args:
            new: tokens that the request computes; 1 means that the token is decoded.
            end: length of the request's context after the step.
        """
        if not self.span:
            return 0.0
        if new == 1:
            return self.near_kv * min(end, self.span)
        begin = end - new
        growing = max(
            0, min(end, self.span) - begin
        )  # number of queries that attend to less than a window
        pairs = growing * (begin + growing / 2) + (new - growing) * self.span
        return self.near_pair * pairs

    def prefill(self, behind: int, tokens: int) -> float:
        """Return the time to prefill ``tokens`` tokens after a context of ``behind`` tokens, in one
        step that has no other request, without the layers with windows, seconds.
        """
        return self.seconds(tokens, tokens * (behind + tokens / 2), behind)

    def whole_prefill(self, tokens: int, batched: int = BATCHED_TOKENS) -> float:
        """Return the time to compute a whole prompt alone, in steps of up to ``batched`` tokens,
        including the layers with windows, seconds.
        """
        total = 0.0
        for behind in range(0, tokens, batched):
            new = min(batched, tokens - behind)
            total += self.prefill(behind, new) + self.near(new, behind + new)
        return total


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of a model, over all ranks.

    Attributes:
        weight_bytes: size of the weights, bytes.
        active: number of parameters by which a token is multiplied.
        pair_flops: operations for one (query, key) pair in layers of full attention.
        kv_bytes: bytes of a token's KV in layers of full attention.
        state_bytes: bytes of a request's states.
        all_reduces: number of all-reduces per step with several ranks.
        span: window length of layers with a sliding window, tokens.
        near_pair_flops, near_kv_bytes: like ``pair_flops`` and ``kv_bytes``, for layers with a
            sliding window.
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
    """Return the cost of a step with this work on ``ranks`` GPUs of one type."""
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
    """Return the rate between VRAM and host memory in each direction, over all ranks, bytes per
    second.
    """
    return min(ranks * gpu.link, HOST_BYTES_PER_S)
