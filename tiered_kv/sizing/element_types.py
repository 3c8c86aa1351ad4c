"""Element types of weights, states and KV: their sizes, and which a model is served with."""

from __future__ import annotations

from collections.abc import Mapping

from .model_config import ModelConfig, ModelError

SIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of weights and states, by vLLM's ``--dtype``."""

KV_SIZES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element of KV, by vLLM's ``--kv-cache-dtype``; ``auto`` is the model's own type."""

AUTO = "auto"
_SHORT = {"float": "float32", "half": "float16"}


def served_dtype(config: ModelConfig, asked: str = AUTO) -> str:
    """Type of weights and activations as served.

    ``auto`` is that of the configuration; vLLM serves float32 as bfloat16
    (``vllm.config.model._resolve_auto_dtype``).

    Raises:
        ModelError: no such type.
    """
    found = asked
    if asked == AUTO:
        fields = (config.whole, config.values)
        named = [one.get(name) for one in fields for name in ("dtype", "torch_dtype")]
        found = next((str(name) for name in named if name), "bfloat16").removeprefix("torch.")
        found = "bfloat16" if found == "float32" else found
    found = _SHORT.get(found, found)
    if found not in SIZES:
        raise ModelError(f"{found!r} is no type of weights: write one of {', '.join(SIZES)}.")
    return found


def kv_element(config: ModelConfig, dtype: str, asked: str = AUTO) -> tuple[str, int]:
    """Type of KV and bytes of an element.

    Args:
        dtype: type of the activations.
        asked: vLLM's ``--kv-cache-dtype``. With ``auto``, a quantized model may bring its own.

    Raises:
        ModelError: no such type.
    """
    if asked != AUTO:
        if asked not in KV_SIZES:
            choices = ", ".join((AUTO, *KV_SIZES))
            raise ModelError(f"{asked!r} is no type of KV: write one of {choices}.")
        return asked, KV_SIZES[asked]
    if _brings_fp8(quantization(config)):
        return "fp8", 1
    return dtype, SIZES[dtype]


def quantization(config: ModelConfig) -> Mapping[str, object]:
    """Quantization that the model's files describe; empty without one."""
    for fields in (config.whole, config.values):
        for name in ("quantization_config", "compression_config"):
            found = fields.get(name)
            if isinstance(found, dict):
                return found
    return {}


def _brings_fp8(quantized: Mapping[str, object]) -> bool:
    """True if the model was quantized together with its KV: by compressed-tensors or ModelOpt."""
    inner = quantized.get("quantization")
    for fields in (quantized, inner if isinstance(inner, dict) else {}):
        scheme = fields.get("kv_cache_scheme")
        if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
            return True
        if str(fields.get("kv_cache_quant_algo", "")).lower() == "fp8":
            return True
    return False
