"""Size of a model's weights, from the weight files or as vLLM would load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.formatting import count
from tiered_kv.json_fields import read_json

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""Maximum header length of a safetensors file, bytes. It is the format's own limit."""
_FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Safetensors types that are converted to the served type when loaded, and their sizes, bytes."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Size of a model's weights as served.

    Attributes:
        nbytes: size over all ranks, bytes.
        source: description of the source of the size, such as an index file or an estimate.
    """

    nbytes: float
    source: str


def weigh(folder: Path, parameters: int, nbytes: float, element: int | None) -> Weights:
    """Return the size of a model's weights as served.

    Args:
        folder: folder that may contain the weight files.
        parameters: number of parameters.
        nbytes: size as vLLM would load the weights, bytes; used if neither the files nor their
            index can be read.
        element: size to which floats in files are converted when they are loaded, bytes; None for
            quantized weights, which are loaded unchanged.
    """
    if files := _files(folder):
        try:
            total = sum(tensor for file in files for tensor in _tensors(file, element))
            return Weights(total, count(len(files), "safetensors file"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # Git LFS pointers, or incomplete files
    if (indexed := _indexed_bytes(folder / INDEX)) is not None:
        return Weights(indexed, INDEX)
    bits = 8 * nbytes / parameters
    words = f"estimated: {parameters / 1e9:,.2f} billion parameters of {bits:.3g} bits"
    return Weights(nbytes, words)


def _files(folder: Path) -> list[Path]:
    """Return the weight files; none if a file that the index names is missing."""
    try:
        names = set(read_json((folder / INDEX).read_bytes())["weight_map"].values())
        found = [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    return found if all(file.is_file() for file in found) else []


def _indexed_bytes(index: Path) -> float | None:
    try:
        total = read_json(index.read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(total) if isinstance(total, (int, float)) and total > 0 else None


def _tensors(file: Path, element: int | None) -> Iterator[float]:
    """Yield the sizes of a file's tensors as loaded, bytes.

    Args:
        element: size to which floats are converted when they are loaded, bytes; None for weights
            that are loaded unchanged.

    Raises:
        ValueError: the file is incomplete, or is not a safetensors file.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        room = file.stat().st_size - 8 - length
        if length > _MAX_HEADER or room < 0:
            raise ValueError("the file does not contain a complete safetensors header")
        header = read_json(opened.read(length))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        if end > room:
            raise ValueError("the file ends before the tensors that its header lists")
        of_file = _FLOATS.get(tensor["dtype"])
        yield (end - begin) * (element / of_file if element and of_file else 1.0)
