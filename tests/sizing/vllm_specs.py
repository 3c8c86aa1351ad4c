"""Compute the KV of tiny models with vLLM: ``python -m tests.sizing.vllm_specs FOLDER``.

This runs in a separate process, because vLLM's process groups persist. Models have no weights,
because they are created on torch's ``meta`` device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tiered_kv.bench.models.catalogue import COMMON, MODELS, TinyModel
from tiered_kv.bench.models.weights import write_torchvision

MORE = (
    TinyModel(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {"attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 16},
    ),
    TinyModel(
        "lfm2",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_dim": 128,
            "block_dim": 128,
            "conv_L_cache": 3,
        },
    ),
    TinyModel("mamba", "MambaConfig", "MambaForCausalLM", {"state_size": 16}),
    TinyModel("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 200}),
    TinyModel("cohere2", "Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 200}),
    TinyModel("exaone4", "Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 200}),
    TinyModel("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
)
"""Models that the catalogue of tiny models omits, because it contains only models that run here."""


def write_config(model: TinyModel, folder: Path) -> Path:
    """Write a tiny model's configuration, as transformers saves it. Returns its folder."""
    import transformers

    common = {} if model.image_tokens else COMMON
    config = getattr(transformers, model.config)(**{**common, **model.settings})
    config.architectures = [model.architecture]
    target = folder / model.name
    config.save_pretrained(target)
    return target


def specs_of(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the type, bytes, span and groups of every layer with KV, as vLLM computes them."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )

    from tiered_kv.connectors.vllm.kv_groups import planning

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        **options,
    ).create_engine_config()
    config.cache_config.mamba_ssm_cache_dtype = "auto"  # the CPU build sets it to float32
    if (of_model := MODELS_CONFIG_MAP.get(config.model_config.architecture)) is not None:
        of_model.verify_and_update_config(config)
    with set_current_vllm_config(config):
        store = f"file://{folder}/ranks"
        init_distributed_environment(1, 0, store, 0, "gloo")
        destroy_model_parallel()  # process groups of the previous model
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {
            name: layer.get_kv_cache_spec(config)
            for name, layer in layers.items()
            if not getattr(layer, "kv_sharing_target_layer_name", None)
        }
        specs = {name: spec for name, spec in specs.items() if spec is not None}
        backends = get_current_attn_backends(config)
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        groups = planning().get_kv_cache_groups(config, specs)
    group_of = {name: at for at, group in enumerate(groups) for name in group.layer_names}
    return [
        {
            "name": name,
            "group": group_of[name],
            "spec": type(spec).__name__,
            "token_bytes": 0 if hasattr(spec, "shapes") else per_token(spec),
            "state_bytes": spec.real_page_size_bytes if hasattr(spec, "shapes") else 0,
            "span": getattr(spec, "sliding_window", None)
            or getattr(spec, "attention_chunk_size", None)
            or 0,
        }
        for name, spec in specs.items()
    ]


def per_token(spec: Any) -> int:
    """Return the bytes per token in an attention layer."""
    whole, rest = divmod(spec.real_page_size_bytes, spec.block_size)
    assert not rest
    return int(whole)


def main(folder: Path) -> None:
    """Write what vLLM computes for every tiny model to ``specs.json``."""
    write_torchvision(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # vLLM inspects models in a subprocess
    found = {}
    for model in (*MODELS, *MORE):
        if not model.adapter:
            target = write_config(model, folder)
            found[model.name] = specs_of(target, dict(model.options))
    (folder / "specs.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
