"""Folders of tiny models: configuration, random weights, and a tokenizer of numbered words."""

from __future__ import annotations

import json
from pathlib import Path

from .catalogue import COMMON, VOCABULARY, TinyModel


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
