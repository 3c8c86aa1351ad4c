"""Folders of tiny models: configuration, random weights, and a tokenizer of numbered words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .catalogue import COMMON, VOCABULARY, TinyModel

ADAPTER_RANK = 8
SPREAD = 0.15
"""Standard deviation of weights."""


def write_model(model: TinyModel, folder: Path, dtype: str) -> Path:
    """Write a model that vLLM loads; the same one every time.

    Returns:
        Its folder, inside ``folder``.
    """
    import torch
    import transformers

    target = folder / model.name
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**{**COMMON, **model.settings})
    made = getattr(transformers, model.architecture)(config)
    made.to(getattr(torch, dtype)).save_pretrained(target)
    write_tokenizer(target)
    return target


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer to which every token is a word of its own: ``w17`` is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
        "unk_token": "w0",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


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
