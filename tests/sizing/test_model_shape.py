"""The shapes of published models agree with their authors' descriptions and with vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sizing.published import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA3_12B,
    GPT2,
    GPT_OSS_120B,
    LLAMA4_SCOUT,
    LLAMA_8B,
    NEMOTRON_9B,
    QWEN3_NEXT_80B,
    write,
)
from tests.sizing.recorded import answer_recorded
from tiered_kv.page_group import KvKind
from tiered_kv.sizing import model_shape
from tiered_kv.sizing.model_shape import ModelError, ModelShape


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.sizing.model_shape.ask_vllm", answer_recorded)


def read_shape(folder: Path, **options: Any) -> ModelShape:
    return model_shape.read_shape(folder, gpu="h100-80", **options)


def kinds(shape: ModelShape) -> dict[KvKind, tuple[int, float, int]]:
    """Return, by KV type, the number of layers, the bytes per token or state in one layer, and the
    span."""
    return {
        one.kind: (one.layers, one.token_bytes or one.state_bytes, one.reach.span)
        for one in shape.kv
    }


FULL, WINDOW, CHUNK, STATE = KvKind.FULL, KvKind.WINDOW, KvKind.CHUNK, KvKind.STATE
PUBLISHED = (
    (LLAMA_8B, 8.03, 7.5, {FULL: (32, 4096, 0)}),
    (GEMMA3_12B, 11.8, 11.8, {WINDOW: (40, 8192, 1024), FULL: (8, 8192, 0)}),
    (DEEPSEEK_V3, 671, 37, {FULL: (61, 1152, 0)}),
    (GPT_OSS_120B, 116.8, 5.13, {WINDOW: (18, 2048, 128), FULL: (18, 2048, 0)}),
    (QWEN3_NEXT_80B, 80, 3.6, {FULL: (12, 2048, 0), STATE: (36, 1_097_728, 0)}),
    (NEMOTRON_9B, 8.89, 8.3, {FULL: (4, 4096, 0), STATE: (27, 5_316_608, 0)}),
    (GPT2, 0.124, 0.124, {FULL: (12, 3072, 0)}),
    (LLAMA4_SCOUT, 108, 16.2, {CHUNK: (36, 4096, 8192), FULL: (12, 4096, 0)}),
)


@pytest.mark.parametrize(
    ("config", "total", "active", "kv"), PUBLISHED, ids=[c["model_type"] for c, *_ in PUBLISHED]
)
def test_a_published_model_has_the_size_that_its_authors_state(
    tmp_path: Path,
    config: Mapping[str, Any],
    total: float,
    active: float,
    kv: dict[KvKind, tuple[int, int, int]],
) -> None:
    """The numbers of parameters are within two percent of the authors' figures, and the layers with
    KV are those that vLLM counts."""
    shape = read_shape(write(tmp_path, config))
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert kinds(shape) == kv
    assert shape.notes == ()
    assert shape.dtype == shape.kv_dtype == "bfloat16"


def test_fields_that_a_published_file_leaves_out_are_those_of_its_class(tmp_path: Path) -> None:
    """The file of Gemma 3 4B contains neither the number of heads nor the layer pattern. Both have
    the defaults of its configuration class."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    shape = read_shape(write(tmp_path, config))
    assert kinds(shape) == {WINDOW: (29, 4096, 1024), FULL: (5, 4096, 0)}
    assert shape.parameters / 1e9 == pytest.approx(3.88 + 0.09, rel=0.01), "text and vision"


def test_a_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA_8B)
    assert read_shape(folder / "config.json") == read_shape(folder)


def test_heads_are_split_over_ranks_or_replicated(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA_8B)
    assert [kinds(read_shape(folder, ranks=n))[FULL][1] for n in (1, 2, 8, 16)] == [
        4096,
        2048,
        512,
        512,
    ]
    with pytest.raises(ModelError, match=r"divisible by tensor parallel size \(3\)"):
        read_shape(folder, ranks=3)


