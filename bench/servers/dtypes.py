"""Chooses the fastest dtype for serving a model without a GPU.

    python -m bench.servers.dtypes

vLLM's CPU build computes bf16 natively where the processor has AVX512-BF16 or AMX. Without AVX-512,
bf16 is emulated, and float32 is two to six times as fast. On processors with AVX-512 but without
either extension, a matrix product is timed in both dtypes.

The features are queried from PyTorch, as vLLM does, in a separate process, because few programs
that start a server have PyTorch loaded.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BF16, FLOAT32 = "bfloat16", "float32"

TOKENS, WIDTH = 256, 1024
"""Number of rows, and edge length of the square matrix, in the timed products."""
TIMED_S = 0.3


class DtypeError(RuntimeError):
    """PyTorch could not be queried. The message contains the end of its output."""


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Instruction sets of the processor that determine how bf16 is computed."""

    avx512: bool
    avx512_bf16: bool
    amx: bool


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype under vLLM's name, and a short reason for the choice."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(features: CpuFeatures, product_s: Callable[[str], float]) -> Dtype:
    """Choose the dtype by the processor's features or, if these are inconclusive, by a measurement.

    Args:
        product_s: returns the time of a matrix product in the given dtype, seconds.
    """
    if features.amx:
        return Dtype(BF16, "this CPU has AMX, which computes bfloat16 natively")
    if features.avx512_bf16:
        return Dtype(BF16, "this CPU has AVX512-BF16, which computes bfloat16 natively")
    if not features.avx512:
        return Dtype(FLOAT32, "this CPU has no AVX-512, so bfloat16 is emulated")
    ratio = product_s(BF16) / product_s(FLOAT32)
    slower = f"takes {ratio:.1f} times as long as float32 on this CPU"
    return Dtype(FLOAT32 if ratio > 1 else BF16, f"bfloat16 {slower}")


@functools.cache
def cpu_dtype() -> Dtype:
    """Return the dtype for this machine. It is determined once per process.

    Raises:
        DtypeError: PyTorch is missing or broken.
    """
    # -P: the modules next to this file must not shadow torch's imports.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return Dtype(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise DtypeError(f"PyTorch did not report the features of this CPU:\n{tail}") from None


def read_features() -> CpuFeatures:
    """Return the processor's features, as PyTorch reports them to vLLM."""
    from torch import cpu

    return CpuFeatures(
        cpu._is_avx512_supported(),  # noqa: SLF001 - torch has no public function
        cpu._is_avx512_bf16_supported(),  # noqa: SLF001
        cpu._is_amx_tile_supported(),  # noqa: SLF001
    )


def time_product(dtype: str) -> float:
    """Return the time of one product of ``TOKENS`` rows with a square matrix of ``WIDTH``,
    seconds.
    """
    import torch

    kind = getattr(torch, dtype)
    rows, weights = torch.ones(TOKENS, WIDTH, dtype=kind), torch.ones(WIDTH, WIDTH, dtype=kind)
    torch.nn.functional.linear(rows, weights)  # loads the kernel
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < TIMED_S:
        torch.nn.functional.linear(rows, weights)
        count += 1
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    print(json.dumps(asdict(choose(read_features(), time_product))))
