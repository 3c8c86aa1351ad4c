"""Folders of tiny models: configuration, random weights, and a tokenizer of numbered words."""

from __future__ import annotations

import json
from pathlib import Path

from .catalogue import (
    COMMON,
    IMAGE_PIXELS,
    IMAGE_TOKEN,
    PATCH_PIXELS,
    VOCABULARY,
    TinyModel,
)

IMAGE = "<image>"


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
    common = {} if model.image_tokens else COMMON
    config = getattr(transformers, model.config)(**{**common, **model.settings})
    made = getattr(transformers, model.architecture)(config)
    made.to(getattr(torch, dtype)).save_pretrained(target)
    write_tokenizer(target)
    if model.image_tokens:
        _name_tower_as_published(target / "model.safetensors")
        write_image_processor(target)
    return target


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer to which every token is a word of its own: ``w17`` is token 17. The token
    of images has a name."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY) if i != IMAGE_TOKEN} | {IMAGE: IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([IMAGE])
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


def write_image_processor(folder: Path) -> None:
    """Write how images become patches: as CLIP and LLaVA do it."""
    edge = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_PIXELS},
        "crop_size": edge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    about = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH_PIXELS,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,  # CLIP's class token, which is left out
    }
    (folder / "processor_config.json").write_text(json.dumps(about))


def _name_tower_as_published(weights: Path) -> None:
    """Give CLIP's weights the names of published models; transformers 5 saves shorter ones."""
    from safetensors.torch import load_file, save_file

    short, long = "vision_tower.", "vision_tower.vision_model."
    tensors = load_file(str(weights)).items()
    renamed = {name.replace(short, long, 1): tensor for name, tensor in tensors}
    save_file(renamed, str(weights), {"format": "pt"})
