"""Writes folders of tiny models for vLLM, with random weights and a tokenizer of numbered words.

Also writes a LoRA adapter and draft models for them, and a stand-in for torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .catalogue import (
    COMMON,
    IMAGE_PIXELS,
    IMAGE_TOKEN,
    PATCH_PIXELS,
    VOCABULARY,
    Drafter,
    TinyModel,
)

IMAGE = "<image>"
ADAPTER_RANK = 8
SPREAD = 0.15
"""Standard deviation of the weights of adapters and draft models."""
WEIGHTS = "model.safetensors"
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "w0",
    "bos_token": "w1",
    "eos_token": "w2",
    "unk_token": "w0",
    "clean_up_tokenization_spaces": False,
}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": IMAGE_PIXELS},
    "crop_size": {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""CLIP's settings for cutting images into patches."""
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": PATCH_PIXELS,
    "vision_feature_select_strategy": "default",
    "image_token": IMAGE,
    "num_additional_image_tokens": 1,  # CLIP's class token, which the model drops
}
_STUB = '''"""Stand-in for torchvision. All modules and names exist, and none does anything."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0"


class _Names(type):
    """A metaclass whose classes have every attribute. Its value is its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return __getattr__(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {})


sys.meta_path.append(_Finder())
'''


def write_model(model: TinyModel, folder: Path, dtype: str) -> Path:
    """Write a model into a new folder inside ``folder``, and return that folder. The weights are
    the same on every call. The text of token 17 is the word ``w17``.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    target = folder / model.name
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    common = {} if model.image_tokens else COMMON
    config = getattr(transformers, model.config)(**{**common, **model.settings})
    made = getattr(transformers, model.architecture)(config)
    made.to(getattr(torch, dtype)).save_pretrained(target)
    words = {f"w{i}": i for i in range(VOCABULARY) if i != IMAGE_TOKEN} | {IMAGE: IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", TOKENIZER)
    if model.image_tokens:
        # transformers 5 saves shorter tensor names than published models have.
        short, long = "vision_tower.", "vision_tower.vision_model."
        tensors = _load(target).items()
        _save(target, {name.replace(short, long, 1): tensor for name, tensor in tensors})
        _write_json(target / "preprocessor_config.json", IMAGES)
        _write_json(target / "processor_config.json", PROCESSOR)
    return target


def write_adapter(model_folder: Path, folder: Path, dtype: str) -> Path:
    """Write a LoRA adapter for the attention layers of a Llama-like model. Returns its folder."""
    import torch

    config = json.loads((model_folder / "config.json").read_text())
    width, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    torch.manual_seed(1)
    tensors, to = dict[str, Any](), getattr(torch, dtype)
    for layer in range(config["num_hidden_layers"]):
        for name, out in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = _random((ADAPTER_RANK, width), to)
            tensors[f"{stem}.lora_B.weight"] = _random((out, ADAPTER_RANK), to)
    target = folder / "adapter"
    target.mkdir(exist_ok=True)
    _save(target, tensors, "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "target_modules": sorted(outputs),
        "bias": "none",
        "base_model_name_or_path": str(model_folder),
    }
    _write_json(target / "adapter_config.json", about)
    return target


def write_drafter(drafter: Drafter, model_folder: Path, folder: Path) -> dict[str, object]:
    """Return vLLM's ``speculative_config`` for a model and a drafter. For EAGLE, also write a draft
    model into ``folder``. For MTP, also change the model in ``model_folder``.
    """
    method = {"method": drafter.value, "num_speculative_tokens": 3}
    match drafter:
        case Drafter.NGRAM:
            return {**method, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
        case Drafter.ITSELF:
            return {**method, "model": str(model_folder)}
        case Drafter.EAGLE:
            target = str(_write_eagle(model_folder, folder))
            return {**method, "model": target, "num_speculative_tokens": 2}
        case Drafter.MTP:
            _turn_last_layer_into_mtp(model_folder)
            return {**method, "num_speculative_tokens": 1}


def _write_eagle(model_folder: Path, folder: Path) -> Path:
    """Write an EAGLE draft model with one Llama-like layer, whose input is a token embedding and
    the target's hidden state. Returns its folder.
    """
    import torch

    config = json.loads((model_folder / "config.json").read_text())
    width, taken = config["hidden_size"], _load(model_folder)
    torch.manual_seed(2)
    tensors = {
        name.removeprefix("model."): _random(tensor.shape, tensor.dtype)
        for name, tensor in taken.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    embedding = taken["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = embedding.clone()
    tensors["fc.weight"] = _random((width, 2 * width), embedding.dtype)
    target = folder / "eagle"
    target.mkdir(exist_ok=True)
    _save(target, tensors)
    _write_json(target / "config.json", {**config, "num_hidden_layers": 1})
    return target


def _turn_last_layer_into_mtp(model_folder: Path) -> None:
    """Turn the model's last layer into a multi-token prediction layer, which predicts the token
    after the next token, as in DeepSeek and GLM.
    """
    import torch

    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    last = config["num_hidden_layers"] - 1
    _write_json(path, {**config, "num_hidden_layers": last, "num_nextn_predict_layers": 1})
    tensors, width, stem = _load(model_folder), config["hidden_size"], f"model.layers.{last}."
    embedding = tensors["model.embed_tokens.weight"]
    torch.manual_seed(2)
    tensors |= {
        f"{stem}{norm}.weight": torch.ones(width, dtype=embedding.dtype)
        for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    tensors |= {
        f"{stem}embed_tokens.weight": embedding.clone(),
        f"{stem}eh_proj.weight": _random((width, 2 * width), embedding.dtype),
        f"{stem}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    _save(model_folder, tensors)


def write_torchvision(folder: Path) -> None:
    """Write a stand-in for torchvision into a folder for ``PYTHONPATH``. vLLM imports torchvision
    for models whose text layers never use it.
    """
    package = folder / "torchvision"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(_STUB)


def _random(shape: Any, dtype: Any) -> Any:
    import torch

    return (torch.randn(shape) * SPREAD).to(dtype)


def _load(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(str(folder / WEIGHTS))
    return found


def _save(folder: Path, tensors: dict[str, Any], name: str = WEIGHTS) -> None:
    from safetensors.torch import save_file

    save_file(tensors, str(folder / name), {"format": "pt"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
