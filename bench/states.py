"""Pages of states without a model: what linear attention and Mamba keep, from random inputs.

Inputs are normal, at a scale of their own in each channel: scales are powers of two with a
standard deviation of 1. A page holds the states of some layers, as vLLM lays them out: a
convolution state in bf16, then the recurrent state in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.base import Bytes, ElementType, PageFormat, Section

STEPS = 256
"""Tokens that a state has seen."""

CONV_STEPS = 3
"""Tokens in a convolution state."""

Floats = NDArray[np.float32]


def gated_delta(seed: int) -> Floats:
    """Make a state of a gated delta rule (GDN, KDA): S = g S + b k (v - k S), 1 MiB.

    Returns:
        [heads, keys, values], 16 x 128 x 128.
    """
    model, rng = np.random.default_rng(0), np.random.default_rng(seed)
    heads, keys, values = 16, 128, 128
    rates = np.exp(model.uniform(np.log(1e-3), 0, (heads, 1, 1)))
    key_scales, value_scales = scales(model, (heads, keys)), scales(model, (heads, values))
    state = np.zeros((heads, keys, values), np.float32)
    for _ in range(STEPS):
        k = normal(rng, heads, keys) * key_scales
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        v = normal(rng, heads, values) * value_scales
        b = 1 / (1 + np.exp(-normal(rng, heads, 1)))
        state *= np.exp(-rates * np.exp(normal(rng, heads, 1, 1))).astype(np.float32)
        update = b * (v - np.einsum("hkv,hk->hv", state, k))
        state += k[:, :, None] * update[:, None, :]
    return state


def selective(seed: int) -> Floats:
    """Make a state of Mamba-2: S = exp(-a dt) S + dt x B, 1 MiB.

    Returns:
        [heads, channels, states], 32 x 64 x 128.
    """
    model, rng = np.random.default_rng(0), np.random.default_rng(seed)
    heads, channels, states = 32, 64, 128
    a = model.uniform(1, 16, heads)
    usual_dt = np.exp(model.uniform(np.log(1e-3), np.log(0.1), heads))
    x_scales, b_scales = scales(model, (heads, channels)), scales(model, (states,))
    state = np.zeros((heads, channels, states), np.float32)
    for _ in range(STEPS):
        dt = (usual_dt * np.exp(normal(rng, heads))).astype(np.float32)
        x, b = silu(normal(rng, heads, channels) * x_scales), silu(normal(rng, states) * b_scales)
        state *= np.exp(-a * dt).astype(np.float32)[:, None, None]
        state += (dt[:, None] * x)[:, :, None] * b
    return state


def half_shortened(seed: int) -> Floats:
    """Make a state of which every other entry, at random, is what bf16 can hold."""
    bits = gated_delta(seed).view(np.uint32)
    bits[np.random.default_rng(seed).random(bits.shape) < 0.5] &= 0xFFFF0000
    return bits.view(np.float32)


KINDS: Mapping[str, tuple[Callable[[int], Floats], int]] = MappingProxyType(
    {
        "gdn": (gated_delta, 4096),
        "mamba2": (selective, 2304),
        "gdn, half of it bf16": (half_shortened, 4096),
    }
)
"""Makers of states, and channels of the convolution beside each."""


def state_pages(kind: str, layers: int, count: int) -> tuple[PageFormat, list[Bytes]]:
    """Make pages of so many layers: about 1 MiB for each."""
    make, channels = KINDS[kind]
    pages = []
    sections: list[Section] = []
    for page in range(count):
        pieces = []
        for layer in range(layers):
            seed = page * layers + layer
            pieces += [convolution(seed, channels), make(seed).reshape(-1).view(np.uint8)]
        pages.append(np.concatenate(pieces))
        types = (ElementType.BF16, ElementType.FP32) * layers
        sections = [Section(*one) for one in zip(types, (p.nbytes for p in pieces), strict=True)]
    return PageFormat.of(sections, tokens=0), pages


def convolution(seed: int, channels: int) -> Bytes:
    """Make the last inputs of a convolution, in bf16."""
    inputs = normal(np.random.default_rng(seed), channels, CONV_STEPS)
    return (inputs.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)


def scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Scales of channels."""
    return np.exp2(rng.standard_normal(shape)).astype(np.float32)


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)), np.float32)
