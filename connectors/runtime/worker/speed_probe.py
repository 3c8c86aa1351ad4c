"""Speed of this machine, measured in less than a second when the engine starts.

Copies between VRAM and CPU memory are timed the way restores perform them. A prefill cannot be run
at that time. Its duration is estimated from the model's arithmetic and the speed of a matrix
product, until the first real prefills have been measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.host_memory import CpuPool

MOST_PAGES = 64
ROUNDS = 5
READ_BYTES = 16 << 20
"""Size of a timed read, bytes."""
SMALLEST_MATRIX, LARGEST_MATRIX = 128, 1024
MATMUL_S = 0.03
"""Time limit for matrix products, seconds. Where bf16 is emulated, a single large product takes
seconds."""
UTILISATION = 0.5
"""Approximate fraction of a matrix product's speed that a prefill reaches."""


def measure_copies(backend: TransferBackend, pool: CpuPool, num_blocks: int) -> float:
    """Measure the speed of restores. Returns bytes per second, the best of several copies; 0 if
    there is no page to copy. The engine must be idle, because blocks are overwritten."""
    pages = min(MOST_PAGES, pool.slots.shape[0], num_blocks - 1)
    if pages < 1:
        return 0.0
    blocks, slots = range(1, pages + 1), range(pages)
    results = []
    for _ in range(ROUNDS):  # not ``run``: on a GPU it returns before the copy is done
        backend.submit(CopyJob(0, Direction.LOAD, blocks, slots))
        backend.drain()
        results += backend.poll()
    return max((one.nbytes / one.seconds for one in results if one.seconds > 0), default=0.0)


def measure_reads(storage: Any) -> float:
    """Measure the speed of copies from the engine's KV to CPU memory. Returns bytes per second, the
    best of several copies; 0 if the KV cache is empty. VRAM is not written, so the engine may be
    running.

    Args:
        storage: torch storage of the KV cache.
    """
    import torch

    on_gpu, size = storage.device.type == "cuda", min(READ_BYTES, int(storage.nbytes()))
    if not size:
        return 0.0
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))
    target = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(storage.device)
        took.append(time.perf_counter() - began)
    return size / max(min(took), 1e-9)


def measure_flops(device: Any, dtype: Any) -> float:
    """Measure square matrix products on a device. Returns operations per second."""
    import torch

    def product_s(size: int) -> float:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        synchronize()
        began = time.perf_counter()
        matrix @ matrix
        synchronize()
        return time.perf_counter() - began

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    product_s(SMALLEST_MATRIX)  # loads the kernel
    return fastest_product(product_s)


def fastest_product(product_s: Callable[[int], float]) -> float:
    """Return the speed of the fastest of several matrix products, operations per second. Sizes grow
    as far as the time limit allows.

    Args:
        product_s: multiplies square matrices with the given number of rows, and returns the time
            taken, seconds.
    """
    size, spent_s, best = SMALLEST_MATRIX, 0.0, 0.0
    while spent_s < MATMUL_S:
        took_s = max(product_s(size), 1e-6)
        spent_s += took_s
        best = max(best, 2 * size**3 / took_s)
        if size < LARGEST_MATRIX and 8 * took_s < MATMUL_S - spent_s:
            size *= 2
    return best


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Arithmetic of a prefill, summed over all ranks.

    Attributes:
        per_token: operations per token: two per weight that the token uses.
        per_token2: operations per token squared: scores and weighted sums of values, of which the
            causal mask leaves half.
    """

    per_token: float
    per_token2: float

    def estimate(self, flops: float) -> tuple[float, float]:
        """Return the seconds per 1,000 tokens and per (1,000 tokens)² of a prefill, at a total
        speed of ``flops`` operations per second."""
        usable = UTILISATION * flops
        return 1e3 * self.per_token / usable, 1e6 * self.per_token2 / usable


def prefill_work(model_config: Any) -> PrefillWork | None:
    """Return the number of operations that a prefill takes, from the model's shape; None if the
    model's configuration lacks the usual field names."""
    shape = model_config.hf_text_config
    try:
        layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
        heads = int(shape.num_attention_heads)
        head = int(getattr(shape, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(shape, "num_key_value_heads", None) or heads)
        experts = int(getattr(shape, "num_experts_per_tok", None) or 1)
        wide = int(getattr(shape, "moe_intermediate_size", None) or shape.intermediate_size)
        kinds = list(getattr(shape, "layer_types", None) or ())
    except Exception:  # configurations raise anything, for example if layers differ
        return None
    attending = kinds.count("full_attention") if len(kinds) == layers else layers
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * wide * experts)
    return PrefillWork(2.0 * weights, 2.0 * attending * heads * head)
