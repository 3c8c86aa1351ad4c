"""Configuration of a model: the fields of its ``config.json``, without transformers.

Published files leave out fields that have their class's default. ``DEFAULTS`` has those that size
a model, as transformers 5 has them (``configuration_*.py`` of each model).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import TieredKVError

TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config")
"""Fields under which models of several parts keep their language model."""

MAX_NUMBER, MAX_LAYERS = 1 << 31, 10_000
"""Limits of fields and of layers, above any model's, so that a wrong file is read in no time."""

_GEMMA3: Mapping[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_QWEN_LINEAR: Mapping[str, object] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "attn_output_gate": True,
}
_MAMBA2: Mapping[str, object] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "cohere2": {
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon_h1": {"num_key_value_heads": 8, **_MAMBA2},
    "gemma2": {
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "gemma3_text": _GEMMA3,
    "gemma4_text": {
        **_GEMMA3,
        "vocab_size": 262_144,
        "sliding_window": 512,
        "global_head_dim": 512,
    },
    "gpt2": {"tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "granitemoehybrid": _MAMBA2,
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3, "tie_word_embeddings": True},
    "llama4_text": {
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
    },
    "mamba2": {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "expand": 2,
        "conv_kernel": 4,
    },
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "nemotron_h": {
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "opt": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128, "use_sliding_window": False},
    "qwen3_5_text": _QWEN_LINEAR,
    "qwen3_5_moe_text": _QWEN_LINEAR,
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": _QWEN_LINEAR,
}


class ModelError(TieredKVError, ValueError):
    """A model whose files do not tell what is asked; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Fields of a model's language part.

    Attributes:
        path: the file that was read.
        values: its fields; those of the language part where there are several.
        whole: fields of the whole file.
    """

    path: Path
    values: Mapping[str, object]
    whole: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """Kind of the language part, as transformers names it; empty if the file does not say."""
        found = self.values.get("model_type") or self.whole.get("model_type") or ""
        return str(found)

    @property
    def architecture(self) -> str:
        """Class of the model; its kind if the file names none."""
        for fields in (self.whole, self.values):
            named = fields.get("architectures")
            if isinstance(named, list) and named:
                return str(named[0])
        return self.model_type

    def given(self, name: str) -> object:
        """Value of a field, its class's default if the file leaves it out, or None."""
        found = self.values.get(name)
        if found is None and name not in self.values:
            found = DEFAULTS.get(self.model_type, {}).get(name)
        return found

    def find(self, *names: str) -> int | None:
        """Find the first of these fields that is a number above 0; None if there is none.

        Raises:
            ModelError: a field is no number.
        """
        for name in names:
            value = self.given(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ModelError(f"{self.path}: {name} is {value!r}, not a number.")
            if value > MAX_NUMBER:
                raise ModelError(f"{self.path}: {name} is {value:g}, more than any model has.")
            if value > 0:
                return int(value)
        return None

    def number(self, *names: str) -> int:
        """Find the first of these fields that is a number above 0; it must be there.

        Raises:
            ModelError: none of them is there.
        """
        found = self.find(*names)
        if found is None:
            raise ModelError(f"{self.path}: {self.architecture} has no {' or '.join(names)}.")
        return found

    def words(self, name: str) -> list[str] | None:
        """Words of a field that is a list, such as kinds of layers; None if it is not there."""
        value = self.given(name)
        return [str(word) for word in value] if isinstance(value, list) else None

    def of_layer(self, layer: int) -> ModelConfig:
        """Fields of one layer, where transformers keeps some that differ (``per_layer_config``)."""
        every = self.values.get("per_layer_config")
        own = every.get(str(layer)) if isinstance(every, Mapping) else None
        if not isinstance(own, Mapping):
            return self
        return ModelConfig(self.path, {**self.values, **own}, self.whole)


def read_config(model: Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        model: folder with a ``config.json``, or such a file.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise ModelError(
            f"{path} is not there: name a folder with a config.json, or such a file; models of a "
            "hub are not fetched."
        )
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(whole, dict):
        raise ModelError(f"{path} holds no JSON object.")
    text = next(_parts(whole), whole)
    return ModelConfig(path, text, whole)


def _parts(whole: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    for name in TEXT_PARTS:
        part = whole.get(name)
        if isinstance(part, dict):
            yield from _parts(part)
            yield part
