"""Size of a model's weights: as loaded from files, from an index, or estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sizing.published import LLAMA_8B, write
from tiered_kv.sizing.weight_files import INDEX, Weights, weigh

FLOATS = {"F32": 4, "BF16": 2, "U8": 1}


def write_tensors(file: Path, **tensors: tuple[str, int]) -> None:
    """Write a safetensors file, given the type and number of elements of each tensor."""
    header, at = dict[str, Any](), 0
    for name, (kind, count) in tensors.items():
        end = at + count * FLOATS[kind]
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [at, end]}
        at = end
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + np.zeros(at, np.uint8).tobytes())


def weighed(folder: Path, element: int | None = 2) -> Weights:
    return weigh(folder, 1_000_000_000, 562_500_000, element)


def test_files_are_counted_in_the_served_dtype(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA_8B)
    write_tensors(folder / "model.safetensors", a=("F32", 1000), b=("BF16", 500))
    assert weighed(folder) == Weights(3000, "1 safetensors file")
    assert weighed(folder, 4).nbytes == 6000


def test_quantized_files_keep_their_size(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA_8B)
    write_tensors(folder / "model.safetensors", blocks=("U8", 1000), scales=("F32", 10))
    assert weighed(folder, None).nbytes == 1040


def test_the_index_names_the_files_that_count(tmp_path: Path) -> None:
    """A folder contains all weights twice, in files of two naming schemes, as Mistral's folders do.
    Only the files in the index count. If one is missing, the index's total counts."""
    folder = write(tmp_path, LLAMA_8B)
    write_tensors(folder / "consolidated.safetensors", a=("BF16", 100))
    write_tensors(folder / "model-1-of-2.safetensors", a=("BF16", 60))
    write_tensors(folder / "model-2-of-2.safetensors", b=("BF16", 40))
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    index = {"metadata": {"total_size": 77}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))
    assert weighed(folder) == Weights(200, "2 safetensors files")
    (folder / "model-2-of-2.safetensors").unlink()
    assert weighed(folder) == Weights(77, INDEX), "not all of them are there"


def test_without_files_the_size_is_what_vllm_would_load(tmp_path: Path) -> None:
    found = weighed(write(tmp_path, LLAMA_8B))
    assert found == Weights(562_500_000, "estimated: 1.00 billion parameters of 4.5 bits")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
HALF = (66).to_bytes(8, "little") + json.dumps(
    {"a": {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}}
).encode()

DEEP = (200_000).to_bytes(8, "little") + b"[" * 200_000


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, POINTER, HALF, DEEP])
def test_incomplete_files_do_not_count(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, LLAMA_8B)
    (folder / "model.safetensors").write_bytes(content)
    assert weighed(folder).source.startswith("estimated")
    (folder / INDEX).write_bytes(content)
    assert weighed(folder).source.startswith("estimated")
