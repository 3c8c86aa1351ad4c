"""Size of a model's weights: of its files, or estimated from its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .element_types import SIZES, quantization
from .model_config import ModelConfig

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""Longest header of a file of safetensors, bytes: the format's own limit."""
_FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of safetensors that become the served type, and their sizes."""

BITS: Mapping[str, float] = {
    "fp8": 8,
    "compressed-tensors": 8,
    "modelopt": 8,
    "modelopt_fp4": 4.5,
    "mxfp4": 4.25,
    "awq": 4.25,
    "gptq": 4.25,
    "bitsandbytes": 4.5,
}
"""Bits of a parameter by kind of quantization, scales included; used where there are no files."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights as served.

    Attributes:
        nbytes: over all ranks.
        source: what the size was taken from.
    """

    nbytes: float
    source: str


def weigh(config: ModelConfig, folder: Path, parameters: float, dtype: str) -> Weights:
    """Size of a model's weights as served in ``dtype``.

    Args:
        folder: where files of weights would be.
        parameters: of the model, for the estimate where there are none.
    """
    files = _files(folder)
    quantized = quantization(config)
    if files:
        nbytes = sum(_size(file, None if quantized else SIZES[dtype]) for file in files)
        return Weights(nbytes, f"{len(files)} safetensors files")
    if (total := _indexed_bytes(folder / INDEX)) is not None:
        return Weights(total, INDEX)
    method = str(quantized.get("quant_method", "")).lower().replace("_", "-")
    bits = BITS.get(method, BITS.get(method.replace("-", "_"))) if quantized else None
    if bits is None:
        bits = 8.0 * SIZES[dtype]
    words = f"estimated: {parameters / 1e9:,.2f} billion parameters of {bits:g} bits"
    return Weights(parameters * bits / 8, words)


def _files(folder: Path) -> list[Path]:
    """Files of weights; none if one that the index names is missing."""
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        found = [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    return found if all(file.is_file() for file in found) else []


def _indexed_bytes(index: Path) -> float | None:
    try:
        total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(total) if isinstance(total, (int, float)) and total > 0 else None


def _size(file: Path, element: int | None) -> float:
    """Bytes of a file's tensors.

    Args:
        element: bytes to which floats are converted when they are loaded; None for weights that
            are loaded as they are.
    """
    whole = float(file.stat().st_size)
    if element is None:
        return whole
    try:
        return sum(_tensors(file, element))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return whole


def _tensors(file: Path, element: int) -> Iterator[float]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError("no header of safetensors")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield (end - begin) * element / _FLOATS.get(tensor["dtype"], element)
