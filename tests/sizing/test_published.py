"""Published models: each is planned as vLLM serves it, or refused with what is not known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sizing.recorded import answers, key_of, published

PUBLISHED = dict(published())
ANSWERS = answers()
NAMED = re.compile(r"-(\d+(?:\.\d+)?)B\b")

REFUSED: dict[str, str] = {}
"""Models that are not planned, and the start of the sentence that says why."""


def answer(model: str) -> dict[str, Any]:
    return ANSWERS[key_of(PUBLISHED[model])]


@pytest.mark.parametrize("model", [one for one in PUBLISHED if one not in REFUSED])
def test_a_model_has_about_the_parameters_that_its_name_says(model: str) -> None:
    found = answer(model)
    assert 0 < found["active_parameters"] <= found["parameters"]
    if named := NAMED.search(model):
        assert found["parameters"] / 1e9 == pytest.approx(float(named[1]), rel=0.10)


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_not_known_is_named(model: str) -> None:
    assert answer(model)["error"].startswith(REFUSED[model])