def test_every_rank_has_the_whole_latent_vector(tmp_path: Path) -> None:
    folder = write(tmp_path, DEEPSEEK_V3)
    assert kinds(read_shape(folder, ranks=8))[FULL] == (61, 1152, 0)


def test_states_are_split_over_ranks_but_for_groups_that_all_need(tmp_path: Path) -> None:
    folder = write(tmp_path, NEMOTRON_9B)
    whole, half = (kinds(read_shape(folder, ranks=n))[STATE][1] for n in (1, 2))
    assert half == whole // 2
    one_group = write(tmp_path, {**NEMOTRON_9B, "n_groups": 1})
    whole, half = (kinds(read_shape(one_group, ranks=n))[STATE][1] for n in (1, 2))
    assert half > whole // 2, "both ranks need the group"


def test_kv_in_fp8_takes_half_and_states_are_unchanged(tmp_path: Path) -> None:
    folder = write(tmp_path, NEMOTRON_9B)
    half = kinds(read_shape(folder, kv_dtype="fp8"))
    assert half == {FULL: (4, 2048, 0), STATE: (27, 5_316_608, 0)}


def test_a_quantized_model_may_bring_the_type_of_its_kv(tmp_path: Path) -> None:
    scheme = {
        "dynamic": False,
        "num_bits": 8,
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    }
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    shape = read_shape(write(tmp_path, {**LLAMA_8B, "quantization_config": config}))
    assert (shape.kv_dtype, kinds(shape)[FULL][1]) == ("fp8", 2048)
    assert "fp8" in shape.notes[0]


def test_assumptions_about_a_file_are_notes(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    shape = read_shape(write(tmp_path, {**LLAMA_8B, "quantization_config": config}))
    assert shape.notes == (
        'vLLM needs fields that the model\'s files lack. Assumed: targets = ["Linear"].',
    )


def test_sparse_mla_has_an_indexer_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path, DEEPSEEK_V32)
    shape = read_shape(folder)
    assert [(one.words, one.token_bytes) for one in shape.kv] == [
        ("indexer", 132),
        ("MLA", 1152),
    ]
    assert [one.token_bytes for one in read_shape(folder, kv_dtype="fp8").kv] == [132, 656]


REFUSED: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({**LLAMA_8B, "architectures": ["NovelForCausalLM"], "model_type": "novel"}, "novel"),
    ({**LLAMA_8B, "num_attention_heads": "many"}, "num_attention_heads"),
    ({**LLAMA_8B, "hybrid_layer_pattern": [0, 1]}, "has hybrid_layer_pattern, which neither"),
    ({**LLAMA_8B, "attn_layer_freq": 4}, "has attn_layer_freq, which neither"),
    ({**LLAMA_8B, "index_topk": 2048}, "has index_topk, which neither"),
    ({**LLAMA_8B, "sparse_attention_config": {"topk": 8}}, "has sparse_attention_config, which"),
    ({**LLAMA_8B, "moe_latent_size": 512}, "has moe_latent_size, which neither"),
)


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_fields_that_neither_vllm_nor_transformers_reads_are_refused(
    tmp_path: Path, config: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_shape(write(tmp_path, config))


@pytest.mark.parametrize("text", ["", "[]", "{", '"llama"'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)


def test_a_name_on_a_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Models are not downloaded"):
        read_shape(tmp_path / "meta-llama" / "Llama-3.1-8B")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "said"),
    [
        ("int4", "auto", "dtype is 'int4', but vLLM accepts 'auto', 'half'"),
        ("auto", "fp3", "cache_dtype is 'fp3', but vLLM accepts 'auto', 'float16'"),
    ],
)
def test_a_type_that_does_not_exist_is_refused(
    tmp_path: Path, dtype: str, kv_dtype: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_shape(write(tmp_path, LLAMA_8B), dtype=dtype, kv_dtype=kv_dtype)
