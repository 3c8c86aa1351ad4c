"""Additions to a tiny model: a LoRA adapter, and drafters that guess tokens ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .catalogue import Drafter

ADAPTER_RANK = 8
SPREAD = 0.15
"""Standard deviation of weights."""


def write_adapter(model_folder: Path, folder: Path, dtype: str) -> Path:
    """Write a LoRA adapter of the attention of a model of Llama's shape."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_folder / "config.json").read_text())
    width, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    torch.manual_seed(1)
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(ADAPTER_RANK, width) * SPREAD
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, ADAPTER_RANK) * SPREAD
    target = folder / "adapter"
    target.mkdir(exist_ok=True)
    kept = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(kept, str(target / "adapter_model.safetensors"))
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "target_modules": sorted(outputs),
        "bias": "none",
        "base_model_name_or_path": str(model_folder),
    }
    (target / "adapter_config.json").write_text(json.dumps(about))
    return target


def write_drafter(drafter: Drafter, model_folder: Path, folder: Path) -> dict[str, object]:
    """Write a drafter for a model; returns vLLM's ``speculative_config`` of it."""
    match drafter:
        case Drafter.NGRAM:
            return {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
            }
        case Drafter.ITSELF:
            return {
                "method": "draft_model",
                "model": str(model_folder),
                "num_speculative_tokens": 3,
            }
        case Drafter.EAGLE:
            target = _write_eagle(model_folder, folder)
            return {"method": "eagle", "model": str(target), "num_speculative_tokens": 2}
        case Drafter.MTP:
            _turn_last_layer_into_mtp(model_folder)
            return {"method": "mtp", "num_speculative_tokens": 1}


def _write_eagle(model_folder: Path, folder: Path) -> Path:
    """Write one layer of Llama's shape, its input a token beside a hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model_folder / "config.json").read_text())
    config["num_hidden_layers"] = 1
    width = config["hidden_size"]
    taken = load_file(str(model_folder / "model.safetensors"))
    torch.manual_seed(2)
    tensors = {
        name.removeprefix("model."): (torch.randn(tensor.shape) * SPREAD).to(tensor.dtype)
        for name, tensor in taken.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    embedding = taken["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = embedding.clone()
    tensors["fc.weight"] = (torch.randn(width, 2 * width) * SPREAD).to(embedding.dtype)
    target = folder / "eagle"
    target.mkdir(exist_ok=True)
    save_file(tensors, str(target / "model.safetensors"), {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def _turn_last_layer_into_mtp(model_folder: Path) -> None:
    """Make the model one layer shorter, and its last layer one that guesses the token after next.

    Multi-token prediction as DeepSeek and GLM have it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = last
    config["num_nextn_predict_layers"] = 1
    path.write_text(json.dumps(config))
    weights = model_folder / "model.safetensors"
    tensors = load_file(str(weights))
    width, stem = config["hidden_size"], f"model.layers.{last}."
    embedding = tensors["model.embed_tokens.weight"]
    torch.manual_seed(2)
    ones = torch.ones(width, dtype=embedding.dtype)
    tensors |= {
        f"{stem}embed_tokens.weight": embedding.clone(),
        f"{stem}enorm.weight": ones.clone(),
        f"{stem}hnorm.weight": ones.clone(),
        f"{stem}eh_proj.weight": (torch.randn(width, 2 * width) * SPREAD).to(embedding.dtype),
        f"{stem}shared_head.norm.weight": ones.clone(),
        f"{stem}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, str(weights), {"format": "pt"})
