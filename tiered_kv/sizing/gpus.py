"""GPUs: what their makers publish, and what servers get of it.

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
