"""Faulty configurations are either read or refused with one sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sizing.published import LLAMA_8B, NEMOTRON_9B, QWEN3_NEXT_80B
from tests.sizing.recorded import request
from tiered_kv.sizing.model_shape import ask_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ODD: tuple[tuple[str, Any], ...] = (
    ("num_hidden_layers", 0),
    ("num_hidden_layers", None),
    ("num_hidden_layers", "x"),
    ("num_attention_heads", 0),
    ("num_attention_heads", -7),
    ("num_attention_heads", [1]),
    ("num_key_value_heads", 3),
    ("hidden_size", 1.5),
    ("hidden_size", {"x": 1}),
    ("vocab_size", 10**30),
    ("head_dim", True),
    ("architectures", []),
    ("architectures", "x"),
    ("model_type", None),
    ("model_type", 3),
    ("quantization_config", "x"),
    ("quantization_config", {"quant_method": "x"}),
    ("torch_dtype", "int4"),
)


def test_a_wrong_field_is_accepted_or_refused_with_one_sentence() -> None:
    pytest.importorskip("vllm")
    models = (LLAMA_8B, NEMOTRON_9B, QWEN3_NEXT_80B)
    asked = [
        request({**models[at % len(models)], name: value}) for at, (name, value) in enumerate(ODD)
    ]
    answers = ask_vllm([*asked, request(LLAMA_8B)])
    assert answers.pop()["parameters"] == 8_030_261_248, "the others did no harm"
    errors = [one["error"] for one in answers if "error" in one]
    assert len(errors) > len(ODD) / 2
    for error in errors:
        assert "\n" not in error
        assert len(error) < 400
        assert not re.search(r"/(served|plain)", error)
