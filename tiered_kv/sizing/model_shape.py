"""A model as far as memory and time are concerned, read from its configuration alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .attention_kv import LATENT_TYPES, attention_kv
from .element_types import AUTO, kv_element, served_dtype
from .kv_layers import KvLayers
from .layer_kinds import LayerKind, layer_kinds
from .model_config import ModelConfig, ModelError, read_config
from .parameters import Parameters, count_parameters
from .state_kv import STATE_TYPES, state_kv
from .weight_files import Weights, weigh

PLAIN_TYPES = frozenset(
    {
        "cohere",
        "cohere2",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "internlm2",
        "llama",
        "llama4_text",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "stablelm",
    }
)
"""Models of attention alone whose fields are those of Llama, or differ as this package knows."""

_UNREADABLE = re.compile(
    r"compress_ratios|compress_rates|kv_lora_rank|index_topk|linear_attn_config|lightning|rwkv|"
    r"retention|hyena|(mamba|ssm|state|linear|conv|lin_attn|recurrent|kda)_\w*"
    r"(dim|size|heads|kernel|width|cache|conv|state)\w*|attn_type_list|block_configs"
)
"""Fields of models that keep something that is not keys and values of heads."""
_REFUSED = ("is_encoder_decoder", "decoder_layers")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model on ranks of tensor parallelism.

    Attributes:
        architecture: class of the model.
        ranks: number of ranks.
        dtype: type of weights and activations. kv_dtype: type of KV.
        kv: layers by the KV that they keep.
        parameters: in all, and of a token.
        weights: size as served, over all ranks.
        max_len: longest context; None if the configuration does not say.
        all_reduces: behind layers, in a step of several ranks.
        notes: sentences on what was assumed.
    """

    architecture: str
    ranks: int
    dtype: str
    kv_dtype: str
    kv: tuple[KvLayers, ...]
    parameters: Parameters
    weights: Weights
    max_len: int | None
    all_reduces: int
    notes: tuple[str, ...] = field(default=())


def read_shape(
    model: Path,
    *,
    ranks: int = 1,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    weight_bytes: float | None = None,
) -> ModelShape:
    """Read a model.

    Args:
        model: folder with a ``config.json``, or such a file.
        dtype, kv_dtype: as vLLM's ``--dtype`` and ``--kv-cache-dtype``.
        weight_bytes: size of the weights over all ranks, if it is known.

    Raises:
        ModelError: the configuration does not tell what is asked.
    """
    config = read_config(model)
    notes = _check(config)
    kinds = layer_kinds(config)
    served = served_dtype(config, dtype)
    kv_name, element = kv_element(config, served, kv_dtype)
    kv = [*attention_kv(config, kinds, element, ranks), *state_kv(config, kinds, served, ranks)]
    parameters = count_parameters(config, kinds)
    if weight_bytes is not None:
        weights = Weights(weight_bytes, "--weights-gib")
    else:
        weights = weigh(config, config.path.parent, parameters.total, served)
    if kv_dtype == AUTO and kv_name != served:
        notes.append("The model's quantization covers its KV, which vLLM then keeps in fp8.")
    return ModelShape(
        architecture=config.architecture,
        ranks=ranks,
        dtype=served,
        kv_dtype=kv_name,
        kv=tuple(kv),
        parameters=parameters,
        weights=weights,
        max_len=config.find("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        all_reduces=2 * sum(kind is not LayerKind.NOTHING for kind in kinds),
        notes=tuple(notes),
    )


def _check(config: ModelConfig) -> list[str]:
    """Notes on a model of a kind that is not known.

    Raises:
        ModelError: it keeps something else than keys and values of heads.
    """
    if any(config.values.get(name) for name in _REFUSED):
        raise ModelError(
            f"{config.path}: {config.architecture} has an encoder, which the connector refuses."
        )
    latent = config.model_type in LATENT_TYPES
    if config.values.get("compress_ratios") is not None:
        latent = False
    if latent or config.model_type in STATE_TYPES | PLAIN_TYPES:
        return []
    strange = [name for name in config.values if _UNREADABLE.fullmatch(name)]
    strange = [name for name in strange if config.values[name]]
    if strange:
        raise ModelError(
            f"{config.path}: {config.architecture} is not known, and its {strange[0]} says that it "
            "keeps more than keys and values of attention: see what vLLM logs of its KV cache."
        )
    return [f"{config.architecture} is not known: it is read as keys and values of attention."]
