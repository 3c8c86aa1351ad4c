"""Bytes per token and per state equal those that a running vLLM computes.

``plan`` runs vLLM's code for GPUs, with the parts that need a GPU replaced. These tests run vLLM's
CPU build with nothing replaced, on tiny models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sizing.vllm_specs import MORE
from tiered_kv.bench.models.catalogue import MODELS
from tiered_kv.sizing.model_shape import ModelShape, ask_vllm, request_of, shape_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NO_KERNEL = ("deepseek_v2", "deepseek_v3")
"""Models whose vectors are too short for GPU kernels, so that vLLM refuses them on GPUs."""
TINY = [model for model in (*MODELS, *MORE) if not model.adapter and model.name not in NO_KERNEL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the configurations of tiny models, and what vLLM computes for them."""
    pytest.importorskip("vllm")
    made = tmp_path_factory.mktemp("models")
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(made)}
    command = [sys.executable, "-m", "tests.sizing.vllm_specs", str(made)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The layers of each model, as vLLM computes them."""
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "specs.json").read_text())
    return found


@pytest.fixture(scope="module")
def ours(folder: Path, theirs: dict[str, Any]) -> dict[str, ModelShape]:
    """The shape of each model on a GPU, computed for all models in one process."""
    asked = [
        request_of(
            folder / model.name,
            gpu="h100-80",
            dtype="bfloat16",
            kv_dtype=str(dict(model.options).get("kv_cache_dtype", "auto")),
        )
        for model in TINY
    ]
    answers = ask_vllm([request for _, request in asked])
    return {
        model.name: shape_of(path, request, answer)
        for model, (path, request), answer in zip(TINY, asked, answers, strict=True)
    }


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_the_kv_of_a_layer_has_vllms_size(
    model: Any, ours: dict[str, ModelShape], theirs: dict[str, list[dict[str, Any]]]
) -> None:
    expected = Counter(
        (one["token_bytes"], one["state_bytes"], one["span"]) for one in theirs[model.name]
    )
    found: Counter[tuple[float, int, int]] = Counter()
    for layers in ours[model.name].kv:
        found[layers.token_bytes, layers.state_bytes, layers.reach.span] += layers.layers
    assert found == expected


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_layers_are_in_vllms_groups(
    model: Any, ours: dict[str, ModelShape], theirs: dict[str, list[dict[str, Any]]]
) -> None:
    sizes = Counter(one["group"] for one in theirs[model.name]).values()
    assert sorted(group.layers for group in ours[model.name].layout.groups) == sorted(sizes)
